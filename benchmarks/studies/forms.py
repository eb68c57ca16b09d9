"""Measure the forms of products and record them in the compiler's forms.json, which ships with it.

    python -m benchmarks.studies.forms [--levels x86-64-v4 ...] [--only gpt2] [--again]     or: make forms

A build reads there what it has no time, or no machine, to measure. Entries for today's kernels and jaxlib are
not measured again. Each batch is written when it is done, so a run may be interrupted. Run it on a quiet
machine, although all forms take turns and the least of many runs counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

from benchmarks.harness.results import option_parser
from prejit.compiler.compile.pool import WorkerPool
from prejit.compiler.manifest.reading import read_manifest
from prejit.compiler.native.form_table import (
    RECORDED,
    FormTable,
    KnownForms,
    conditions_of,
    read_own,
    to_text,
)
from prejit.compiler.native.kernel_library import KernelLibrary, build_kernels
from prejit.compiler.native.products import Product
from prejit.compiler.pipeline.lower.program_lowering import products_of
from prejit.compiler.pipeline.measure.measured_speed import measure_products, runs_here
from prejit.compiler.pipeline.plan import PlanOptions, plan_build
from prejit.compiler.pipeline.result_keys import versions
from prejit.compiler.pipeline.workspace import Workspace
from prejit.compiler.progress import Progress, Quiet, open_progress
from prejit.compiler.store.directory_store import DirectoryStore
from prejit.compiler.targets.target_table import target
from prejit.compiler.targets.toolchain import host_toolchain
from prejit.runtime.base.written_files import write_file

ROOT = Path(__file__).parents[2]
LEVELS = ("x86-64-v4", "x86-64-v3", "x86-64-v2")
BATCH = 12
HEAD_ROWS = 32
"""Most rows of a product with the head: no program computes logits of more tokens at once."""

Shapes = tuple[tuple[int, int], ...]

GPT2: Shapes = ((768, 2304), (768, 768), (768, 3072), (3072, 768), (768, 50257))
"""GPT-2-124M: openai/gpt2, config.json."""
LLAMA: Shapes = ((2048, 2048), (2048, 512), (2048, 8192), (8192, 2048), (2048, 128256))
"""Llama 3.2 1B: meta-llama/Llama-3.2-1B, config.json."""
MINILM: Shapes = ((384, 384), (384, 1536), (1536, 384))
"""sentence-transformers/all-MiniLM-L6-v2, config.json."""


def recorded_products(cache: DirectoryStore) -> dict[str, tuple[Product, ...]]:
    """Return the products to measure by the name of a model."""

    def products(
        dtypes: tuple[str, ...], rows: tuple[int, ...], shapes: Shapes
    ) -> Iterator[Product]:
        for dtype, count, (inputs, outputs) in product(dtypes, rows, shapes):
            if count <= HEAD_ROWS or outputs < 20_000:
                yield Product(dtype, count, inputs, outputs, in_out=False)

    demo = read_manifest(ROOT / "manifests" / "demo.toml")
    plan = plan_build(demo, cache, PlanOptions(("cpu-host",)))
    all_dtypes = ("float32", "bfloat16", "int8")
    return {
        "demo": products_of(Workspace.of(plan, cache, Quiet())),
        "gpt2": tuple(products(all_dtypes, (1, 2, 4, 8, 16, 32, 64, 128, 512), GPT2)),
        "minilm": tuple(products(("float32",), (16, 32, 64, 128, 256, 512, 1024, 8192), MINILM)),
        "llama": tuple(products(("bfloat16", "int8"), (1, 4, 8, 32, 512), LLAMA)),
    }


def record(
    level: str, wanted: tuple[Product, ...], cache: DirectoryStore, progress: Progress
) -> None:
    """Measure products for a level and add them to the recorded table."""
    toolchain = host_toolchain(target(f"cpu-{level}"), versions("jax", "jaxlib"))
    library = build_kernels(toolchain, cache, progress)
    if not isinstance(library, KernelLibrary) or not runs_here(toolchain, library):
        progress.note(f"{level}: this machine does not run it, or has no compiler")
        return
    conditions = conditions_of(toolchain, library)
    recorded = read_own(RECORDED)
    missing = KnownForms(own=recorded).missing(wanted, conditions, fresh=True)
    progress.note(f"{level}: {len(missing)} of {len(wanted)} products to measure")
    for some in (missing[at : at + BATCH] for at in range(0, len(missing), BATCH)):
        with WorkerPool(cache) as executor:
            measured = measure_products(some, toolchain, library, cache, executor, progress)
        # What was measured with older kernels goes as it is measured again on such a CPU.
        kept = {
            (each.conditions.level, each.conditions.cpu, each.product): each
            for each in (*recorded.oldest_first, *measured.oldest_first)
        }
        recorded = FormTable(tuple(kept.values()))
        write_file(RECORDED, to_text(recorded).encode("ascii"))
        for each in measured.entries:
            progress.note(f"{level} {each.product}: {each.nanoseconds} ns")


def main() -> None:
    """Parse the command line and run."""
    parser = option_parser()
    parser.add_argument("--levels", nargs="+", default=LEVELS, choices=LEVELS)
    parser.add_argument("--only", nargs="+", metavar="MODEL", help="demo, gpt2, minilm, llama")
    parser.add_argument("--again", action="store_true", help="begin with an empty table")
    options = parser.parse_args()
    if options.again:
        RECORDED.unlink(missing_ok=True)
    cache = DirectoryStore.open()
    models = recorded_products(cache)
    chosen = options.only or list(models)
    wanted = tuple(dict.fromkeys(each for name in chosen for each in models[name]))
    with open_progress() as progress:
        for level in options.levels:
            record(level, wanted, cache, progress)


if __name__ == "__main__":
    main()
