"""Measure guesses of a draft model that was trained from its target, and of prompt lookup, beside neither.

    python -m benchmarks.studies.guessed_tokens [--rounds 3] [--tokens 64]

The target computes the demo model at the size of 12 layers of width 1,536: 344 million weights. The draft
is a layer of the demo model that has learnt from it for 400 steps (`benchmarks.harness.trained_pairs`; it
needs `pip install --group demo-model`). Texts are files of Python's library that neither model has seen.
Each round is a fresh process, in which every way continues each text in turn; all give the same tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.harness.fresh_processes import Row, Sample, progress, run_once
from benchmarks.harness.report import Table
from benchmarks.harness.results import begin, option_parser, publish
from benchmarks.harness.trained_pairs import (
    Weights,
    demo_text,
    demo_weights,
    distilled,
    enlarged,
    write_model,
)
from benchmarks.harness.workspace import bench_directory
from prejit.compiler import build

PROMPTS, PROMPT_TOKENS = 6, 48
PAIRS = (("int8", "small", "float32", 4),)
"""Each pair: dtype of the target, name and dtype of the draft, guesses at a time."""


def write_inputs(base: Path) -> None:
    """Write the models and the texts, unless they are there: this takes minutes."""
    if (base / "prompts.json").exists():
        return
    seen, unseen = demo_text()
    demo = demo_weights()
    small: Weights = distilled(demo, seen)
    models = {"small": small, "large": enlarged(demo, 8, 12)}
    for name, weights in models.items():
        write_model(base / name, weights)
    starts = range(0, len(unseen) - PROMPT_TOKENS, len(unseen) // PROMPTS)
    texts = [unseen[start : start + PROMPT_TOKENS].tolist() for start in starts[:PROMPTS]]
    (base / "prompts.json").write_text(json.dumps(texts))


def bundle_of(base: Path, dtype: str, draft: str, draft_dtype: str, count: int) -> Path:
    """Return the bundle of a pair."""
    name = f"{dtype}-{draft}-{count}"
    manifest = base / f"{name}.toml"
    manifest.write_text(
        f'[bundle]\nname = "{name}"\n[model]\nsource = "large"\ndtype = "{dtype}"\n'
        f"[generate]\nbatch = [1]\nprompt = [64]\ncontext = [256]\ndraft_tokens = {count}\n"
        f'[draft]\nsource = "{draft}"\ndtype = "{draft_dtype}"\n[[target]]\nname = "cpu-host"\n'
    )
    return build(manifest, base, quiet=True).path


def rows_of(name: tuple[str, ...], rounds: Sequence[Sample], tokens: int) -> list[tuple[str, ...]]:
    """Return the rows of a pair."""
    rows = []
    for key in rounds[0]["found"]:
        way, _, heat = key.partition(", ")
        alone, samples = (
            [one for each in rounds for one in each["found"][which]]
            for which in (f"alone, {heat}", key)
        )
        ratios = [a["seconds"] / b["seconds"] for a, b in zip(alone, samples, strict=True)]
        drafted, accepted, passes = (
            sum(one[what] for one in samples) for what in ("drafted", "accepted", "passes")
        )
        rate = (tokens - 1) / median(one["seconds"] for one in samples)
        rows.append(
            (
                *name,
                heat,
                way,
                f"{rate:.1f}",
                f"{median(ratios):.2f} [{min(ratios):.2f}..{max(ratios):.2f}]",
                f"{accepted / drafted:.0%} of {drafted}" if drafted else "-",
                f"{len(samples) * (tokens - 1) / passes:.2f}",
            )
        )
    return sorted(rows, key=lambda row: row[len(name)])


def main() -> None:
    """Build, measure and write."""
    parser = option_parser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    given = parser.parse_args()
    base = bench_directory() / "guessed-tokens"
    base.mkdir(exist_ok=True)
    write_inputs(base)
    bundles = {pair: str(bundle_of(base, *pair)) for pair in PAIRS}
    facts = begin(given.rounds, tokens=given.tokens, samples={})
    rows = []
    for pair, bundle in bundles.items():
        rounds = []
        for turn in range(given.rounds):
            progress(f"{pair}: round {turn + 1} of {given.rounds}")
            inputs = (bundle, str(base / "prompts.json"), str(given.tokens), str(turn))
            rounds.append(run_once(Row(str(pair), ("studies/guessed_child.py", *inputs))))
        dtype, draft, _, count = pair
        facts["samples"][f"{dtype}, {draft}, {count}"] = [each["found"] for each in rounds]
        rows += rows_of((dtype, draft, str(count)), rounds, given.tokens)
    heads = (
        *("target", "draft", "guesses", "temperature", "way", "tokens/s, median"),
        *("times as fast, of pairs", "right guesses", "tokens a pass"),
    )
    publish(facts, "guessed-tokens", "Guessed tokens", [Table("Ways", heads, rows, __doc__ or "")])


if __name__ == "__main__":
    main()
