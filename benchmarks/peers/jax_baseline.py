"""Plain JAX, written as a good JAX user writes it: the baseline of prejit.

It has a static, donated KV cache, jitted prefill and decode, and the form of matrix product that XLA's CPU
backend runs best at batch 1: weights (out, in), one array a layer, dot_general contracting dimension 1 of
both.

    peers/jax_baseline.py generate WEIGHTS [BATCH TOKENS] [--bfloat16]   32 tokens in, 64 out
    peers/jax_baseline.py prefill  WEIGHTS BATCH TOKENS [--bfloat16]   prompts, one after the other
    peers/jax_baseline.py requests WEIGHTS [--op-by-op] [--no-cache]   4 tokens in, 15 out, again and again

The environment decides whether the compilation cache is cold or warm (JAX_COMPILATION_CACHE_DIR).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.harness import workload
from benchmarks.harness.workload import EPSILON, HEAD_SIZE, HEADS, LAYERS, WIDTH

Weights = dict[str, jax.Array]
Tokens = jax.Array | np.ndarray
Number = jax.Array | np.integer | int
Cache = list[tuple[jax.Array, jax.Array]]


def linear(x: jax.Array, weights: Weights, name: str) -> jax.Array:
    """Return x [B, T, in] times a weight (out, in), plus its bias."""
    return dot(x, weights[f"{name}.weight"]) + weights[f"{name}.bias"]


def dot(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Return x [..., in] times a weight (out, in), which may be bfloat16. Sums are float32."""
    contracted = (((x.ndim - 1,), (1,)), ((), ()))
    product: jax.Array = lax.dot_general(
        x.astype(weight.dtype), weight, contracted, preferred_element_type=jnp.float32
    )
    return product


def layer_norm(x: jax.Array, weights: Weights, name: str) -> jax.Array:
    """Apply layer normalization over the last axis."""
    scale, offset = weights[f"{name}.weight"], weights[f"{name}.bias"]
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x - mean).mean(-1, keepdims=True)
    normal: jax.Array = (x - mean) * lax.rsqrt(variance + EPSILON)
    return normal * scale + offset


def heads(x: jax.Array) -> jax.Array:
    """Return [B, T, D] as [B, N, T, H]."""
    return x.reshape(*x.shape[:2], HEADS, HEAD_SIZE).swapaxes(1, 2)


def forward(
    weights: Weights, tokens: Tokens, start: Number, last: Number, cache: Cache
) -> tuple[jax.Array, Cache]:
    """Run GPT-2 on T new positions (openai/gpt-2, src/model.py).

    Args:
        weights: weights by their published names.
        tokens: int32 [B, T].
        start: position of the first of them.
        last: index of the token whose logits give the next one.
        cache: per layer, keys and values float32 [B, N, S, H].

    Returns:
        The most likely next tokens, int32 [B], and the new cache.
    """
    count = tokens.shape[1]
    positions = lax.dynamic_slice(weights["wpe.weight"], (start, 0), (count, WIDTH))
    x = weights["wte.weight"][tokens].astype(jnp.float32) + positions
    updated = []
    for layer in range(LAYERS):
        name = f"h.{layer}"
        fused = linear(layer_norm(x, weights, f"{name}.ln_1"), weights, f"{name}.attn.c_attn")
        query, keys, values = map(heads, jnp.split(fused, 3, -1))
        keys = lax.dynamic_update_slice(cache[layer][0], keys, (0, 0, start, 0))
        values = lax.dynamic_update_slice(cache[layer][1], values, (0, 0, start, 0))
        updated.append((keys, values))
        scores = jnp.einsum("bnth,bnsh->bnts", query, keys) / np.float32(HEAD_SIZE**0.5)
        visible = jnp.arange(keys.shape[2]) <= start + jnp.arange(count)[:, None]
        attention = jax.nn.softmax(jnp.where(visible, scores, -1e30), -1)
        mixed = jnp.einsum("bnts,bnsh->bnth", attention, values)
        mixed = mixed.swapaxes(1, 2).reshape(x.shape)
        x = x + linear(mixed, weights, f"{name}.attn.c_proj")
        inner = linear(layer_norm(x, weights, f"{name}.ln_2"), weights, f"{name}.mlp.c_fc")
        x = x + linear(jax.nn.gelu(inner), weights, f"{name}.mlp.c_proj")
    x = layer_norm(lax.dynamic_slice_in_dim(x, last, 1, 1), weights, "ln_f")
    logits = dot(x[:, 0], weights["wte.weight"])
    return jnp.argmax(logits, -1).astype(jnp.int32), updated


