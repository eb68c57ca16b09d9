"""One small decoder as users of flax, equinox and plain Python write it, without prejit."""

from types import SimpleNamespace
from typing import Any

import equinox
import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

VOCAB, WIDTH, HEADS, LAYERS, LONGEST = 97, 64, 4, 2, 96


def run(model, tokens, start, length, cache, *, every=False):
    """The decoder, whatever its layers are made of: a transformer with its norms before each part."""
    place = start[:, None] + jnp.arange(tokens.shape[1])
    valid = jnp.arange(tokens.shape[1]) < length[:, None]
    x = model.embed(tokens) + model.places(jnp.minimum(place, LONGEST - 1))
    following = []
    for layer, (keys, values) in zip(model.layers, cache, strict=True):
        q, k, v = jnp.split(layer.qkv(layer.norm1(x)), 3, -1)
        rows, slots = jnp.arange(len(tokens))[:, None], jnp.where(valid, place, keys.shape[1])
        keys = keys.at[rows, slots].set(k.astype(keys.dtype), mode="drop")
        values = values.at[rows, slots].set(v.astype(values.dtype), mode="drop")
        seen = jnp.arange(keys.shape[1]) <= place[..., None]
        x = x + layer.out(_attended(q, keys, values, seen))
        x = x + layer.down(jax.nn.gelu(layer.up(layer.norm2(x))))
        following.append((keys, values))
    if not every:
        x = x[jnp.arange(len(x)), jnp.maximum(length, 1) - 1]
    return model.head(model.norm(x)), tuple(following)


def _attended(q, keys, values, seen):
    def heads(x):
        return x.astype(jnp.float32).reshape(*x.shape[:2], HEADS, -1)

    scores = jnp.einsum("bthd,bshd->bhts", heads(q), heads(keys)) / (WIDTH // HEADS) ** 0.5
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -1e30), -1)
    return jnp.einsum("bhts,bshd->bthd", weights, heads(values)).reshape(q.shape)


def empty(rows, positions, dtype):
    one = jnp.zeros((rows, positions, WIDTH), dtype)
    return ((one, one),) * LAYERS


def _random(seed, *shape):
    random = np.random.default_rng(seed)
    return jnp.asarray(random.standard_normal(shape, np.float32) * np.float32(0.15))


def _linear(seed, inputs, outputs, rngs):
    def init(key, shape, dtype):
        return _random(seed, *shape)

    return nnx.Linear(inputs, outputs, kernel_init=init, rngs=rngs)


def _embed(seed, count, rngs):
    return nnx.Embed(
        count, WIDTH, embedding_init=lambda key, shape, dtype: _random(seed, *shape), rngs=rngs
    )


class NnxLayer(nnx.Module):
    def __init__(self, seed, rngs):
        self.norm1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.qkv = _linear(seed, WIDTH, 3 * WIDTH, rngs)
        self.out = _linear(seed + 1, WIDTH, WIDTH, rngs)
        self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = _linear(seed + 2, WIDTH, 2 * WIDTH, rngs)
        self.down = _linear(seed + 3, 2 * WIDTH, WIDTH, rngs)


