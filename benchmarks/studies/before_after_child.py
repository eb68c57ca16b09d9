"""A process of before_after.py: load a bundle and generate.

    before_after_child.py generate BUNDLE NEW_TOKENS    32 tokens in, so many out
    before_after_child.py prefill  BUNDLE TOKENS        prompts of so many tokens in a warm process

It uses the public API only, so that it runs on any state of the runtime.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator

from prejit.runtime import load

job, path, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
bundle = load(path, on_mismatch="error")

from benchmarks.harness import workload  # noqa: E402  loading comes first, as in a server

_VOCABULARY = 256
"""Token ids of the prompts are smaller than this: every model has them."""
_PROMPTS = 9
"""Number of warm prompts of a prefill process; the figure is their median."""


def tokens(prompt: list[int], new_tokens: int) -> Iterator[int]:
    """Yield greedy tokens, without stop tokens."""
    for piece in bundle.stream(prompt, max_new_tokens=new_tokens, stop_token_ids=()):
        assert piece.token_id is not None
        yield piece.token_id


def modules() -> dict[str, int]:
    """Return how many modules are imported, prejit's own and all."""
    own = sum(name.startswith("prejit.") for name in sys.modules)
    return {"modules_of_prejit": own, "modules": len(sys.modules)}


def generate() -> None:
    """Time one request."""
    stream = tokens([i % _VOCABULARY for i in workload.prompt_ids(workload.PROMPT_TOKENS)], count)
    imported: dict[str, int] = {}

    def counted() -> Iterator[int]:
        for token in stream:
            yield token
            imported.update(imported or modules())

    facts = workload.stream(counted())
    workload.say_last(**facts, **imported)


def prefill() -> None:
    """Time whole prompts, no two alike."""
    seconds, found = [], []
    for number in range(_PROMPTS + 1):
        prompt = [(i + number) % _VOCABULARY for i in workload.prompt_ids(count)]
        started = time.perf_counter()
        found.append(next(tokens(prompt, 1)))
        seconds.append(time.perf_counter() - started)
        if not number:
            workload.say_first()
    rate = count / statistics.median(seconds[1:])
    workload.say_last(tokens=found, prefill_tokens_per_second=rate)


if __name__ == "__main__":
    {"generate": generate, "prefill": prefill}[job]()
