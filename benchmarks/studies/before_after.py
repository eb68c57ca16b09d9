"""Two states of the runtime on the same bundles, in fresh processes that take turns.

    python -m benchmarks.studies.before_after --before PATH --after PATH [--runs 21] [-o PREFIX]
    python -m benchmarks.studies.before_after --before PATH --after PATH --bundle DIR --prefill-tokens 64

PATH is a checkout. Both sides run on this interpreter and on two cores, with the same installed packages;
only prejit comes from PATH. Without --bundle the benchmark's GPT-2 is built, by this checkout, in float32
and int8. Prints a table: medians with their least and greatest, and the median of the ratios after / before
within each round with its 95 % interval. With -o it writes the table and all samples.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.harness import workload
from benchmarks.harness.comparison import Column
from benchmarks.harness.fresh_processes import BENCHMARKS, Row, Sample, interleave
from benchmarks.harness.report import MB, Table, cell
from benchmarks.harness.results import begin, option_parser, save, use_two_cores
from benchmarks.harness.workspace import Bench, bench_directory

BEFORE, AFTER = "before", "after"
VOCABULARY = "256"
"""Token ids of the prompts are smaller than this: every model has them."""


FIGURES = (
    ("generate", Column("first_seconds", "exec to first token, ms", 1, 1e-3)),
    ("generate", Column("last_seconds", "exec to last token, ms", 1, 1e-3)),
    ("generate", Column("decode_tokens_per_second", "decode, tokens/s", 1)),
    ("prefill", Column("prefill_tokens_per_second", "prefill, tokens/s", 0)),
    ("generate", Column("cpu_seconds", "CPU of the process, ms", 0, 1e-3)),
    ("generate", Column("rss_bytes", "peak RSS, MB", 0, MB)),
    ("generate", Column("modules_of_prejit", "modules of prejit at the first token", 0)),
    ("generate", Column("modules", "all modules at the first token", 0)),
)
"""The lines of the table, each with its job of prejit_child.py."""


def revision(checkout: Path) -> str:
    """Return the commit of a checkout, marked when files differ from it."""
    git = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(git, stdout=subprocess.PIPE, text=True, check=False)
    return done.stdout.strip() or "unknown"


def environment(checkout: Path, cache: Path) -> dict[str, str]:
    """Return the environment in which prejit comes from a checkout.

    Raises:
        SystemExit: prejit would come from elsewhere.
    """
    paths = [
        *(str(checkout / each) for each in ("runtime", "server", "compiler")),
        str(BENCHMARKS.parent),
    ]
    found = {"PYTHONPATH": os.pathsep.join(paths), "PREJIT_RUNTIME_CACHE": str(cache)}
    code = "import prejit.runtime; print(prejit.runtime.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **found}, stdout=subprocess.PIPE, text=True
    )
    home = done.stdout.strip()
    if done.returncode or not Path(home).is_relative_to(checkout / "runtime"):
        raise SystemExit(
            f"{checkout}: expected prejit.runtime below it, found {home or 'none'}\n\n"
            "hint: give the root of a checkout of this repository"
        )
    return found


def rows(
    bundle: Path, prefill_bundle: Path, prefill_tokens: int, sides: dict[str, dict[str, str]]
) -> list[Row]:
    """Return the processes that take turns for one model."""
    tokens = str(workload.PROMPT_TOKENS)
    jobs = [("peers/prejit_child.py", "generate", str(bundle), "1", tokens, VOCABULARY)]
    if prefill_tokens:
        more = (str(prefill_bundle), "1", str(prefill_tokens), VOCABULARY)
        jobs.append(("peers/prejit_child.py", "prefill", *more))
    return [Row(f"{side} {job[1]}", job, sides[side]) for job in jobs for side in sides]


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median, from 2,000 resamplings."""
    picks = np.random.default_rng(0).choice(np.asarray(ratios), (2000, len(ratios)))
    low, high = np.quantile(np.median(picks, axis=1), (0.025, 0.975))
    return float(low), float(high)


