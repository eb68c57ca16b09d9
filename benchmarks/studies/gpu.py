"""The check on a real GPU: built without it, loaded on it. `benchmarks/studies/gpu.sh` sets up and runs this.

    python -m benchmarks.studies.gpu [--runs N]

1. `prejit fingerprint` of this machine becomes a target.
2. `prejit build` for it in a process that sees no GPU.
3. `prejit explain` and a start with --on-mismatch error: nothing may be compiled.
4. The same tokens as jit gives on this GPU.
5. `prejit tune` here, and a second build with XLA's measurements.
6. Fresh processes that take turns: both bundles, cold jit, JAX's persistent cache.

Results go to benchmarks/results. Donation is on, as always.
"""

from __future__ import annotations

import json
import re
from typing import Any

from benchmarks.harness import report
from benchmarks.harness.fresh_processes import Row, Sample, interleave, progress, run_once
from benchmarks.harness.report import Table, Target, cell, ratio_within_rounds, same_tokens
from benchmarks.harness.results import begin, option_parser, publish_rows
from benchmarks.harness.workspace import PREJIT_COMMAND, Bench, bench_directory
from prejit.runtime import Fingerprint
from prejit.runtime.base.typed_json import to_json

DEVICELESS, TUNED = "prejit, built without the GPU", "prejit, built with its tuning"
WITHOUT_GPU = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
MANIFEST = """[bundle]
name = "{name}"
[model]
source = "gpt2"
[generate]
batch = [1]
prompt = [32]
context = [128, 256]
[[target]]
name = "this-gpu"
fingerprint = "gpu.json"
{tuning}"""


def build(bench: Bench, name: str, tuning: str = "") -> Sample:
    """Build a bundle for the fingerprint's machine in a process that sees no GPU."""
    manifest = bench.directory / f"{name}.toml"
    manifest.write_text(MANIFEST.format(name=name, tuning=tuning))
    output, cache = str(bench.directory / "bundles"), str(bench.directory / "build-cache")
    command = (PREJIT_COMMAND, "build", str(manifest), "-o", output, "--cache", cache, "--json")
    sample = run_once(Row(f"build {name}", command, {**bench.prejit, **WITHOUT_GPU}))
    progress(f"built {name} without the GPU in {sample['exit_seconds']:.1f} s")
    return sample


def command(bench: Bench, *arguments: str) -> str:
    """Run a command of prejit and return its output."""
    output: str = run_once(Row(arguments[0], (PREJIT_COMMAND, *arguments), bench.prejit))["output"]
    return output


def measure(bench: Bench, here: Fingerprint) -> dict[str, Any]:
    """Run all steps and return their samples.

    Raises:
        SystemExit: a step failed.
    """
    progress(f"{here.device_kind}, driver {here.driver}, {here.plugin}")
    run_once(Row("model", ("harness/models.py", str(bench.directory))))
    (bench.directory / "gpu.json").write_bytes(to_json(here) + b"\n")
    builds = {DEVICELESS: build(bench, "gpu")}
    progress(command(bench, "explain", bench.bundle("gpu")).splitlines()[-1])
    command(
        *(bench, "generate", bench.bundle("gpu"), "--prompt-ids", "1,2,3"),
        *("--max-new-tokens", "4", "--on-mismatch", "error"),
    )
    progress("tuning: XLA measures on the GPU")
    command(bench, "tune", bench.bundle("gpu"), "-o", str(bench.directory / "tuning.json"))
    builds[TUNED] = build(bench, "gpu-tuned", 'tuning = "tuning.json"\n')
    plain = ("peers/jax_baseline.py", "generate", bench.weights)
    samples = interleave(
        [
            Row(
                DEVICELESS, ("peers/prejit_child.py", "generate", bench.bundle("gpu")), bench.prejit
            ),
            Row(
                TUNED,
                ("peers/prejit_child.py", "generate", bench.bundle("gpu-tuned")),
                bench.prejit,
            ),
            Row(report.JAX_COLD, plain),
            Row(report.JAX_WARM, plain, bench.warm),
        ],
        bench.runs,
    )
    return {"startup": samples, "build": {name: [sample] for name, sample in builds.items()}}


def tables(samples: dict[str, Any]) -> tuple[list[Table], list[Target]]:
    """Return the tables and targets."""
    rows = samples["startup"]
    lines = [
        (
            name,
            cell(found, "first_seconds"),
            f"{ratio_within_rounds(rows, name, report.JAX_COLD, 'first_seconds'):.2f}",
            f"{ratio_within_rounds(rows, name, report.JAX_WARM, 'first_seconds'):.2f}",
            cell(found, "decode_tokens_per_second", 1),
            f"{ratio_within_rounds(rows, name, report.JAX_COLD, 'decode_tokens_per_second'):.2f}",
        )
        for name, found in rows.items()
    ]
    agree = same_tokens(rows)
    heads = ("", "exec → 1st token, s", "to cold jit", "to warm cache", "tokens/s", "to jit")
    table = Table(
        "A bundle that was built without the GPU: GPT-2 124M, float32, batch 1, 32 tokens in, 64 out",
        heads,
        lines,
        f"Tokens of all rows: {'the same' if agree else '**not the same**'}. Cache donated.",
    )
    strays = sum(
        how != "loaded"
        for name in (DEVICELESS, TUNED)
        for sample in rows[name]
        for how in sample["programs"].values()
    )
    return [table], [
        Target("programs that were compiled on the GPU machine", strays, 0),
        Target("processes whose tokens differ from jit's", 0 if agree else 1, 0),
    ]


def main() -> None:
    """Run the check, or fail where there is no GPU."""
    parser = option_parser()
    parser.add_argument("--runs", type=int, default=7, help="fresh processes of each row")
    given = parser.parse_args()
    here = Fingerprint.current()
    if here.platform != "cuda":
        raise SystemExit(
            f"no NVIDIA GPU that jax could use: this machine's platform is {here.platform}\n"
            "hint: run `make gpu` on a machine with one; `prejit fingerprint` shows what is found"
        )
    bench = Bench(bench_directory() / "gpu", given.runs, quick=False)
    facts = begin(bench.runs, gpu=json.loads(to_json(here)))
    samples = measure(bench, here)
    facts["samples"] = samples
    short = re.sub(r"[^a-z0-9]+", "-", str(here.device_kind).lower()).strip("-")
    publish_rows(facts, short, *tables(samples))


if __name__ == "__main__":
    main()
