"""`prejit build`, `plan` and `rebuild`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from prejit.compiler.cli.shared_options import BUNDLE_HERE, CACHE, DIR, FILE, PATH
from prejit.runtime.cli.command_options import COUNT, JSON, VERBOSE
from prejit.runtime.cli.output import print_json, print_text

if TYPE_CHECKING:
    from prejit.compiler.manifest.manifest import Manifest
    from prejit.compiler.pipeline.build_interface import Built, Failed
    from prejit.compiler.pipeline.executable_jobs import PlannedExecutable
    from prejit.compiler.rebuilding.compared_parts import ComparedPart
    from prejit.compiler.rebuilding.rebuilt import Rebuilt
    from prejit.runtime.errors import PrejitError


TARGETS = click.option(
    "--target", "targets", multiple=True, metavar="NAME", help="Only this target; may be repeated."
)
SHARED = click.option(
    "--store",
    "shared",
    metavar="URL",
    help="A store that many machines share: http(s)://, s3://, gs://, az://, oci://, a directory, or a TOML "
    "file with several (default: $PREJIT_STORE).",
)
FORMS = click.option(
    "--forms",
    **FILE,
    help="A table of measured forms, as builds keep it in the build cache (forms.json).",
)
JOBS = click.option("--jobs", **COUNT, help="Compile processes side by side (default: cores).")
TIMEOUT = click.option(
    "--timeout",
    type=click.IntRange(min=1),
    metavar="SECONDS",
    default=3600,
    help="Give up on a program that takes longer to compile, or to measure.",
)


@click.command(
    epilog="Examples:\n\n\b\n  prejit build manifests/demo.toml\n"
    "  prejit build manifests/*.toml -o /srv/bundles --jobs 8\n"
    "  prejit build manifests/demo.toml --target cpu-x86-64-v3\n"
    "  prejit build artifacts/serve --target cpu-x86-64-v3 -o fleet"
)
@click.argument(
    "manifests",
    nargs=-1,
    required=True,
    type=PATH,
    metavar="MANIFEST...",
    help="A TOML file, or a bundle of `prejit record`.",
)
@click.option(
    "-o",
    "--output",
    **DIR,
    default=Path("artifacts"),
    help="Directory of bundles; each is written to DIR/NAME.",
)
@TARGETS
@JOBS
@click.option(
    "--executor",
    metavar="WHERE",
    help="Where to compile: local, ray://HOST:PORT or ray://auto (default: $PREJIT_EXECUTOR or local).",
)
@TIMEOUT
@click.option(
    "--skip-unbuildable",
    is_flag=True,
    help="Leave out targets that this machine cannot compile for, and name them.",
)
@FORMS
@click.option(
    "--measure/--no-measure",
    default=None,
    help="Measure how products are computed fastest: all of them, or none, nor an encoder's programs "
    "(default: large ones that no table has).",
)
@click.option(
    "--retrace",
    is_flag=True,
    help="Trace functions and decoders of your own again, though nothing changed that they read.",
)
@CACHE
@SHARED
@click.option(
    "--shard",
    metavar="I/N",
    help="Share the build with N - 1 other processes that use the same --store, on any machines; one of them "
    "packs. I is 1 to N.",
)
@VERBOSE
@JSON
def build(
    manifests: tuple[Path, ...],
    output: Path,
    targets: tuple[str, ...],
    jobs: int | None,
    executor: str | None,
    timeout: int,
    skip_unbuildable: bool,
    forms: Path | None,
    measure: bool | None,
    retrace: bool,
    cache: Path | None,
    shared: str | None,
    shard: str | None,
    as_json: bool,
) -> int:
    """Compile each MANIFEST and write its bundle. What did not change is not compiled again."""
    if any((each / "index.json").is_file() for each in manifests):
        options = {
            "--executor": executor,
            "--skip-unbuildable": skip_unbuildable,
            "--forms": forms,
            "--measure": measure,
            "--retrace": retrace,
            "--store": shared,
            "--shard": shard,
        }
        given = [name for name, value in options.items() if value not in (None, False)]
        return _build_recordings(manifests, output, targets, given, cache, jobs, timeout, as_json)
    from prejit.compiler.api import BuildSettings, build_all
    from prejit.compiler.pipeline.build_interface import Failed

    requests = []
    for manifest in _read_all(manifests):
        only = _buildable(manifest, targets) if skip_unbuildable else targets
        if only or not skip_unbuildable:
            requests.append((manifest, only))
    built: list[dict[str, Any]] = []
    failed: list[Failed] = []
    started = time.perf_counter()

    def done(result: Built | Failed) -> None:
        seconds = time.perf_counter() - started
        if isinstance(result, Failed):
            failed.append(result)
            return
        described = asdict(replace(result, programs=()))  # those are in the report
        del described["programs"]
        built.append({**described, "path": str(result.path), "seconds": round(seconds, 3)})
        if shard is not None:
            built[-1]["shard"] = shard
        if not as_json:
            _print_built(result, seconds)

    settings = BuildSettings(
        cache, shared, forms, measure, executor, jobs, timeout, shard, retrace=retrace
    )
    build_all(requests, output, settings, done=done)
    if as_json:
        order = [manifest.bundle.name for manifest, _ in requests]
        print_json(sorted(built, key=lambda each: order.index(Path(each["path"]).name)))
    if failed:
        raise _failure(failed, len(requests))
    return 0


def _build_recordings(
    paths: Sequence[Path],
    output: Path,
    targets: Sequence[str],
    given: Sequence[str],
    cache: Path | None,
    jobs: int | None,
    timeout: int,
    as_json: bool,
) -> int:
    """Build recorded bundles for other machines. `given` are options that only manifests have."""
    from prejit.compiler.progress import tell
    from prejit.compiler.recording.build_for_machines import build_recording
    from prejit.compiler.recording.jax_cache_packing import name_at
    from prejit.runtime.errors import UsageError

    if given or not all((path / "index.json").is_file() for path in paths):
        found = ", ".join(given) or "manifests as well"
        raise UsageError(
            f"expected recorded bundles with --target, -o, --jobs, --timeout and --cache, found {found}",
            hint="build recordings and manifests apart",
        )
    written: dict[str, Path] = {}
    for path in paths:
        name = name_at(path)
        if (first := written.setdefault(name, path)) is not path:
            raise UsageError(
                f"{path}: expected another name than that of {first}, found {name!r}; nothing was built",
                hint="build them into different directories",
            )
    built = []
    for path in paths:
        made = build_recording(
            path, output, targets, cache=cache, workers=jobs, timeout_seconds=timeout
        )
        tell(
            f"wrote {made.path} for {', '.join(made.targets)}: compiled {made.compiled}, "
            f"cached {made.cached}, {made.digest[:19]}"
        )
        for line in made.left_out:
            tell(f"left out {line}")
        built.append({**asdict(made), "path": str(made.path)})
    if as_json:
        print_json(built)
    return 0


def _failure(failed: Sequence[Failed], count: int) -> PrejitError:
    if count == 1:
        return failed[0].error
    from prejit.runtime.errors import BuildError

    kinds = {type(each.error) for each in failed}
    kind = kinds.pop() if len(kinds) == 1 else BuildError
    lines = [f"{len(failed)} of {count} bundles were not built"]
    for each in failed:
        lines.append(f"  {each.manifest.bundle.name} ({each.manifest.where}):")
        lines += [f"    {line}" for line in str(each.error).splitlines()]
    hints = dict.fromkeys(each.error.hint for each in failed if each.error.hint)
    return kind("\n".join(lines), hint="; ".join(hints) or None)


def _read_all(paths: Sequence[Path]) -> list[Manifest]:
    """Read manifests and check that their bundle names differ. A second bundle would replace the first."""
    from prejit.compiler.manifest.reading import read_manifest
    from prejit.runtime.errors import UsageError

    found: dict[str, Path] = {}
    manifests = []
    for path in paths:
        manifest = read_manifest(path)
        name = manifest.bundle.name
        if (first := found.setdefault(name, path)) is not path:
            if os.path.realpath(first) == os.path.realpath(path):
                raise UsageError(
                    f"{path}: expected each manifest once, found it twice; nothing was built",
                    hint="give it once",
                )
            raise UsageError(
                f"{path}: bundle.name: expected another name than that of {first}, found {name!r}; "
                "nothing was built",
                hint="give the bundles different names, or build them into different directories",
            )
        manifests.append(manifest)
    return manifests


def _print_built(result: Built, seconds: float) -> None:
    from prejit.compiler.base.suggestions import counted
    from prejit.compiler.progress import tell
    from prejit.runtime.cli.inspect_tables import accuracy_table

    if result.packed_by is not None and not result.packed_here:
        tell(
            f"{result.path.name}: packed by shard {result.packed_by}; this one compiled {result.compiled} of "
            f"{counted(result.compiled + result.cached, 'program')}, {seconds:.1f} s, {result.digest[:19]}"
        )
        return
    wrote = "wrote" if result.written else "up to date:"
    tell(
        f"{wrote} {result.path}: compiled {result.compiled}, cached {result.cached}, "
        f"{seconds:.1f} s, {result.digest[:19]}"
    )
    if result.few_bits is not None:
        tell(str(result.few_bits))
    if result.int4:
        tell(result.int4)
    if result.accuracy is not None:
        tell(accuracy_table(result.accuracy), sys.stdout)  # a closed stdout must not stop the rest


def _buildable(manifest: Manifest, only: tuple[str, ...]) -> tuple[str, ...]:
    """Return the targets that this machine can compile for, and print the others."""
    from prejit.compiler.pipeline.target_tools import why_not
    from prejit.compiler.progress import tell
    from prejit.compiler.targets.target_table import chosen

    buildable = []
    for target in chosen(manifest.targets, only, manifest.where):
        if reason := why_not(target):
            tell(f"{manifest.where}: left out {target.name}: {reason}")
        else:
            buildable.append(target.name)
    return tuple(buildable)


PLAN_HAS_CHANGES = 8


@click.command(
    epilog="Examples:\n\n\b\n  prejit plan manifests/demo.toml\n"
    "  prejit plan manifests/demo.toml --target cpu-x86-64-v3 --json\n\n"
    "A plan compiles and traces nothing. It imports the function of a [[program]] that changed. Only tracing "
    "at build shows whether a store has its executable; else it compiles.\n\n"
    f"Exit status: 0 everything is cached, {PLAN_HAS_CHANGES} something compiles or is traced at build."
)
@click.argument("manifest", type=PATH, metavar="MANIFEST", help="A TOML file.")
@TARGETS
@FORMS
@CACHE
@SHARED
@VERBOSE
@JSON
def plan(
    manifest: Path,
    targets: tuple[str, ...],
    forms: Path | None,
    cache: Path | None,
    shared: str | None,
    as_json: bool,
) -> int:
    """Show programs x targets of MANIFEST: what is cached, what will compile and why."""
    from prejit.compiler.api import plan as plan_manifest
    from prejit.compiler.base.suggestions import counted
    from prejit.compiler.pipeline.executable_jobs import CACHED, COMPILE, TRACED

    executables = plan_manifest(manifest, targets=targets, cache=cache, shared=shared, forms=forms)
    counts = {
        state: sum(each.state == state for each in executables)
        for state in (CACHED, COMPILE, TRACED)
    }
    if as_json:
        rows = [
            {
                "program": each.spec.name,
                "kind": each.spec.kind,
                "bucket": each.spec.bucket,
                "target": each.target.name,
                "state": each.state,
                "cached": each.cached,
                "where": each.where,
                "why": each.why,
            }
            for each in executables
        ]
        summary = {"to_compile": counts[COMPILE], "traced_at_build": counts[TRACED]}
        print_json({"programs": rows, **summary})
    else:
        _print_plan(executables)
        traced = counts[TRACED]
        left = counts[COMPILE] + traced
        # What is lowered anew may become a program that the store has, and equal programs compile once.
        most = "at most " if left else ""
        rest = f" ({traced} {TRACED}, which shows whether a store has them)" if traced else ""
        print_text(
            f"\n{counted(len(executables), 'program')}: {counts[CACHED]} cached, "
            f"{most}{left} to compile{rest}"
        )
    return 0 if counts[CACHED] == len(executables) else PLAN_HAS_CHANGES


def _print_plan(executables: Sequence[PlannedExecutable]) -> None:
    """Print one row for each program, one column for each target; reasons below, once each."""
    from prejit.compiler.pipeline.executable_jobs import reasons
    from prejit.compiler.store.directory_store import LOCAL
    from prejit.runtime.base.wording import aligned

    targets = list(dict.fromkeys(each.target.name for each in executables))
    states: dict[str, dict[str, str]] = {}
    for each in executables:
        is_shared = each.cached and each.where != LOCAL
        states.setdefault(each.spec.name, {})[each.target.name] = (
            "shared" if is_shared else each.state
        )
    rows = [["program", *targets]] + [
        [name, *(cells[target] for target in targets)] for name, cells in states.items()
    ]
    print_text(aligned(rows))
    if found := reasons(executables):
        print_text("\nwhy:")
    for reason, count in found.items():
        print_text(f"  {count:>4} x  {reason}")


REBUILD_DIFFERS = 8


@click.command(
    epilog="Examples:\n\n\b\n  prejit rebuild --verify artifacts/demo --manifest manifests/demo.toml\n"
    "  prejit rebuild --verify artifacts/demo --json\n\n"
    "Everything is compiled again, in a temporary directory (TMPDIR): results of the build cache or of a "
    "shared store would prove nothing. Each target is compiled by the version of jax that it was built "
    "with, in an environment that is made where it is missing.\n\n"
    f"Exit status: 0 all parts are equal or their differences explained, {REBUILD_DIFFERS} some are not, "
    "1 a source is no longer what the bundle was built from, or a program does not compile."
)
@click.argument("bundle", type=BUNDLE_HERE, metavar="BUNDLE", help="Directory of a bundle.")
@click.option(
    "--verify",
    is_flag=True,
    required=True,
    expose_value=False,
    help="Compare the rebuild with BUNDLE, and keep neither.",
)
@click.option(
    "--manifest",
    **FILE,
    help="The bundle's manifest, beside its sources (default: its recorded name, here).",
)
@JOBS
@TIMEOUT
@VERBOSE
@JSON
def rebuild(
    bundle: Path, manifest: Path | None, jobs: int | None, timeout: int, as_json: bool
) -> int:
    """Build BUNDLE again from its recorded inputs, and compare the two part by part."""
    from prejit.compiler.progress import open_progress
    from prejit.compiler.rebuilding.rebuilt import rebuild as build_again

    with open_progress() as progress:
        found = build_again(
            bundle, manifest, progress=progress, workers=jobs, timeout_seconds=timeout
        )
    if as_json:
        print_json(
            {
                "path": str(found.path),
                "digest": found.digest,
                "rebuilt": found.rebuilt,
                "parts": [asdict(each) for each in found.parts],
            }
        )
    else:
        _print_rebuilt(found)
    return REBUILD_DIFFERS if found.findings else 0


def _print_rebuilt(found: Rebuilt) -> None:
    from prejit.runtime.base.wording import table

    groups: dict[tuple[str, str], list[ComparedPart]] = {}
    for each in found.parts:
        groups.setdefault((each.kind, each.target), []).append(each)
    rows = []
    for (kind, target), parts in groups.items():
        counts = [
            f"{count} {verdict}" if len(parts) > 1 else verdict
            for verdict in ("equal", "explained", "differs")
            if (count := sum(each.verdict == verdict for each in parts))
        ]
        rows.append((kind, target or "all", ", ".join(counts).replace("differs", "DIFFERS")))
    print_text(table(("part", "target", "rebuilt"), rows))
    for each in found.parts:
        if each.verdict != "equal":
            name = " ".join(filter(None, (each.kind, each.name, each.target)))
            verdict = each.verdict.replace("differs", "DIFFERS")
            why = f" ({each.reason})" if each.reason and each.reason != each.detail else ""
            print_text(f"{verdict} {name}: {each.detail}{why}")
    same = found.digest == found.rebuilt
    print_text(
        f"\n{found.path}: {found.digest[:19]}, rebuilt "
        + ("to the same bytes" if same else f"as {found.rebuilt[:19]}")
        + f": {len(found.findings)} findings"
    )
