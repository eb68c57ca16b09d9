"""Static arguments of every kind: frozen dataclasses, enums, functions, tuples, strings, partials."""

import enum
import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp


class Kind(enum.Enum):
    SUM = "sum"
    MEAN = "mean"


@dataclass(frozen=True)
class Config:
    width: int
    act: object = jnp.tanh
    kind: Kind = Kind.SUM
    scales: tuple[float, ...] = (1.0, 0.5)


@functools.partial(jax.jit, static_argnums=0)
def layer(config, x):
    for scale in config.scales:
        x = config.act(scale * x @ jnp.eye(x.shape[-1], config.width))
    return x.sum() if config.kind is Kind.SUM else x.mean()


@functools.partial(jax.jit, static_argnames=("function", "mode", "axis"))
def reduce(x, function, mode="plain", axis=None):
    return function(x if mode == "plain" else jnp.abs(x), axis=axis)


x = jax.random.normal(jax.random.key(0), (3, 4))
for config in (
    Config(4),
    Config(2),
    Config(4, jax.nn.relu),
    Config(4, kind=Kind.MEAN),
    Config(4, scales=(2.0,)),
):
    print(layer(config, x).item())
for function in (jnp.sum, jnp.max, functools.partial(jnp.mean, keepdims=True)):
    print(
        reduce(x, function).tolist(), reduce(x, function=function, mode="size", axis=(0,)).tolist()
    )
for power in (2, 3.0, True):
    print(jax.jit(lambda x, p: x.ravel()[:3] ** p, static_argnums=(1,))(x, power).tolist())
