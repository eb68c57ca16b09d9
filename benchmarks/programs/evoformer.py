"""A bare evoformer and structure stack: attention over rows with pair biases, triangle updates, recycling."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Features(NamedTuple):
    msa: jax.Array
    pair: jax.Array


def dense(params, name, x):
    return x @ params[name]


def norm(x):
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def block(features, params):
    msa, pair = features
    q, k, v = jnp.split(dense(params, "qkv", norm(msa)), 3, -1)
    logits = (
        jnp.einsum("sic,sjc->sij", q, k) / q.shape[-1] ** 0.5 + dense(params, "bias", pair)[..., 0]
    )
    msa = msa + jnp.einsum("sij,sjc->sic", jax.nn.softmax(logits), v)
    outer = jnp.einsum("sic,sjd->ijcd", *jnp.split(dense(params, "outer", norm(msa)), 2, -1)) / len(
        msa
    )
    pair = pair + dense(params, "pair", outer.reshape(*pair.shape[:2], -1))
    left, right = jnp.split(dense(params, "triangle", norm(pair)), 2, -1)
    pair = pair + jnp.einsum("ikc,jkc->ijc", left, right) * jax.nn.sigmoid(
        dense(params, "gate", pair)
    )
    return Features(msa, pair)


@functools.partial(jax.jit, static_argnames="recycles")
def predict(params, msa, recycles=2):
    def recycle(_, pair):
        stack = jax.checkpoint(lambda carry, layer: (block(carry, layer), None))
        return norm(jax.lax.scan(stack, Features(msa, pair), params["layers"])[0].pair)

    residues = msa.shape[1]
    pair = jax.lax.fori_loop(0, recycles, recycle, jnp.zeros((residues, residues, 8)))
    return (pair @ params["head"])[..., 0]


sizes = {
    "qkv": (16, 48),
    "bias": (8, 1),
    "outer": (16, 8),
    "pair": (16, 8),
    "triangle": (8, 16),
    "gate": (8, 8),
}
keys = jax.random.split(jax.random.key(0), len(sizes) + 2)
layers = {
    n: 0.2 * jax.random.normal(k, (3, *s)) for k, (n, s) in zip(keys, sizes.items(), strict=False)
}
params = {"layers": layers, "head": jax.random.normal(keys[-2], (8, 1))}
msa = jax.random.normal(keys[-1], (4, 10, 16))
print(predict(params, msa)[0].tolist())
print(predict(params, msa, recycles=3)[0].tolist())
