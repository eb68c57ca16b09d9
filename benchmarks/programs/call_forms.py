"""Jitted methods, class and static methods, partials, defaults, keyword-only, *args and **kwargs."""

import functools

import jax
import jax.numpy as jnp


class Filter:
    def __init__(self, decay):
        self.decay = decay

    def __hash__(self):
        return hash(self.decay)

    def __eq__(self, other):
        return isinstance(other, Filter) and self.decay == other.decay

    @functools.partial(jax.jit, static_argnums=0)
    def smooth(self, x):
        return jax.lax.scan(lambda c, x: (self.decay * c + x,) * 2, 0.0, x)[1]

    @classmethod
    @functools.partial(jax.jit, static_argnums=0)
    def name_length(cls, x):
        return x * len(cls.__name__)

    @staticmethod
    @jax.jit
    def twice(x):
        return 2 * x

    def __call__(self, x):
        return jnp.sum(x) * self.decay


@jax.jit
def blend(a, b=2.0, /, *more, scale=1.0, **named):
    return scale * (a + b + sum(more)) + sum(
        value * len(name) for name, value in sorted(named.items())
    )


x = jnp.arange(4.0)
for decay in (0.5, 0.9):
    each = Filter(decay)
    print(each.smooth(x).tolist(), each.twice(x).tolist(), Filter.name_length(x).tolist())
    print(jax.jit(each)(x).item(), jax.jit(each.__call__)(x).item())
print(
    blend(1.0).item(),
    blend(1.0, 3.0).item(),
    blend(x, x, x, x).tolist(),
    blend(x, scale=2).tolist(),
)
print(blend(1, 2, 3, q=4, long_name=5.0).item(), blend(1, scale=True, z=x).tolist())
print(jax.jit(functools.partial(blend, x, scale=3.0))(1.0).tolist())
triple = jax.jit(lambda tree: jax.tree.map(lambda leaf: 3 * leaf, tree))
print(triple(({"a": 1, "b": [2.0, None]}, (), True)), triple([1 + 2j])[0].item())
