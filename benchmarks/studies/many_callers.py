"""Measure the engine: many callers at once, and a long prompt that joins texts that are being written.

    python -m benchmarks.studies.many_callers [--rounds 5]

- N threads ask GPT-2 124M (float32, batches of 1, 4 and 8) for 64 tokens each: by `Bundle.generate`, where
  every call has its own batch; by one engine; and by `generate_batch`, which has all prompts from the start.
- Eight streams of a Llama of GPT-2's size run when a prompt of 4,000 tokens comes. The gap is the longest
  time between two tokens of a stream while that prompt is computed: with the prompt inserted whole, as
  `Batch.insert` does, and in the engine's chunks. The time to its own first token is beside it.

The ways run in turns in one process, after one round that does not count.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness.fresh_processes import progress
from benchmarks.harness.models import decoder_manifest, make_llama
from benchmarks.harness.report import Table
from benchmarks.harness.results import begin, option_parser, publish, use_two_cores
from benchmarks.harness.workload import Llama, Sizes
from benchmarks.harness.workspace import Bench, bench_directory
from prejit.runtime import Bundle, load
from prejit.server import Engine

TOKENS, PROMPT = 64, 32
THREADS = (1, 4, 8, 16)
LONG, STREAMS = 4000, 8
GPT2: Sizes = {"batch": (1, 4, 8), "prompt": (32, 64, 256), "context": (128, 512)}
LLAMA = Llama(
    layers=12, width=768, heads=12, kv_heads=4, inner=2048, vocabulary=32000, positions=8192
)
LLAMA_SIZES: Sizes = {"batch": (1, 16), "prompt": (64, 256), "context": (256, 4608)}
CHUNKS = (64, 256)


def prompt_of(number: int, length: int, vocabulary: int) -> list[int]:
    """Return a prompt that shares no beginning with another number's."""
    return [(31 * number + 7 * place + 1) % vocabulary for place in range(length)]


def many_callers(path: str, rounds: int) -> dict[str, list[float]]:
    """Return tokens a second of each way and number of threads."""
    bundle = load(path, on_mismatch="error")
    bundle.prepare()
    engine = Engine(bundle, slots=8, prefix_memory=0)
    asked: dict[str, Any] = {"max_new_tokens": TOKENS, "stop_token_ids": ()}

    def by(ask: Callable[..., Any], threads: int, first: int) -> None:
        prompts = [prompt_of(first + n, PROMPT, 50257) for n in range(threads)]
        with ThreadPoolExecutor(threads) as pool:
            results = list(pool.map(lambda prompt: ask(prompt, **asked), prompts))
        assert all(len(result.token_ids) == TOKENS for result in results)

    def by_batch(threads: int, first: int) -> None:
        prompts = [prompt_of(first + n, PROMPT, 50257) for n in range(threads)]
        results = bundle.generate_batch(prompts, **asked)
        assert all(len(result.token_ids) == TOKENS for result in results)

    ways: dict[str, Callable[[int, int], None]] = {
        "generate": lambda threads, first: by(bundle.generate, threads, first),
        "engine": lambda threads, first: by(engine.generate, threads, first),
        "generate_batch": by_batch,
    }
    found: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        for threads in THREADS:
            for way, run in ways.items():
                progress(f"round {number} of {rounds}: {threads} threads by {way}")
                started = time.perf_counter()
                run(threads, 1000 * number)
                rate = threads * TOKENS / (time.perf_counter() - started)
                if number:
                    found.setdefault(f"{way} {threads}", []).append(rate)
    engine.close()
    return found


def joining(bundle: Bundle, number: int, chunk: int | None) -> dict[str, float]:
    """Return the longest gap of running streams while a long prompt joins, and its own first token's time.

    Args:
        bundle: with a context for the long prompt.
        number: of the round, for other prompts.
        chunk: `prefill_tokens` of the engine; None: the prompt is inserted whole.
    """
    whole = bundle.decoder.contexts[-1]
    engine = Engine(bundle, slots=STREAMS + 8, prefix_memory=0, prefill_tokens=chunk or whole)
    asked: dict[str, Any] = {"stop_token_ids": ()}
    times: list[list[float]] = [[] for _ in range(STREAMS)]
    ends = [False]

    def read(place: int) -> None:
        prompt = prompt_of(100 * number + place, 16, LLAMA.vocabulary)
        with engine.stream(prompt, max_new_tokens=2000, **asked) as stream:
            for _ in stream:
                times[place].append(time.perf_counter())
                if ends[0]:
                    return

    with ThreadPoolExecutor(STREAMS) as pool:
        done = [pool.submit(read, place) for place in range(STREAMS)]
        while min(map(len, times)) < 10:
            time.sleep(0.05)
        started = time.perf_counter()
        stream = engine.stream(prompt_of(number, LONG, LLAMA.vocabulary), max_new_tokens=4, **asked)
        next(stream)
        first = time.perf_counter() - started
        list(stream)
        ends[0] = True
        for each in done:
            each.result()
    engine.close()
    gaps = [
        later - earlier
        for each in times
        for earlier, later in itertools.pairwise(each)
        if later > started and earlier < started + first
    ]
    return {"gap": max(gaps), "median_gap": sorted(gaps)[len(gaps) // 2], "first": first}


def main() -> None:
    """Build, measure and write."""
    parser = option_parser()
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    use_two_cores()
    bench = Bench(bench_directory(), given.rounds, quick=False)
    facts = begin(given.rounds)
    make_llama(bench.directory, "llama-flat", LLAMA)
    gpt2 = bench.built("engine-gpt2", "gpt2", "float32", GPT2)
    source = str(Path(bench.directory / "llama-flat"))
    llama = bench.built_manifest(
        "engine-llama", decoder_manifest("engine-llama", source, "float32", LLAMA_SIZES)
    )
    rates = many_callers(gpt2, given.rounds)
    bundle = load(llama, on_mismatch="error")
    bundle.prepare()
    gaps: dict[str, list[dict[str, float]]] = {}
    for number in range(given.rounds + 1):
        for chunk in (None, *CHUNKS):
            name = "whole" if chunk is None else f"chunks of {chunk}"
            progress(f"round {number} of {given.rounds}: a long prompt {name}")
            found = joining(bundle, number, chunk)
            if number:
                gaps.setdefault(name, []).append(found)
    facts |= {"tokens_per_second": rates, "joining": gaps}
    rows = [
        (
            str(threads),
            *(
                f"{median(rates[f'{way} {threads}']):.0f}"
                for way in ("generate", "engine", "generate_batch")
            ),
            f"{median(rates[f'engine {threads}']) / median(rates[f'generate {threads}']):.2f}",
        )
        for threads in THREADS
    ]
    heads = ("threads", "generate", "engine", "generate_batch", "engine / generate")
    about = (
        f"GPT-2 124M float32, prompts of {PROMPT}, {TOKENS} new tokens each, medians of {given.rounds} "
        "rounds; prompts are new in every round."
    )
    joined = [
        (
            name,
            *(
                f"{1e3 * median([one[key] for one in found]):.0f}"
                for key in ("gap", "median_gap", "first")
            ),
        )
        for name, found in gaps.items()
    ]
    tables = [
        Table("Tokens a second of all threads", heads, rows, about),
        Table(
            f"A prompt of {LONG} tokens joins {STREAMS} streams",
            ("", "longest gap, ms", "median gap, ms", "its first token, ms"),
            joined,
            "A Llama of 12 layers of 768, float32, 16 slots. A gap is the time between a stream's tokens.",
        ),
    ]
    publish(facts, "engine", "Engine", tables)


if __name__ == "__main__":
    main()