@partial(jax.jit, donate_argnums=2)
def prefill(weights: Weights, tokens: Tokens, cache: Cache) -> tuple[jax.Array, Cache]:
    """Run a prompt int32 [B, T] with an empty cache; return the next tokens and the cache."""
    return forward(weights, tokens, 0, tokens.shape[1] - 1, cache)


@partial(jax.jit, donate_argnums=3)
def decode(
    weights: Weights, token: jax.Array, position: Number, cache: Cache
) -> tuple[jax.Array, Cache]:
    """Run one token a row, int32 [B]; return the next ones and the cache."""
    return forward(weights, token[:, None], position, 0, cache)


def empty_cache(batch: int, context: int) -> Cache:
    """Return a cache of zeros."""
    shape = (batch, HEADS, context, HEAD_SIZE)
    return [(jnp.zeros(shape), jnp.zeros(shape)) for _ in range(LAYERS)]


def load_weights(path: str) -> Weights:
    """Return the weights of a safetensors file as jax arrays."""
    from safetensors.numpy import load_file

    return {name: jnp.asarray(value) for name, value in load_file(path).items()}


def to_bfloat16(weights: Weights) -> Weights:
    """Return the weights with matrices in bfloat16, except the position embedding."""
    return {
        name: w.astype(jnp.bfloat16) if w.ndim == 2 and name != "wpe.weight" else w
        for name, w in weights.items()
    }


def generate(weights: Weights, prompts: list[list[int]], count: int) -> Iterator[int]:
    """Yield greedy tokens of the first row from the two jitted programs."""
    tokens = np.array(prompts, np.int32)
    token, cache = prefill(weights, tokens, empty_cache(len(prompts), workload.CONTEXT))
    yield int(token[0])
    for position in range(tokens.shape[1], tokens.shape[1] + count - 1):
        token, cache = decode(weights, token, np.int32(position), cache)
        yield int(token[0])


def generate_op_by_op(weights: Weights, prompt: list[int], count: int) -> Iterator[int]:
    """Yield greedy tokens with the same cache, and no function of ours jitted."""
    cache = empty_cache(1, workload.CONTEXT)
    given, start = jnp.array([prompt], jnp.int32), 0
    for _ in range(count):
        token, cache = forward(weights, given, start, given.shape[1] - 1, cache)
        start, given = start + given.shape[1], token[:, None]
        yield int(token[0])


def generate_without_cache(weights: Weights, prompt: list[int], count: int) -> Iterator[int]:
    """Yield greedy tokens op by op, all positions again for each; padded, so that no shape changes."""
    length = len(prompt) + count - 1
    tokens = np.zeros((1, length), np.int32)
    for last in range(len(prompt) - 1, length):
        tokens[0, : len(prompt)] = prompt
        token = int(forward(weights, tokens, 0, last, empty_cache(1, length))[0][0])
        prompt = [*prompt, token]
        yield token


def first_token(weights: Weights, prompt: list[int]) -> int:
    """Return the token that follows a prompt."""
    cache = empty_cache(1, len(prompt) + workload.NEW_TOKENS)
    return int(prefill(weights, np.array([prompt], np.int32), cache)[0][0])


def main(job: str, path: str, *options: str) -> None:
    """Run a job of the module's docstring."""
    weights = load_weights(path)
    if "--bfloat16" in options:
        weights = to_bfloat16(weights)
    sizes = [int(option) for option in options if option.isdecimal()]
    batch, length = sizes or (1, workload.PROMPT_TOKENS)
    if job == "generate":
        prompts = workload.prompts(length, batch)
        facts = workload.stream(generate(weights, prompts, workload.NEW_TOKENS), batch)
        workload.say_last(**facts)
    elif job == "requests":
        prompt, count = workload.prompt_ids(workload.SHORT_PROMPT_TOKENS), workload.SHORT_NEW_TOKENS
        ways: dict[tuple[str, ...], Callable[[], Iterator[int]]] = {
            (): partial(generate, weights, [prompt], count),
            ("--op-by-op",): partial(generate_op_by_op, weights, prompt, count),
            ("--op-by-op", "--no-cache"): partial(generate_without_cache, weights, prompt, count),
        }
        workload.say_last(**workload.requests(ways[options]))
    else:
        workload.say_last(**workload.prefill(partial(first_token, weights), length))


if __name__ == "__main__":
    main(*sys.argv[1:])
