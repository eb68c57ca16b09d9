"""Count how much of their prompts chats find again, by the memory that an engine has for earlier texts.

    python -m benchmarks.studies.kept_texts [--name NAME]

Writes benchmarks/results/NAME.json and .md. Users have chats of up to 200 tokens, which all begin with the
same 30. In each turn, four of them send 8 to 19 more tokens to an engine of four slots at once, and get 12.
The memory is given as a multiple of the cache of the slots. The share of reused tokens does not depend on the
model or on the machine's load, so the model is tiny.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

from benchmarks.harness.measure import progress
from benchmarks.harness.models import decoder_manifest, make_llama
from benchmarks.harness.report import Table
from benchmarks.harness.results import begin, save
from benchmarks.harness.workload import LLAMA_TINY, Sizes
from benchmarks.harness.workspace import RESULTS, Bench, bench_directory
from prejit.runtime import Bundle, load
from prejit.runtime.generation.kv_cache import cache_bytes
from prejit.server import Engine

SLOTS, LONGEST, TURNS = 4, 200, 6
SIZES: Sizes = {"batch": (1, 2, 4), "prompt": (16, 64), "context": (64, 256)}
USERS = (4, 8, 16, 32)
TIMES = (0, 0.25, 0.5, 1, 2, 4)


def chat(bundle: Bundle, users: int, prefix_memory: int) -> float:
    """Return the share of prompt tokens that were reused.

    Args:
        bundle: the model.
        users: how many chats there are.
        prefix_memory: of the engine.
    """
    values = random.Random(users)

    def words(count: int) -> list[int]:
        return [values.randrange(LLAMA_TINY.vocabulary) for _ in range(count)]

    engine = Engine(bundle, slots=SLOTS, prefix_memory=prefix_memory)
    system = words(30)
    texts = [list(system) for _ in range(users)]
    for _ in range(TURNS * users // SLOTS):
        futures = {}
        for user in values.sample(range(users), SLOTS):
            begun = texts[user] if len(texts[user]) < LONGEST - 32 else system
            texts[user] = [*begun, *words(values.randrange(8, 20))]
            futures[user] = engine.submit(texts[user], max_new_tokens=12, stop_token_ids=())
        for user, future in futures.items():
            texts[user] += future.result().token_ids
    found = engine.metrics()
    engine.close()
    return found.cached_prompt_tokens / found.prompt_tokens


def main() -> None:
    """Build, count and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--name", default=f"{time.strftime('%Y-%m-%d')}-kept-texts")
    given = parser.parse_args()
    bench = Bench(bench_directory(), 1, quick=False)
    facts = begin(1)
    make_llama(bench.directory, "llama-tiny", LLAMA_TINY)
    source = str(Path(bench.directory / "llama-tiny"))
    manifest = decoder_manifest("kept-texts", source, "float32", SIZES)
    bundle = load(bench.built_manifest("kept-texts", manifest), on_mismatch="error")
    bundle.prepare()
    slots = cache_bytes(bundle.decoder, SLOTS, SIZES["context"][-1])
    shares: dict[str, list[float]] = {}
    for users in USERS:
        for times in TIMES:
            progress(f"{users} users, {times} times the cache of the slots")
            shares.setdefault(str(users), []).append(chat(bundle, users, int(slots * times)))
    rows = [(users, *(f"{share:.2f}" for share in found)) for users, found in shares.items()]
    about = (
        "Share of the prompts' tokens that were reused, by the memory for earlier texts as a multiple of the "
        "cache of the slots."
    )
    table = Table("Chats", ("users", *map(str, TIMES)), rows, about)
    head = f"# Kept texts\n\n{facts['date']}. `python -m benchmarks.studies.kept_texts` repeats it.\n\n"
    save(RESULTS, given.name, {**facts, "shares": shares}, head + table.markdown())


if __name__ == "__main__":
    main()
