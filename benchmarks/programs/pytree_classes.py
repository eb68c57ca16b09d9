"""Classes that are pytrees: of chex, of flax.struct, of jax by three ways, in and out of jit."""

import collections
from dataclasses import dataclass, field

import chex
import flax.struct
import jax
import jax.numpy as jnp


@chex.dataclass(frozen=True)
class Batch:
    x: chex.Array
    y: chex.Array


@flax.struct.dataclass
class Model:
    w: jax.Array
    name: str = flax.struct.field(pytree_node=False, default="linear")


@jax.tree_util.register_dataclass
@dataclass
class State:
    model: Model
    history: list = field(default_factory=list)
    step: int = 0
    rate: float = field(default=0.1, metadata={"static": True})


@jax.tree_util.register_pytree_node_class
class Window:
    def __init__(self, values, size):
        self.values, self.size = values, size

    def tree_flatten(self):
        return (self.values,), self.size

    @classmethod
    def tree_unflatten(cls, size, children):
        return cls(*children, size)


Pair = collections.namedtuple("Pair", "first second")


@jax.jit
def update(state, batch):
    error = batch.x @ state.model.w - batch.y
    w = state.model.w - state.rate * batch.x.T @ error / len(error)
    return State(
        state.model.replace(w=w),
        [*state.history[-1:], jnp.sum(error**2)],
        state.step + 1,
        state.rate,
    )


@jax.jit
def push(window, x):
    values = jnp.concatenate([window.values, x[None]])[-window.size :]
    return Window(values, window.size), Pair(values.mean(), {"last": x, "none": None})


x = jax.random.normal(jax.random.key(0), (8, 3))
batch = Batch(x=x, y=x @ jnp.array([1.0, 2.0, 3.0]))
state, window = State(Model(jnp.zeros(3))), Window(jnp.zeros(2), 2)
for _ in range(4):
    state = update(state, batch)
    window, pair = push(window, state.history[-1])
    print(
        type(state).__name__, state.model.name, state.step, [float(each) for each in state.history]
    )
    print(window.values.tolist(), pair.first.item(), pair.second["last"].item(), pair._fields)
