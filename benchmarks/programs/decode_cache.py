"""Generate tokens with a small transformer in nnx: prefill, a donated cache, and a jitted sampler."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

LENGTH = 16


class Decoder(nnx.Module):
    def __init__(self, width, vocabulary, *, rngs):
        self.embed = nnx.Embed(vocabulary, width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, width, decode=True, rngs=rngs)
        self.mlp = nnx.Sequential(
            nnx.Linear(width, 32, rngs=rngs), nnx.relu, nnx.Linear(32, width, rngs=rngs)
        )

    def __call__(self, tokens):
        x = self.embed(tokens)
        x = x + self.attention(x)
        return self.embed.attend(x + self.mlp(x))


model = Decoder(16, 32, rngs=nnx.Rngs(0))
model.attention.init_cache((2, LENGTH, 16))


@nnx.jit
def step(model, tokens, key, temperature):
    logits = model(tokens[:, None])[:, -1]
    return jax.random.categorical(key, logits / temperature)


graph, weights, cache = nnx.split(model, nnx.Param, ...)


@functools.partial(jax.jit, donate_argnames="cache")
def pure_step(weights, cache, tokens):
    model = nnx.merge(graph, weights, cache)
    logits = model(tokens[:, None])[:, -1]
    return logits, nnx.state(model, nnx.Not(nnx.Param))


tokens = jnp.array([1, 2])
for key in jax.random.split(jax.random.key(1), 4):
    tokens = step(model, tokens, key, 0.8)
    print(tokens.tolist())
for _ in range(3):
    logits, cache = pure_step(weights, cache, tokens)
    print(logits.max().item())
    tokens = logits.argmax(-1)