def table(title: str, samples: dict[str, list[Sample]]) -> Table:
    """Return medians, and ratios with their intervals."""
    lines = []
    for job, figure in FIGURES:
        before = samples.get(f"{BEFORE} {job}")
        after = samples.get(f"{AFTER} {job}")
        if not before or not after or figure.key not in before[0]:
            continue
        pairs = zip(before, after, strict=True)
        ratios = [b[figure.key] / a[figure.key] for a, b in pairs]
        low, high = interval(ratios)
        lines.append(
            (
                figure.title,
                *(
                    cell(found, figure.key, figure.digits, figure.scale)
                    for found in (before, after)
                ),
                f"{float(np.median(ratios)):.3f}",
                f"{low:.3f} to {high:.3f}",
            )
        )
    tokens = {tuple(s["tokens"]) for name, found in samples.items() for s in found}
    jobs = {name.split()[1] for name in samples}
    same = "the same" if len(tokens) == len(jobs) else "**not the same**"
    head = ("", BEFORE, AFTER, "after / before", "95 %")
    return Table(title, head, lines, f"Tokens of both sides: {same}.")


def models(bench: Bench, dtypes: Sequence[str]) -> list[tuple[str, Path, Path, int]]:
    """Build what is measured; return titles, bundles for both jobs, and the length of prompts."""
    found = []
    length = workload.CHUNK_TOKENS
    sizes: workload.Sizes = {"batch": (1,), "prompt": (length,), "context": (2 * length,)}
    for dtype in dtypes:
        main = bench.built(f"gpt2-{dtype}", "gpt2", dtype, workload.FEW)
        prompts = bench.built(f"gpt2-{dtype}-prefill", "gpt2", dtype, sizes)
        found.append((f"GPT-2 124M, {dtype}", Path(main), Path(prompts), length))
    return found


def main() -> None:
    """Measure and print."""
    parser = option_parser()
    parser.add_argument("--before", type=Path, required=True, metavar="PATH", help="checkout")
    parser.add_argument("--after", type=Path, required=True, metavar="PATH", help="checkout")
    parser.add_argument("--runs", type=int, default=21, help="rounds that count (default: 21)")
    parser.add_argument("--bundle", type=Path, help="a decoder's bundle, instead of GPT-2")
    parser.add_argument("--prefill-tokens", type=int, default=0, help="of prompts, with --bundle")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "int8"], help="of GPT-2")
    parser.add_argument("-o", "--output", type=Path, metavar="PREFIX", help="for .md and .json")
    given = parser.parse_args()
    use_two_cores()
    if given.bundle:
        bundle = given.bundle.resolve()
        works = [(bundle.name, bundle, bundle, given.prefill_tokens)]
    else:
        works = models(Bench(bench_directory(), given.runs, quick=False), given.dtypes)
    checkouts = {BEFORE: given.before.resolve(), AFTER: given.after.resolve()}
    revisions = {side: revision(path) for side, path in checkouts.items()}
    facts = begin(given.runs, revisions=revisions, samples={})
    tables = []
    with tempfile.TemporaryDirectory() as scratch:
        sides = {s: environment(path, Path(scratch, s)) for s, path in checkouts.items()}
        for title, main_bundle, prefill_bundle, length in works:
            samples = interleave(rows(main_bundle, prefill_bundle, length, sides), given.runs)
            facts["samples"][title] = samples
            tables.append(table(title, samples))
    where = facts["machine"]
    page = (
        f"# Before {revisions[BEFORE]}, after {revisions[AFTER]}\n\n"
        f"{facts['date']}, {where['cpu']}, {where['cores']} cores; load {where['load_average']:.1f} before. "
        f"Medians [least..greatest] of {given.runs} fresh processes of each side, which take turns after one "
        "round that was thrown away; ratios are medians of the ratios within each round.\n\n"
        + "\n".join(made.markdown() for made in tables)
    )
    if given.output:
        save(given.output.parent, given.output.name, facts, page)
    else:
        print(page)


if __name__ == "__main__":
    main()
