"""Measure guesses of a draft model, and those of prompt lookup, beside decoding alone.

    python -m benchmarks.studies.guessed_tokens [--rounds 4] [--tokens 128]

The model is the demo model with 12 more layers of random weights, whose small outputs change some of its
tokens, and with MLPs of 12,288: 74 million weights, so that reading them takes most of a step. A trained pair
agrees more or less often; a guess costs what it costs such a pair. Each text is written in each way in turn.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from benchmarks.harness.fresh_processes import progress
from benchmarks.harness.report import Table
from benchmarks.harness.results import begin, option_parser, publish
from benchmarks.harness.workspace import bench_directory
from prejit.compiler import build
from prejit.runtime import load

DEMO = Path(__file__).parents[2] / "manifests" / "demo-model"
WIDTH, LAYERS, INNER, MORE, SCALE = 192, 3, 12288, 12, 0.2
PROMPTS = (
    *("def main(", "import os\nimport sys\n\ndef read(path):\n"),
    *("class Parser:\n    def __init__(self", "    for name in sorted("),
)
WAYS: dict[str, dict[str, Any]] = {
    "alone": {"draft": False},
    "draft model": {},
    "prompt lookup": {"prompt_lookup": True},
}
PAIRS = {
    "the demo model": ("demo", "float32"),
    "the model in int4": ("large", "int4"),
    "random weights": ("random", "float32"),
}
"""The draft models, each with its directory and dtype."""

Weights = dict[str, np.ndarray[Any, Any]]


def larger(demo: Weights, rng: np.random.Generator) -> Weights:
    """Return the weights of the model."""
    found = dict(demo)

    def add(name: str, *shape: int, scale: float = 1.0) -> None:
        value = rng.standard_normal(shape) * scale * shape[0] ** -0.5
        found[f"{name}.weight"] = value.astype(np.float32)
        found[f"{name}.bias"] = np.zeros(shape[1], np.float32)

    for layer in range(LAYERS):
        at, more = f"transformer.h.{layer}.mlp", INNER - 4 * WIDTH
        found[f"{at}.c_fc.weight"] = np.pad(demo[f"{at}.c_fc.weight"], ((0, 0), (0, more)))
        found[f"{at}.c_fc.bias"] = np.pad(demo[f"{at}.c_fc.bias"], (0, more))
        found[f"{at}.c_proj.weight"] = np.pad(demo[f"{at}.c_proj.weight"], ((0, more), (0, 0)))
    for layer in range(LAYERS, LAYERS + MORE):
        at = f"transformer.h.{layer}"
        for norm in ("ln_1", "ln_2"):
            found[f"{at}.{norm}.weight"] = np.ones(WIDTH, np.float32)
            found[f"{at}.{norm}.bias"] = np.zeros(WIDTH, np.float32)
        add(f"{at}.attn.c_attn", WIDTH, 3 * WIDTH)
        add(f"{at}.attn.c_proj", WIDTH, WIDTH, scale=SCALE)
        add(f"{at}.mlp.c_fc", WIDTH, INNER)
        add(f"{at}.mlp.c_proj", INNER, WIDTH, scale=SCALE)
    return found


def write_models(base: Path) -> None:
    """Write the directories of PAIRS; that of the model is `large`."""
    demo, rng = load_file(DEMO / "model.safetensors"), np.random.default_rng(0)
    drawn = {n: rng.standard_normal(v.shape).astype(np.float32) * v.std() for n, v in demo.items()}
    for name, weights in (("demo", demo), ("large", larger(demo, rng)), ("random", drawn)):
        shutil.copytree(DEMO, base / name, dirs_exist_ok=True)
        save_file(weights, base / name / "model.safetensors", {"format": "pt"})
    config = json.loads((DEMO / "config.json").read_text())
    config |= {"n_layer": LAYERS + MORE, "n_inner": INNER}
    (base / "large" / "config.json").write_text(json.dumps(config))


def bundle_of(base: Path, source: str, dtype: str) -> Path:
    """Return the bundle of the model with a draft model."""
    manifest = base / f"{source}.toml"
    manifest.write_text(
        f'[bundle]\nname = "{source}"\n[model]\nsource = "large"\n'
        "[generate]\nbatch = [1]\nprompt = [16, 64]\ncontext = [512]\ndraft_tokens = 4\n"
        f'[draft]\nsource = "{source}"\ndtype = "{dtype}"\n[[target]]\nname = "cpu-host"\n'
    )
    return build(manifest, base, quiet=True).path


def main() -> None:
    """Build, measure and write."""
    parser = option_parser()
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    given = parser.parse_args()
    base = bench_directory() / "guessed-tokens"
    write_models(base)
    facts = begin(given.rounds, tokens=given.tokens, seconds={}, guesses={})
    rows = []
    for pair, (source, dtype) in PAIRS.items():
        bundle = load(bundle_of(base, source, dtype), on_mismatch="error")
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        guesses = {way: [0, 0] for way in WAYS}
        for number in range(given.rounds + 1):  # the first one warms up
            progress(f"{pair}: round {number} of {given.rounds}")
            for prompt in PROMPTS:
                texts = set()
                for way, options in WAYS.items():
                    started = time.perf_counter()
                    made = bundle.generate(
                        prompt, max_new_tokens=given.tokens, stop_token_ids=(), **options
                    )
                    times[way] += [time.perf_counter() - started] if number else []
                    texts.add(made.token_ids)
                    guesses[way][0] += made.stats.drafted_tokens
                    guesses[way][1] += made.stats.accepted_tokens
                assert len(texts) == 1, "other tokens"
        facts["seconds"][pair], facts["guesses"][pair] = times, guesses
        for way, taken in times.items():
            ratios = [alone / one for alone, one in zip(times["alone"], taken, strict=True)]
            drafted, accepted = guesses[way]
            right = f"{accepted / drafted:.0%} of {drafted}" if drafted else "-"
            rate = f"{given.tokens / median(taken):.1f}"
            rows.append((pair, way, rate, f"{median(ratios):.2f}", right))
    heads = ("draft model", "way", "tokens/s, median", "times as fast, of pairs", "right guesses")
    publish(facts, "guessed-tokens", "Guessed tokens", [Table("Ways", heads, rows, __doc__ or "")])


if __name__ == "__main__":
    main()
