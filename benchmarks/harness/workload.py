"""The work of every row, and the lines by which a child process reports it. Standard library only.

The parent holds the clock. It starts just before the child's process and stops at lines of the child:

    LOADED         the model is loaded (only prejit's children print it)
    FIRST          the first token is a Python int
    LAST {json}    the work is done; the figures that the child measured itself

This module imports nothing that would delay a child's first token.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

EVENTS = ("LOADED", "FIRST", "LAST")

LAYERS, WIDTH, HEADS, VOCABULARY, POSITIONS = 12, 768, 12, 50257, 1024
"""Sizes of GPT-2 with 124 million parameters."""
HEAD_SIZE = WIDTH // HEADS
EPSILON = 1e-5


@dataclass(frozen=True)
class Llama:
    """Sizes of a decoder like Llama: grouped queries, gated product, no biases.

    Attributes:
        layers: number of layers, L.
        width: width of the model, D.
        heads: number of query heads N, each of width / heads.
        kv_heads: number of key/value heads, K.
        inner: width of the gated product.
        vocabulary: number of tokens, V.
        positions: longest context.
        tied: whether the head is the embedding.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int
    positions: int
    tied: bool = True

    @property
    def matrix_weights(self) -> int:
        """Number of weights that one decode step reads: those of all products."""
        shared = self.kv_heads * self.width // self.heads
        layer = self.width * (2 * self.width + 2 * shared + 3 * self.inner)
        return self.layers * layer + self.vocabulary * self.width


LLAMA_1B = Llama(16, 2048, 32, 8, 8192, 128256, 131072)
"""The shape of Llama 3.2 1B: 1.24 billion parameters."""
LLAMA_3B = Llama(28, 3072, 24, 8, 8192, 128256, 131072)
"""The shape of Llama 3.2 3B."""
LLAMA_8B = Llama(32, 4096, 32, 8, 14336, 128256, 2048, tied=False)
"""The shape of Llama 3.1 8B."""
LLAMA_TINY = Llama(4, 128, 4, 2, 384, 4096, 1024)
"""A model of 5 MB, which shows the cost of many programs and nothing else."""

PROMPT_TOKENS, NEW_TOKENS, CONTEXT = 32, 64, 128
"""Tokens of the main rows. CONTEXT is the length of the KV cache of both JAX and prejit."""
PREFILL_TOKENS = (512, 2048)
"""Tokens of the prompts that a warm process computes."""
LONG_PROMPTS = (1000, 4000)
"""Tokens of prompts that a text goes on after."""
LONG_CONTEXTS = tuple(tokens + 2 * NEW_TOKENS for tokens in (512, 1000, 2048, 4000))
"""Contexts that one bundle has together: to build a billion parameters for each apart would take hours."""
BATCHES = (4, 8)
"""Numbers of rows that run together."""
CHUNK_TOKENS = 512
"""prejit computes longer prompts in chunks of so many tokens, as llama.cpp does."""
PREFILL_RUNS, PREFILL_SECONDS = (1, 7), 15.0
"""A warm process computes so many prompts at least and at most, and no further one after so long."""
SHORT_PROMPT_TOKENS, SHORT_NEW_TOKENS = 4, 15
"""Tokens of a short request, those of a published guide to KV caches in JAX."""
WARM_REQUESTS, WARM_SECONDS = 2, 3.0
"""A warm process repeats a short request at least so often and at least so long."""
ENCODER_SHAPES = (
    *((1, length) for length in (16, 32, 64, 128, 256, 512)),
    *((batch, length) for batch in (2, 4, 8, 16, 32) for length in (32, 64, 128)),
    (64, 128),
)
"""Shapes (sentences, tokens) of the encoder: the 22 of manifests/encoder.toml."""
BYTES: dict[str, float] = {"float32": 4, "bfloat16": 2, "int8": 1, "int4": 4.5 / 8}
"""Bytes of one stored weight by dtype; those of int4 with the scale of each 32."""
HEAD_BYTES = {**BYTES, "int4": 1}
"""Bytes of one weight of the head, which int4 leaves in int8."""

Sizes = dict[str, tuple[int, ...]]
FEW: Sizes = {"batch": (1,), "prompt": (32,), "context": (128, 256)}
"""Four programs: batch x context x (prompts + 1 for decode)."""


def threads() -> int:
    """Return the number of threads of an engine: two, or one where this process has one CPU."""
    return min(2, len(os.sched_getaffinity(0)))


def prompt_ids(count: int) -> list[int]:
    """Return fixed token ids, the same on every machine."""
    state, ids = 1, []
    for _ in range(count):
        state = state * 48271 % (2**31 - 1)
        ids.append(state % VOCABULARY)
    return ids


