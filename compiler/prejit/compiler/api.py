"""The steps of the command line as Python functions: `plan` and `build`."""

from __future__ import annotations

import os
from pathlib import Path

from prejit.compiler.compile.pool import WorkerPool
from prejit.compiler.compile.worker_process import JOB_SECONDS
from prejit.compiler.manifest.manifest import Manifest
from prejit.compiler.manifest.reading import check_manifest, read_manifest
from prejit.compiler.pipeline.plan import PlannedExecutable, plan_build, planned_executables
from prejit.compiler.pipeline.run import Built
from prejit.compiler.pipeline.run import build as run_build
from prejit.compiler.progress import Progress, Quiet, open_progress
from prejit.compiler.store.directory import DirectoryStore

AnyManifest = Manifest | str | os.PathLike[str]
"""A manifest, or the path of its TOML file."""


def plan(
    manifest: AnyManifest,
    *,
    targets: tuple[str, ...] = (),
    cache: str | os.PathLike[str] | None = None,
    forms: Path | None = None,
) -> tuple[PlannedExecutable, ...]:
    """Return what a build would do about each program and target, as `prejit plan` shows it.

    A plan traces and compiles nothing. Only a build shows whether the executable of a user's function is
    cached, because it traces the function.

    Args:
        manifest: a manifest, or the path of a TOML file.
        targets: names of targets; empty: all targets of the manifest.
        cache: directory of the build cache; None: $PREJIT_CACHE or ~/.cache/prejit/build.
        forms: a table of measured forms.

    Raises:
        ManifestError: the manifest has mistakes.
        BuildError: this machine cannot compile for a target.
        CheckpointError, StoreError: a file cannot be read.
        UsageError: a name in `targets` is no target of the manifest.
    """
    store = _store(cache)
    found = plan_build(_manifest(manifest), store, only=tuple(targets), forms=forms)
    return planned_executables(found, store)


def build(
    manifest: AnyManifest,
    output: str | os.PathLike[str] = "artifacts",
    *,
    targets: tuple[str, ...] = (),
    cache: str | os.PathLike[str] | None = None,
    forms: Path | None = None,
    measure: bool | None = None,
    workers: int | None = None,
    timeout_seconds: float = JOB_SECONDS,
    quiet: bool = False,
) -> Built:
    """Compile the programs of a manifest and write the bundle `output/NAME`, as `prejit build` does.

    Args:
        manifest: a manifest, or the path of a TOML file.
        output: directory of bundles.
        targets: names of targets; empty: all targets of the manifest.
        cache: directory of the build cache; None: $PREJIT_CACHE or ~/.cache/prejit/build.
        forms: a table of measured forms.
        measure: which products are measured. True: those that this machine has not measured itself; False:
            none; None: large ones that no table has.
        workers: number of compile processes; None: by cores and free memory.
        timeout_seconds: time limit of one compile, and of measuring one product.
        quiet: whether nothing is printed; else the progress goes to stderr.

    Raises:
        ManifestError: the manifest has mistakes.
        BuildError: a program does not compile. What was finished stays in the build cache.
        CheckpointError, NetworkError, StoreError: something cannot be read, fetched or written.
        UsageError: a name in `targets` is no target of the manifest.
    """
    checked, store = _manifest(manifest), _store(cache)
    display: Progress = Quiet() if quiet else open_progress()
    with display as progress:
        executor = WorkerPool(
            store, workers=workers, progress=progress, timeout_seconds=timeout_seconds
        )
        return run_build(
            checked,
            Path(output),
            store=store,
            executor=executor,
            progress=progress,
            only=tuple(targets),
            forms=forms,
            measure=measure,
            timeout_seconds=timeout_seconds,
        )


def _manifest(given: AnyManifest) -> Manifest:
    if not isinstance(given, Manifest):
        return read_manifest(Path(given))
    return check_manifest(given) if given.path is None else given


def _store(cache: str | os.PathLike[str] | None) -> DirectoryStore:
    return DirectoryStore.open(None if cache is None else Path(cache))
