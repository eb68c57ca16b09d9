"""Rules of derivatives of one's own, implicit ones, Hessians and Jacobians, with grad outside of jit."""

import functools

import jax
import jax.numpy as jnp


@jax.custom_vjp
def clip_gradient(low, high, x):
    return x


def forward(low, high, x):
    return x, (low, high)


def backward(bounds, g):
    return None, None, jnp.clip(g, *bounds)


clip_gradient.defvjp(forward, backward)


@jax.custom_jvp
def log1pexp(x):
    return jnp.log(1.0 + jnp.exp(x))


@log1pexp.defjvp
def log1pexp_jvp(primals, tangents):
    (x,), (dot,) = primals, tangents
    return log1pexp(x), (1 - 1 / (1 + jnp.exp(x))) * dot


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def fixed_point(function, a, start):
    return jax.lax.fori_loop(0, 40, lambda _, x: function(a, x), start)


def fixed_forward(function, a, start):
    x = fixed_point(function, a, start)
    return x, (a, x)


def fixed_backward(function, kept, g):
    a, x = kept
    _, pull_a = jax.vjp(lambda a: function(a, x), a)
    _, pull_x = jax.vjp(lambda x: function(a, x), x)
    u = jax.lax.fori_loop(0, 40, lambda _, u: g + pull_x(u)[0], g)
    return pull_a(u)[0], jnp.zeros_like(x)


fixed_point.defvjp(fixed_forward, fixed_backward)
newton = jax.jit(lambda a: fixed_point(lambda a, x: 0.5 * (x + a / x), a, jnp.ones_like(a)))
x = jnp.linspace(-2.0, 2.0, 5)
print(jax.grad(lambda x: jnp.sum(clip_gradient(-0.5, 0.5, x) ** 3))(x).tolist())
print(jax.jit(jax.grad(log1pexp))(100.0).item(), jax.grad(jax.jit(log1pexp))(3.0).item())
print(newton(2.0).item(), jax.grad(newton)(2.0).item(), jax.grad(jax.grad(jnp.tanh))(0.3).item())
energy = jax.jit(lambda x: jnp.sum(jnp.sin(x) * x[::-1]))
print(jax.hessian(energy)(x).tolist())
print(jax.jit(jax.jacfwd(lambda x: jnp.outer(x, x)[0]))(x).tolist())
print(jax.jvp(energy, (x,), (jnp.ones(5),))[1].item(), jax.linearize(energy, x)[1](x).item())
