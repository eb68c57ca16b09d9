"""`prejit build`."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from prejit.compiler.cli.options import CACHE, FORMS, JSON, PATH, SHARED, TARGETS, print_json

if TYPE_CHECKING:
    from prejit.compiler.manifest.manifest import Manifest
    from prejit.compiler.pipeline.run import Built


@click.command(
    epilog="Examples:\n\n\b\n  prejit build manifests/demo.toml\n"
    "  prejit build manifests/*.toml -o /srv/bundles --jobs 8\n"
    "  prejit build manifests/demo.toml --target cpu-x86-64-v3"
)
@click.argument("manifests", nargs=-1, required=True, type=PATH, metavar="MANIFEST...")
@click.option(
    "-o",
    "--output",
    type=PATH,
    default=Path("artifacts"),
    show_default=True,
    metavar="DIR",
    help="Directory of bundles; each is written to DIR/NAME.",
)
@TARGETS
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    metavar="N",
    help="Compile processes side by side (default: cores).",
)
@click.option(
    "--executor",
    metavar="WHERE",
    help="Where to compile: local, ray://HOST:PORT or ray://auto (default: $PREJIT_EXECUTOR or local).",
)
@click.option(
    "--timeout",
    type=click.IntRange(min=1),
    default=3600,
    show_default=True,
    metavar="SECONDS",
    help="Give up on a program that takes longer to compile, or to measure.",
)
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
@CACHE
@SHARED
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
    cache: Path | None,
    shared: str | None,
    as_json: bool,
) -> int:
    """Compile each MANIFEST and write its bundle. What did not change is not compiled again."""
    from prejit.compiler.api import build as build_bundle

    built = []
    for manifest in _read_all(manifests):
        started = time.perf_counter()
        only = _buildable(manifest, targets) if skip_unbuildable else targets
        if skip_unbuildable and not only:
            continue
        result = build_bundle(
            manifest,
            output,
            targets=only,
            cache=cache,
            shared=shared,
            forms=forms,
            measure=measure,
            executor=executor,
            workers=jobs,
            timeout_seconds=timeout,
        )
        seconds = time.perf_counter() - started
        built.append({**asdict(result), "path": str(result.path), "seconds": round(seconds, 3)})
        if not as_json:
            _print_built(result, seconds)
    if as_json:
        print_json(built)
    return 0


def _read_all(paths: Sequence[Path]) -> list[Manifest]:
    """Read manifests and check that their bundle names differ. A second bundle would replace the first.

    Raises:
        UsageError: two manifests have the same bundle name.
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
            raise UsageError(
                f"{path}: bundle.name: expected another name than that of {first}, found {name!r}; "
                "nothing was built",
                hint="give the bundles different names, or build them into different directories",
            )
        manifests.append(manifest)
    return manifests


def _print_built(result: Built, seconds: float) -> None:
    from prejit.compiler.progress import tell
    from prejit.runtime.cli.tables import accuracy_table

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
