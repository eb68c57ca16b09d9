"""What every row of the benchmark does, and how a child process tells the parent. Standard library only.

The clock of start-up runs in the parent, from just before it starts a child until the child's line comes:

    FIRST          the first token is a Python int
    ALL            so are all of the first request (where a child goes on)
    LAST {json}    the work is done; what the child measured itself

Children import nothing here that costs time before their first token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

EVENTS = ("FIRST", "ALL", "LAST")

LAYERS, WIDTH, HEADS, VOCABULARY, POSITIONS = 12, 768, 12, 50257, 1024
"""GPT-2 with 124 million parameters."""
HEAD_SIZE = WIDTH // HEADS
EPSILON = 1e-5

PROMPT_TOKENS, NEW_TOKENS, CONTEXT = 32, 64, 128
"""Of the main rows; CONTEXT is the length of the KV cache, for JAX and prejit alike."""
SHORT_PROMPT_TOKENS, SHORT_NEW_TOKENS = 4, 15
"""Of the table about the KV cache."""

BUCKETS = {
    "gpt2-4": {"batch": (1,), "prompt": (32,), "context": (128, 256)},
    "gpt2-40": {"batch": (1, 4), "prompt": (16, 32, 64, 128), "context": (128, 256, 512, 1024)},
}
"""Manifests by name. Programs: batch x context x (prompts + 1 for decode)."""


def program_count(name: str) -> int:
    """How many programs a manifest of BUCKETS has."""
    sizes = BUCKETS[name]
    return len(sizes["batch"]) * len(sizes["context"]) * (len(sizes["prompt"]) + 1)


def prompt_ids(count: int) -> list[int]:
    """Fixed token ids, the same on every machine."""
    state, ids = 1, []
    for _ in range(count):
        state = state * 48271 % (2**31 - 1)
        ids.append(state % VOCABULARY)
    return ids


def decode_bytes() -> int:
    """Bytes of float32 weights that one decode step at batch 1 must read.

    All but the position embedding, of which it reads one row. The head is the token embedding.
    """
    per_layer = 12 * WIDTH * WIDTH + 13 * WIDTH
    return 4 * (LAYERS * per_layer + 2 * WIDTH + VOCABULARY * WIDTH + WIDTH)


def kv_cache_bytes(batch: int = 1, context: int = CONTEXT) -> int:
    """Bytes of a float32 KV cache."""
    return 4 * 2 * LAYERS * batch * context * WIDTH


def say_first() -> None:
    """Tells the parent that the first token is in hand."""
    print("FIRST", flush=True)


def say_last(**facts: object) -> None:
    """Tells the parent that the work is done, with the child's own figures and its memory."""
    import json

    print("LAST " + json.dumps({**facts, "memory": memory_bytes()}), flush=True)


def stream(tokens: Iterable[int]) -> dict[str, object]:
    """Consumes a generation token by token, and tells the parent of the first.

    The decode rate counts from the second token to the last: what a runtime does once, when its decode
    program runs first (JAX: compiling it), is `second_token_seconds`.

    Returns:
        Facts for `say_last`.
    """
    found: list[int] = []
    times: list[float] = []
    for token in tokens:
        times.append(time.perf_counter())
        if not found:
            say_first()
        found.append(token)
    return {
        "tokens": found,
        "decode_tokens_per_second": (len(found) - 2) / (times[-1] - times[1]),
        "second_token_seconds": times[1] - times[0],
    }


def requests(generate: Callable[[], Iterable[int]], warm: int) -> dict[str, object]:
    """Runs one request as a fresh process does it, then the same one warm.

    Returns:
        Facts for `say_last`.
    """
    started = time.perf_counter()
    found = stream(generate())
    seconds = [time.perf_counter() - started]
    print("ALL", flush=True)
    for _ in range(warm):
        started = time.perf_counter()
        for _token in generate():
            pass
        seconds.append(time.perf_counter() - started)
    return {"tokens": found["tokens"], "cold_seconds": seconds[0], "warm_seconds": seconds[1:]}


def memory_bytes() -> dict[str, int]:
    """This process's memory now, from smaps_rollup.

    Private_Clean counts pages of a mapped file while nobody else maps it; they are the page cache's, and
    the kernel drops them at will. What a process costs is Private_Dirty.
    """
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        fields = [line.split() for line in file if line.rstrip().endswith("kB")]
    wanted = ("Rss:", "Pss:", "Private_Clean:", "Private_Dirty:", "Anonymous:")
    return {name[:-1]: int(size) << 10 for name, size, _ in fields if name in wanted}
