"""Measure how many passes over the weights prompt lookup saves, and the speed-up.

    python -m benchmarks.studies.prompt_lookup [--runs N]

Two models run greedily at batch 1, each request with and without drafts in turns, in one process:

- the demo model (a small GPT-2 that writes Python) continues code that repeats itself, code that ends as it
  began, and new code. Its steps are so cheap that one call runs several, which drafts prevent;
- a GPT-2 of 124M with small random weights repeats one token forever: every draft is right, so this is
  the most that lookup can give where memory bounds decode. The same shape with the weights of the other
  benchmarks never repeats itself: nothing is drafted, and nothing should be lost.

Tokens must be the same both ways. Results go to benchmarks/results/DATE-prompt-lookup.json and .md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import models, workload
from benchmarks.harness.measure import Spread, progress
from benchmarks.harness.results import begin, save
from benchmarks.harness.workspace import RESULTS, bench_directory
from prejit.runtime import Bundle, load

DRAFT = 7
"""Drafts of a pass: eight rows with the token before them, the most for which products stream weights."""
ROOT = Path(__file__).resolve().parents[2]
MANIFEST = """[bundle]
name = "{name}"
[model]
source = {source}
[generate]
batch = [1]
prompt = [64]
context = [{context}]
draft_tokens = {draft}
[[target]]
name = "cpu-host"
"""
REPEATING = """class Point:
    def __init__(self, x, y):
        self.x = x
        self.y = y

    def set_x(self, x):
        self.x = x

    def set_y(self, y):
        self.y = y

class Vector:
    def __init__(self, x, y):
        self.x = x
        self.y = y

    def set_x(self, x):
"""
QUOTED = """def total(values):
    result = 0
    for value in values:
        result += value
    return result

def test_total():
    assert total([1, 2, 3]) == 6

def total(values):
    result = 0
"""
PLAIN = """import os

def main():
"""


def build(directory: Path, name: str, source: Path, context: int) -> Path:
    """Build a bundle with programs that verify drafts; return its path."""
    manifest = directory / f"{name}.toml"
    text = {"name": name, "source": json.dumps(str(source)), "context": context, "draft": DRAFT}
    manifest.write_text(MANIFEST.format(**text))
    command = (sys.executable, "-m", "prejit.runtime", "build", str(manifest))
    output = ("-o", str(directory / "bundles"), "--cache", str(directory / "build-cache"))
    subprocess.run((*command, *output), check=True, stdout=subprocess.DEVNULL)
    progress(f"built {name}")
    return directory / "bundles" / name


def repeating_gpt2(directory: Path) -> Path:
    """Return the benchmark's GPT-2 with blocks of the usual initialization, made if it is missing."""
    path = directory / "gpt2-repeating"
    if not path.is_dir():
        weights = {
            name: value * 0.25 if name.startswith("h.") and value.ndim == 2 else value
            for name, value in models.gpt2_weights().items()
        }
        partial = directory / "gpt2-repeating.partial"
        partial.mkdir(exist_ok=True)
        models.write_safetensors(partial / "model.safetensors", weights)
        config = (directory / "gpt2" / "config.json").read_text()
        (partial / "config.json").write_text(config)
        os.replace(partial, path)
    return path


def turns(bundle: Bundle, prompt: str | Sequence[int], count: int, runs: int) -> dict[str, Any]:
    """Time one request with and without drafts in turns, without the first of each.

    Raises:
        SystemExit: the tokens differ.
    """
    seconds: dict[bool, list[float]] = {False: [], True: []}
    results = {}
    for turn in range(runs + 1):
        for lookup in (False, True):
            started = time.perf_counter()
            results[lookup] = bundle.generate(
                prompt, max_new_tokens=count, stop_token_ids=(), prompt_lookup=lookup
            )
            if turn:
                seconds[lookup].append(time.perf_counter() - started)
    plain, drafted = results[False], results[True]
    if plain.token_ids != drafted.token_ids:
        raise SystemExit("prompt lookup changed the tokens")
    return {
        "new_tokens": plain.stats.new_tokens,
        "passes": [plain.stats.passes, drafted.stats.passes],
        "drafted": drafted.stats.drafted_tokens,
        "accepted": drafted.stats.accepted_tokens,
        "seconds": [seconds[False], seconds[True]],
    }


def line(name: str, found: dict[str, Any]) -> str:
    """A row of the table."""
    plain, drafted = found["seconds"]
    ratios = Spread.of([a / b for a, b in zip(plain, drafted, strict=True)])
    speeds = [Spread.of([found["new_tokens"] / s for s in times]) for times in found["seconds"]]
    before, after = found["passes"]
    cells = [name, str(before), f"{after} ({1 - after / before:.0%} saved)"]
    cells += [f"{found['accepted']} of {found['drafted']}"]
    cells += [f"{s.median:.0f} ({s.low:.0f}-{s.high:.0f})" for s in speeds]
    cells += [f"{ratios.median:.2f} ({ratios.low:.2f}-{ratios.high:.2f})"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Build, measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=7, help="turns of each request")
    given = parser.parse_args()
    directory = bench_directory()
    models.make(directory)
    facts = begin(given.runs, draft_tokens=DRAFT)
    demo = load(build(directory, "lookup-demo", ROOT / "manifests" / "demo-model", 512))
    small = load(build(directory, "lookup-repeating", repeating_gpt2(directory), 256))
    wild = load(build(directory, "lookup-wild", directory / "gpt2", 256))
    ids = workload.prompt_ids(workload.PROMPT_TOKENS)
    requests: tuple[tuple[str, Bundle, str | list[int], int], ...] = (
        ("demo model, code that repeats", demo, REPEATING, 200),
        ("demo model, code that ends as it began", demo, QUOTED, 200),
        ("demo model, new code", demo, PLAIN, 200),
        ("124M, one token for ever", small, ids, 96),
        ("124M, a text that repeats nothing", wild, ids[:8] * 4, 96),
    )
    facts["requests"] = {}
    lines = []
    for name, bundle, prompt, count in requests:
        facts["requests"][name] = turns(bundle, prompt, count, given.runs)
        lines.append(line(name, facts["requests"][name]))
        progress(lines[-1])
    facts["load_average_after"] = os.getloadavg()[0]
    heads = ("", "passes", "with lookup", "drafts right", "tokens/s", "with lookup", "speed-up")
    page = f"# Prompt lookup: {DRAFT} drafts a pass, greedy, batch 1\n\n"
    page += f"{facts['date']}, {facts['machine']['cpu']}, {facts['machine']['cores']} cores, load "
    page += f"{facts['machine']['load_average']:.1f}; medians of {given.runs} turns (least - greatest).\n\n"
    page += "\n".join(
        [f"| {' | '.join(heads)} |", "| --- |" + " ---: |" * (len(heads) - 1), *lines]
    )
    save(RESULTS, f"{facts['date'][:10]}-prompt-lookup", facts, page + "\n")


if __name__ == "__main__":
    main()