def prompts(count: int, batch: int) -> list[list[int]]:
    """Return a batch of prompts of one length. The first is that of batch 1, so tokens are comparable."""
    ids = prompt_ids(count * batch)
    return [ids[row * count : (row + 1) * count] for row in range(batch)]


def prefill_prompt(number: int, count: int, vocabulary: int = VOCABULARY) -> list[int]:
    """Return `count` ids, different for each number: some engines cache repeated prompts."""
    first, *others = (token % vocabulary for token in prompt_ids(count))
    return [(first + number) % vocabulary, *others]


def decode_bytes(dtype: str = "float32") -> int:
    """Return the bytes of weights that one decode step of GPT-2 must read, without the scales of int8.

    A step reads all matrices except the position embedding, where it reads one row. The head is the token
    embedding.
    """
    vectors = LAYERS * 13 * WIDTH + 2 * WIDTH + WIDTH
    return _matrix_bytes(dtype, LAYERS * 12 * WIDTH * WIDTH, VOCABULARY * WIDTH) + 4 * vectors


def llama_bytes(sizes: Llama, dtype: str) -> int:
    """Return the bytes of matrices that one decode step of a model must read."""
    head = sizes.vocabulary * sizes.width
    return _matrix_bytes(dtype, sizes.matrix_weights - head, head)


def _matrix_bytes(dtype: str, weights: int, head: int) -> int:
    return int(BYTES[dtype] * weights + HEAD_BYTES[dtype] * head)


def say_first() -> None:
    """Report that the first token is a Python int."""
    print("FIRST", flush=True)


def say_last(**facts: object) -> None:
    """Report that the work is done, with the child's own figures."""
    import json

    print("LAST " + json.dumps(facts), flush=True)


def stream(tokens: Iterable[int], batch: int = 1) -> dict[str, object]:
    """Consume a generation token by token, and report the first.

    The decode rate counts from the second token to the last. What a runtime does once, when its decode
    program first runs (JAX compiles it), is in `second_token_seconds`.

    Args:
        tokens: tokens of the first row, each when the step of all rows is done.
        batch: number of rows. The rate counts the tokens of all rows.

    Returns:
        Facts for `say_last`.
    """
    found: list[int] = []
    times: list[float] = []
    for token in tokens:
        times.append(time.perf_counter())
        if not found:
            say_first()
            modules = [*sys.modules]
        found.append(token)
    return {
        "tokens": found,
        "decode_tokens_per_second": batch * (len(found) - 2) / (times[-1] - times[1]),
        "second_token_seconds": times[1] - times[0],
        "modules": len(modules),
        "modules_of_prejit": sum(name.startswith("prejit.") for name in modules),
    }


def requests(request: Callable[[], Iterable[int]]) -> dict[str, object]:
    """Time the first short request of a process, then the same one again and again.

    Args:
        request: function that yields the tokens of one answer.

    Returns:
        Facts for `say_last`. `request_seconds` is the time of the first request, and
        `rest_seconds` what follows its first token.
    """
    started = time.perf_counter()
    found: list[int] = []
    for token in request():
        if not found:
            say_first()
            begun = time.perf_counter()
        found.append(token)
    ended = time.perf_counter()
    times: list[float] = []
    while len(times) < WARM_REQUESTS or sum(times) < WARM_SECONDS:
        again = time.perf_counter()
        assert list(request()) == found
        times.append(time.perf_counter() - again)
    return {
        "tokens": found,
        "request_seconds": ended - started,
        "rest_seconds": ended - begun,
        "warm_tokens_per_second": len(found) / statistics.median(times),
    }


def prefill(
    first_token: Callable[[list[int]], int], count: int, vocabulary: int = VOCABULARY
) -> dict[str, object]:
    """Time prompts in a warm process.

    Args:
        first_token: function that returns the token after a prompt.
        count: length of the prompts.
        vocabulary: number of tokens of the model.

    Returns:
        Facts for `say_last`; `tokens` holds the token of the first prompt.
    """
    token = first_token(prefill_prompt(0, count, vocabulary))
    say_first()
    seconds: list[float] = []
    least, most = PREFILL_RUNS
    while len(seconds) < least or (len(seconds) < most and sum(seconds) < PREFILL_SECONDS):
        started = time.perf_counter()
        first_token(prefill_prompt(len(seconds) + 1, count, vocabulary))
        seconds.append(time.perf_counter() - started)
    rate = count / statistics.median(seconds)
    return {"tokens": [token], "prefill_tokens_per_second": rate}
