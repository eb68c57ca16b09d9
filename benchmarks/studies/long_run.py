"""Check that memory stays flat: 100,000 generated tokens, then 10,000 sessions, in one fresh process.

    python -m benchmarks.studies.long_run [--tokens N] [--sessions N]   builds, runs, writes results
    python -m benchmarks.studies.long_run --bundle BUNDLE ...   runs one bundle here, prints JSON

Requests of all kinds join and leave the slots of a batch. Sessions have two turns and are closed, dropped, or
left in the middle of a stream. Memory is private memory (Private_Clean and Private_Dirty of
/proc/self/smaps_rollup), measured after each tenth of the work. The model is stories260k, in PREJIT_SHARED
or in a directory `shared` beside the repository.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from prejit.runtime import Bundle, Request, Sampling, load

HERE = Path(__file__).resolve().parent
POINTS = 10
MANIFEST = """[bundle]
name = "long-run"
[model]
source = {source}
[generate]
batch = [1, 4]
prompt = [16, 64]
context = [64, 256]
draft_tokens = 4
[[target]]
name = "cpu-host"
"""
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0.9, top_k=20, seed=1),
    Sampling(temperature=1.1, top_p=0.9, seed=2, repetition_penalty=1.2),
    Sampling(frequency_penalty=0.5),
)


def private_bytes() -> int:
    """Return the private memory of this process in bytes."""
    gc.collect()
    rollup = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    fields = dict(line.split(":", 1) for line in rollup[1:])
    return 1024 * sum(int(fields[name].split()[0]) for name in ("Private_Clean", "Private_Dirty"))


def measured(work: Iterator[int], total: int) -> dict[str, Any]:
    """Do work and measure memory on the way.

    Args:
        work: yields how much of it is done; must not end before `total`.
        total: amount of work to do.

    Returns:
        `done`, `seconds`, `bytes` after each tenth, and `grown_bytes` from the first of them to the last.
    """
    started, points = time.perf_counter(), list[int]()
    done = 0
    for done in work:
        if done >= total * (len(points) + 1) / POINTS:
            points.append(private_bytes())
        if done >= total:
            break
    return {
        "done": done,
        "seconds": time.perf_counter() - started,
        "bytes": points,
        "grown_bytes": points[-1] - points[0],
    }


def tokens(bundle: Bundle, pick: random.Random) -> Iterator[int]:
    """Keep the slots of a batch busy; yield the number of tokens so far."""
    decoder = bundle.decoder
    context, vocab = decoder.contexts[-1], decoder.decoder.vocab_size
    batch, count = bundle.batch(decoder.batches[-1]), 0
    while True:
        while batch.free:
            prompt = [pick.randrange(vocab) for _ in range(pick.randrange(1, context // 2))]
            batch.insert(
                Request(
                    prompt * pick.choice((1, 1, 2)),
                    pick.choice(SAMPLINGS),
                    max_new_tokens=pick.randrange(1, context // 2),
                    stop_token_ids=(),
                    logprobs=pick.choice((None, None, None, 2)),
                    prompt_lookup=pick.random() < 0.3,
                )
            )
        given = batch.step()
        count += sum(token.token_id is not None for token in given)
        if pick.random() < 0.002:
            batch.evict(given[0].slot)
        if pick.random() < 0.0005:
            batch.close()
        yield count


def sessions(bundle: Bundle, pick: random.Random) -> Iterator[int]:
    """Run sessions of two turns, which are then closed, dropped, or left in the middle of a stream."""
    vocab, count = bundle.decoder.decoder.vocab_size, 0
    prefix = bundle.prefix([1, 2, 3, 4])
    while True:
        session = bundle.session()
        prompt = [1, 2, 3, 4, *(pick.randrange(vocab) for _ in range(pick.randrange(1, 12)))]
        first = session.generate(prompt, max_new_tokens=4, stop_token_ids=(), prefix=prefix)
        again = [*prompt, *first.token_ids, 5]
        stream = session.stream(again, max_new_tokens=8, stop_token_ids=())
        next(stream)
        ending = count % 3
        if ending == 0:
            list(stream)
            session.close()
        elif ending == 1:
            del stream
        count += 1
        yield count


def run(path: str, token_count: int, session_count: int) -> dict[str, Any]:
    """Measure tokens, then sessions, in this process."""
    bundle = load(path, on_mismatch="error")
    bundle.prepare()
    works: tuple[tuple[str, Callable[..., Iterator[int]], int], ...] = (
        ("tokens", tokens, token_count),
        ("sessions", sessions, session_count),
    )
    return {
        name: measured(work(bundle, random.Random(0)), total)
        for name, work, total in works
        if total
    }


def measure(token_count: int, session_count: int) -> None:
    """Build, run a fresh process, write the result."""
    from benchmarks.harness.measure import environment
    from benchmarks.harness.results import begin, save
    from benchmarks.harness.workspace import RESULTS

    shared = Path(os.environ.get("PREJIT_SHARED", HERE.parents[2] / "shared"))
    source = shared / "data" / "stories260k"
    if not source.is_dir():
        raise SystemExit(
            f"no checkpoint at {source}; set PREJIT_SHARED to the directory that has it"
        )
    facts = begin(1)
    with tempfile.TemporaryDirectory() as directory:
        manifest = Path(directory, "long-run.toml")
        manifest.write_text(MANIFEST.format(source=json.dumps(str(source))))
        prejit = (sys.executable, "-m", "prejit.runtime")
        output = ("-o", directory, "--cache", str(Path(directory, "cache")))
        subprocess.run((*prejit, "build", str(manifest), *output), check=True, stdout=sys.stderr)
        counts = ("--tokens", str(token_count), "--sessions", str(session_count))
        command = (sys.executable, __file__, "--bundle", str(Path(directory, "long-run")), *counts)
        done = subprocess.run(
            command, check=True, capture_output=True, text=True, env=environment({})
        )
    facts["runs"] = json.loads(done.stdout)
    lines = ["| | count | seconds | MB after a tenth | MB at the end | grown, MB |"]
    lines += ["| --- | ---: | ---: | ---: | ---: | ---: |"]
    for name, found in facts["runs"].items():
        first, last = found["bytes"][0] / 1e6, found["bytes"][-1] / 1e6
        lines.append(
            f"| {name} | {found['done']:,} | {found['seconds']:.0f} | {first:.1f} | {last:.1f} | "
            f"{last - first:+.1f} |"
        )
    heading = f"# Long runs: stories260k, private memory of one process\n\n{facts['date']}, "
    page = f"{heading}{facts['machine']['cpu']}, prejit {facts['versions']['revision']}\n\n"
    page += "\n".join(lines) + "\n"
    save(RESULTS, f"{facts['date'][:10]}-long-run", facts, page)


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--bundle", help="run this one in this process")
    given = parser.parse_args()
    if given.bundle:
        print(json.dumps(run(given.bundle, given.tokens, given.sessions)))
    else:
        measure(given.tokens, given.sessions)


if __name__ == "__main__":
    main()
