"""`prejit build`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from prejit.compiler.cli.build_options import (
    CACHE,
    DIR,
    FORMS,
    JOBS,
    PATH,
    SHARED,
    TARGETS,
    TIMEOUT,
)
from prejit.runtime.cli.command_options import JSON, VERBOSE
from prejit.runtime.cli.output import print_json

if TYPE_CHECKING:
    from prejit.compiler.manifest.manifest import Manifest
    from prejit.compiler.pipeline.built import Built, Failed
    from prejit.runtime.errors import PrejitError


@click.command(
    epilog="Examples:\n\n\b\n  prejit build manifests/demo.toml\n"
    "  prejit build manifests/*.toml -o /srv/bundles --jobs 8\n"
    "  prejit build manifests/demo.toml --target cpu-x86-64-v3"
)
@click.argument(
    "manifests", nargs=-1, required=True, type=PATH, metavar="MANIFEST...", help="A TOML file."
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
    help="Measure how products are computed fastest: all of them, or none (default: large ones that no "
    "table has).",
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
    from prejit.compiler.api import build_all
    from prejit.compiler.pipeline.built import Failed

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

    options: dict[str, Any] = {
        "cache": cache,
        "shared": shared,
        "forms": forms,
        "measure": measure,
        "executor": executor,
        "workers": jobs,
        "timeout_seconds": timeout,
        "retrace": retrace,
        "shard": shard,
    }
    build_all(requests, output, done=done, **options)
    if as_json:
        order = [manifest.bundle.name for manifest, _ in requests]
        print_json(sorted(built, key=lambda each: order.index(Path(each["path"]).name)))
    if failed:
        raise _failure(failed, len(requests))
    return 0


def _failure(failed: Sequence[Failed], count: int) -> PrejitError:
    """Return one error for the builds that failed."""
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
    """Read manifests and check that their bundle names differ. A second bundle would replace the first.

    Raises:
        UsageError: two manifests have the same bundle name, or are one file.
        ManifestError, StoreError: a manifest has mistakes, or cannot be read.
    """
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
    from prejit.runtime.cli.accuracy_tables import accuracy_table

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
    if result.accuracy is not None:
        tell(accuracy_table(result.accuracy), sys.stdout)  # a closed stdout must not stop the rest


def _buildable(manifest: Manifest, only: tuple[str, ...]) -> tuple[str, ...]:
    """Return the targets that this machine can compile for, and print the others."""
    from prejit.compiler.pipeline.plan import why_not
    from prejit.compiler.progress import tell
    from prejit.compiler.targets.target_table import chosen

    buildable = []
    for target in chosen(manifest.targets, only, manifest.where):
        if reason := why_not(target):
            tell(f"{manifest.where}: left out {target.name}: {reason}")
        else:
            buildable.append(target.name)
    return tuple(buildable)
