"""A decoder and an encoder-decoder that keep all rules, and one that breaks each: `BROKEN`.

Both attend to a cache of positions and carry a state of the whole text. Each broken model changes one method.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from prejit.compiler.models.parameters import Parametrized

V, D, LONGEST = 19, 8, 64


@dataclass(frozen=True)
class Layer:
    """One layer: attention, and a decaying sum of the text."""

    embedding: Any
    places: Any
    mixing: Any

    vocab_size = V
    max_positions = LONGEST

    def zeros(self, rows, positions, dtype):
        keys = jnp.zeros((rows, positions, D), dtype)
        return {"keys": keys, "values": keys, "state": jnp.zeros((rows, D))}

    def __call__(self, tokens, start, length, cache, *, every=False):
        positions = self.positions(start, tokens.shape[1])
        x = self.normalized(self.embedding[tokens] + self.places[positions])
        query, keys, values = x @ self.mixing[0], x @ self.mixing[1], x @ self.mixing[2]
        cache = dict(cache)
        cache["keys"] = self.write(cache["keys"], keys, start, length)
        cache["values"] = self.write(cache["values"], values, start, length)
        sums, cache["state"] = self.summed(cache["state"], x, length)
        seen = self.visible(positions, cache)
        mixed = attention(query, cache["keys"], cache["values"], seen) + sums
        mixed = self.with_source(mixed @ self.mixing[3] + x, cache)
        wanted = mixed if every else self.last(mixed, length)
        return (wanted @ self.embedding.T).astype(jnp.float32), cache

    def positions(self, start, count):
        return start[:, None] + jnp.arange(count)

    def normalized(self, x):
        return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True))

    def write(self, array, new, start, length):
        token = jnp.arange(new.shape[1])
        places = jnp.where(token < length[:, None], start[:, None] + token, array.shape[1])
        rows = jnp.arange(len(new))[:, None]
        return array.at[rows, places].set(new.astype(array.dtype), mode="drop")

    def visible(self, positions, cache):
        return jnp.arange(cache["keys"].shape[1]) <= positions[..., None]

    def summed(self, state, x, length):
        def step(state, inputs):
            token, valid = inputs
            state = jnp.where(valid[:, None], 0.7 * state + token, state)
            return state, state

        valid = jnp.arange(x.shape[1])[:, None] < length
        state, found = jax.lax.scan(step, state, (x.swapaxes(0, 1), valid))
        return found.swapaxes(0, 1), state

    def with_source(self, x, cache):
        return x

    def last(self, x, length):
        return x[jnp.arange(len(x)), jnp.maximum(length - 1, 0)]


class Tiny(Layer):
    def make_cache(self, rows, positions, dtype):
        return self.zeros(rows, positions, dtype)


class TinyWriter(Layer):
    """An encoder-decoder, which also attends to a source of tokens."""

    def source(self, rows, size):
        return jax.ShapeDtypeStruct((rows, size), jnp.int32)

    def encode(self, source, length, positions, dtype):
        cache = self.zeros(len(source), positions, dtype)
        return {**cache, "source": self.embedding[source].astype(dtype), "length": length}

    def summed(self, state, x, length):
        return jnp.zeros_like(x), state  # arrays without positions do not change

    def with_source(self, x, cache):
        places = jnp.arange(cache["source"].shape[1])
        seen = places < cache["length"][:, None, None]
        seen = jnp.broadcast_to(seen, (*x.shape[:2], len(places)))
        return x + attention(x, cache["source"], cache["source"], seen)


def attention(query, keys, values, seen):
    scores = jnp.einsum("btd,bsd->bts", query, keys.astype(jnp.float32))
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
    return jnp.einsum("bts,bsd->btd", weights, values.astype(jnp.float32))


def random_model(kind):
    random = np.random.default_rng(0)
    shapes = {"embedding": (V, D), "places": (LONGEST, D), "mixing": (4, D, D)}
    return kind(**{name: random.standard_normal(each, np.float32) for name, each in shapes.items()})


def apart(model):
    """The model apart from its parameters, and their values."""
    values = {field.name: getattr(model, field.name) for field in fields(model)}
    shapes = {name: jax.ShapeDtypeStruct(v.shape, v.dtype) for name, v in values.items()}
    return Parametrized(shapes, lambda bound: replace(model, **bound)), values


BROKEN = []
"""The check that must find it, the model, and a part of what the finding says."""


def breaks(check, says):
    def add(kind):
        BROKEN.append((check, kind, says))
        return kind

    return add


def _no_vocabulary(model):
    raise AttributeError


NUMBER = "an integer of at least"
NONE = property(_no_vocabulary)
for _check, _of, _changes, _says in (
    ("attributes", Tiny, {"vocab_size": NONE}, f"attribute vocab_size, {NUMBER} 2, found none"),
    ("attributes", Tiny, {"max_positions": 4}, f"expected None or {NUMBER} 12, found 4"),
    ("attributes", TinyWriter, {"source": None}, "expected a method source, found none in Broken"),
    ("attributes", Tiny, {"make_cache": None}, "a method make_cache, found none in Broken"),
    (  # whatever the start of a chunk is
        "chunks",
        Tiny,
        {"positions": lambda self, start, count: Layer.positions(self, 0 * start, count)},
        "between the whole prompt and single tokens",
    ),
    (  # over rows
        "batch",
        Tiny,
        {"normalized": lambda self, x: x / jnp.sqrt(jnp.mean(x * x, (0, 2), keepdims=True))},
        "expected a row alone to give what it gives beside others",
    ),
    (
        "fresh",
        Tiny,
        {"visible": lambda self, positions, cache: jnp.ones((*positions.shape, 1), bool)},
        "expected a text at start 0 to ignore what another text left in the cache",
    ),
    ("rewind", TinyWriter, {"summed": Layer.summed}, "drafts had never been in the cache"),
    ("encode", TinyWriter, {"with_source": Layer.with_source}, "other logits for other sources"),
):
    breaks(_check, _says)(type("Broken", (_of,), _changes))


def breaks_cache(says):
    """Another cache of `Tiny`: the function gets what makes a right one, rows and positions."""

    def add(change):
        def make_cache(self, rows, positions, dtype):
            return change(lambda r, s: Tiny.make_cache(self, r, s, dtype), rows, positions)

        breaks("cache", says)(type("Cache", (Tiny,), {"make_cache": make_cache}))

    return add


AXIS = "expected one axis of exactly S, or none that S changes, found"
ROWS_FIRST = "expected [B, ...] with the rows on axis 0 alone, found"
breaks_cache(f"cache['keys']: {ROWS_FIRST} (16, 3, 8)")(
    lambda right, b, s: {**right(b, s), "keys": jnp.zeros((s, b, D))}
)
breaks_cache(f"cache['keys']: {AXIS} (3, 17, 8)")(lambda right, b, s: right(b, s + 1))
breaks_cache("(3, 16, 8) for S = 16 and (3, 32, 8) for")(lambda right, b, s: right(b, min(s, 32)))
breaks_cache("(3, 16, 16) for S")(lambda right, b, s: {**right(b, s), "mask": jnp.zeros((b, s, s))})
breaks_cache("expected one tree of arrays for any number of positions")(
    lambda right, b, s: {**right(b, s), "pages": [jnp.zeros(b)] * (s // 16)}
)
breaks_cache("cache['key']: expected a dtype that a bundle can hold, found key<fry>")(
    lambda right, b, s: {**right(b, s), "key": jax.random.split(jax.random.key(0), b)}
)


@breaks("logits", "expected float32 with B = 1, T = 1, every = False, found bfloat16")
class NarrowLogits(Tiny):
    def __call__(self, *inputs, every=False):
        logits, cache = super().__call__(*inputs, every=every)
        return logits.astype(jnp.bfloat16), cache


@breaks("returned", "cache['keys']: expected bfloat16 [3, 16, 8], as it went in with dtype 'bfl")
class WidenedCache(Tiny):
    def write(self, array, new, start, length):
        return super().write(array.astype(jnp.float32), new, start, length)


@breaks("finite", "found NaN or infinity in cache['state']")
class MeanOfNothing(Tiny):
    def summed(self, state, x, length):
        found, _ = super().summed(state, x, length)
        valid = jnp.arange(x.shape[1]) < length[:, None]
        return found, jnp.sum(x * valid[..., None], 1) / length[:, None]


@breaks("sensitive", "expected other logits where the tokens before the last differ")
class WithoutMemory(Tiny):
    def __call__(self, tokens, start, length, cache, *, every=False):
        _, cache = super().__call__(tokens, start, length, cache)
        x = self.embedding[tokens] @ self.mixing[0]
        return (x if every else self.last(x, length)) @ self.embedding.T, cache


@breaks("padding", "after the prompt, with other padding")
class SumsPadding(Tiny):
    def summed(self, state, x, length):
        found, new = super().summed(state, x, jnp.full_like(length, x.shape[1]))
        return found, jnp.where((length > 0)[:, None], new, state)


@breaks("end", "expected padding that runs past the last of 16 positions to change nothing")
class WritesBlocks(Tiny):
    def write(self, array, new, start, length):
        def row(array, new, start, length):
            block = jax.lax.dynamic_slice(array, (start, 0), new.shape)
            valid = (jnp.arange(len(new)) < length)[:, None]
            return jax.lax.dynamic_update_slice(array, jnp.where(valid, new, block), (start, 0))

        return jax.vmap(row)(array, new.astype(array.dtype), start, length)


@breaks("idle", "found a change in cache['state'] at its own start, with T = 1")
class DecaysIdleRows(Tiny):
    def summed(self, state, x, length):
        found, new = super().summed(state, x, length)
        return found, jnp.where((length > 0)[:, None], new, 0.99 * new)


@breaks("context", "from one of 12")
class FillsFromTheEnd(Tiny):
    def write(self, array, new, start, length):
        return super().write(array[:, ::-1], new, start, length)[:, ::-1]

    def visible(self, positions, cache):
        return super().visible(positions, cache)[..., ::-1]


@breaks("every", "at the tokens before")
class EveryIsLast(Tiny):
    def __call__(self, tokens, start, length, cache, *, every=False):
        logits, cache = super().__call__(tokens, start, length, cache)
        if every:
            logits = jnp.repeat(logits[:, None], tokens.shape[1], 1)
        return logits, cache


@breaks("every", "in the next call")
class EveryKeepsTheCache(Tiny):
    def __call__(self, tokens, start, length, cache, *, every=False):
        logits, after = super().__call__(tokens, start, length, cache, every=every)
        return logits, cache if every else after


@breaks("encode", "with other padding of the source")
class SeesSourcePadding(TinyWriter):
    def encode(self, source, length, positions, dtype):
        whole = jnp.full_like(length, source.shape[1])
        return super().encode(source, whole, positions, dtype)


@breaks("encode", "after the cache was padded")
class CountsSourcePlaces(TinyWriter):
    def with_source(self, x, cache):
        return super().with_source(x, cache) / cache["source"].shape[1]

    def encode(self, source, length, positions, dtype):
        cache = super().encode(source, length, positions, dtype)
        return {**cache, "source": cache["source"] * source.shape[1]}