class NnxDecoder(nnx.Module):
    vocab_size = VOCAB
    max_positions = LONGEST

    def __init__(self, rngs):
        self.embed, self.places = _embed(1, VOCAB, rngs), _embed(2, LONGEST, rngs)
        self.layers = nnx.List([NnxLayer(10 * (at + 1), rngs) for at in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.last = _linear(3, WIDTH, VOCAB, rngs)
        self.dropout = nnx.Dropout(0.5, deterministic=True, rngs=rngs)  # it holds random state

    def head(self, x):
        return self.dropout(self.last(x))

    def make_cache(self, rows, positions, dtype):
        return empty(rows, positions, dtype)

    def __call__(self, *arguments, every=False):
        return run(self, *arguments, every=every)


class LinenLayer(flax.linen.Module):
    def setup(self):
        self.norm1, self.norm2 = flax.linen.LayerNorm(), flax.linen.LayerNorm()
        self.qkv, self.out = flax.linen.Dense(3 * WIDTH), flax.linen.Dense(WIDTH)
        self.up, self.down = flax.linen.Dense(2 * WIDTH), flax.linen.Dense(WIDTH)


class LinenDecoder(flax.linen.Module):
    vocab_size: int = VOCAB
    max_positions: int | None = LONGEST

    def setup(self):
        self.embed = flax.linen.Embed(VOCAB, WIDTH)
        self.places = flax.linen.Embed(LONGEST, WIDTH)
        self.layers = [LinenLayer() for _ in range(LAYERS)]
        self.norm, self.head = flax.linen.LayerNorm(), flax.linen.Dense(VOCAB)

    def make_cache(self, rows, positions, dtype):
        return empty(rows, positions, dtype)

    def __call__(self, tokens, start, length, cache, *, every=False):
        return run(self, tokens, start, length, cache, every=every)


class Matrix(equinox.Module):
    weight: Any

    def __call__(self, x):
        return x @ self.weight


class Table(equinox.Module):
    weight: Any

    def __call__(self, index):
        return self.weight[index]


class Norm(equinox.Module):
    weight: Any

    def __call__(self, x):
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * self.weight


class EquinoxLayer(equinox.Module):
    norm1: Norm
    qkv: Matrix
    out: Matrix
    norm2: Norm
    up: Matrix
    down: Matrix


def _layer(seed):
    return EquinoxLayer(
        Norm(jnp.ones(WIDTH)),
        Matrix(_random(seed, WIDTH, 3 * WIDTH)),
        Matrix(_random(seed + 1, WIDTH, WIDTH)),
        Norm(jnp.ones(WIDTH)),
        Matrix(_random(seed + 2, WIDTH, 2 * WIDTH)),
        Matrix(_random(seed + 3, 2 * WIDTH, WIDTH)),
    )


class EquinoxDecoder(equinox.Module):
    embed: Table
    places: Table
    layers: list[EquinoxLayer]
    norm: Norm
    head: Matrix
    vocab_size: int = VOCAB
    max_positions: int | None = None

    def make_cache(self, rows, positions, dtype):
        return empty(rows, positions, dtype)

    def __call__(self, *arguments, every=False):
        return run(self, *arguments, every=every)


class PlainDecoder:
    """No pytree: its attributes hold the arrays."""

    vocab_size = VOCAB
    max_positions = LONGEST

    def __init__(self):
        self.embed, self.places = Table(_random(1, VOCAB, WIDTH)), Table(_random(2, LONGEST, WIDTH))
        self.layers = [_layer(10 * (at + 1)) for at in range(LAYERS)]
        self.norm, self.head = Norm(jnp.ones(WIDTH)), Matrix(_random(3, WIDTH, VOCAB))

    def make_cache(self, rows, positions, dtype):
        return empty(rows, positions, dtype)

    def __call__(self, *arguments, every=False):
        return run(self, *arguments, every=every)


class Translator:
    """An encoder-decoder: each token also sees the mean of the source's embeddings."""

    vocab_size = VOCAB
    max_positions = LONGEST

    def __init__(self):
        vars(self).update(vars(PlainDecoder()))

    def source(self, rows, size):
        return jax.ShapeDtypeStruct((rows, size), jnp.int32)

    def encode(self, source, length, positions, dtype):
        valid = jnp.arange(source.shape[1]) < length[:, None]
        memory = jnp.where(valid[..., None], self.embed(source), 0)
        return {"memory": memory, "length": length, "text": empty(len(source), positions, dtype)}

    def __call__(self, tokens, start, length, cache, *, every=False):
        places = jnp.arange(cache["memory"].shape[1]) < cache["length"][:, None]
        mean = (cache["memory"] * places[..., None]).sum(1) / cache["length"][:, None]
        parts = SimpleNamespace(**vars(self))
        parts.embed = lambda index: self.embed(index) + mean[:, None]
        logits, text = run(parts, tokens, start, length, cache["text"], every=every)
        return logits, {**cache, "text": text}


def nnx_decoder():
    return NnxDecoder(nnx.Rngs(0))


def equinox_decoder():
    plain = PlainDecoder()
    return EquinoxDecoder(plain.embed, plain.places, plain.layers, plain.norm, plain.head)


linen_decoder = LinenDecoder()


def linen_variables():
    one = jnp.ones(1, jnp.int32)
    arguments = (one[:, None], one * 0, one, empty(1, 4, "float32"))
    shapes = jax.eval_shape(linen_decoder.init, jax.random.key(0), *arguments)
    seeds = iter(range(1000))

    def draw(path, shape):
        value = _random(next(seeds), *shape.shape)
        return value + 1 if path[-1].key == "scale" else value

    return jax.tree_util.tree_map_with_path(draw, shapes)


def greedy(model, prompt, count, positions, source=None):
    """What the model writes, step by step, each time from an empty cache."""

    @jax.jit
    def logits_of(tokens, length):
        if source is None:
            cache = model.make_cache(1, positions, "float32")
        else:
            read = jnp.array([source], jnp.int32), jnp.array([len(source)], jnp.int32)
            cache = model.encode(*read, positions, "float32")
        return model(tokens, length * 0, length, cache)[0]

    tokens = list(prompt)
    for _ in range(count):
        padded = np.array([tokens + [0] * (positions - len(tokens))], np.int32)
        tokens.append(int(logits_of(padded, np.array([len(tokens)], np.int32))[0].argmax()))
    return tokens[len(prompt) :]
