"""Build a bundle again from what it records, in a fresh store, and compare the two part by part.

Nothing comes from the build cache or a shared store: a result that was stored once would only be compared
with itself.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from prejit.compiler.checkpoint.model_source import resolve_source
from prejit.compiler.compile.pool import WorkerPool
from prejit.compiler.compile.worker_process import JOB_SECONDS
from prejit.compiler.manifest.manifest import Manifest
from prejit.compiler.manifest.reading import read_manifest
from prejit.compiler.native.form_table import Conditions, FormTable, Measured, to_text
from prejit.compiler.native.kernel_library import NoKernels, level_of
from prejit.compiler.native.products import Product
from prejit.compiler.pipeline.build_interface import BuildOptions
from prejit.compiler.pipeline.build_run import build
from prejit.compiler.pipeline.pack.user_sources import Base, digest_now
from prejit.compiler.pipeline.result_keys import versions
from prejit.compiler.progress import Progress
from prejit.compiler.rebuilding.build_record import Recorded, read_recorded
from prejit.compiler.rebuilding.compared_parts import ComparedPart, compare
from prejit.compiler.store.directory_store import DirectoryStore
from prejit.compiler.targets.target_classes import Target
from prejit.runtime.base.files import digest_of, store_errors
from prejit.runtime.errors import BuildError
from prejit.runtime.format.audit import audit
from prejit.runtime.generation.options import check_generation


@dataclass(frozen=True)
class Rebuilt:
    """A bundle that was built again."""

    path: Path
    digest: str
    rebuilt: str
    parts: tuple[ComparedPart, ...]

    @property
    def findings(self) -> tuple[ComparedPart, ...]:
        """The parts that differ, and nothing explains why."""
        return tuple(each for each in self.parts if each.verdict == "differs")


def rebuild(
    bundle: Path,
    manifest: Path | None,
    *,
    progress: Progress,
    workers: int | None = None,
    timeout_seconds: float = JOB_SECONDS,
) -> Rebuilt:
    """Build a bundle again from its recorded inputs, and compare.

    Without a manifest it is the file that the bundle names, in the working directory.

    Raises:
        UsageError: the bundle was recorded from a run, or its manifest was made in Python.
        BuildError: it does not say from what it was built, a source is no longer what it was, or a program
            does not compile.
        ManifestError, CheckpointError, RejectError, StoreError, NetworkError: something cannot be read.
    """
    audit(bundle, check_generation)  # parts are compared by their digests
    recorded = read_recorded(bundle)
    read = _read_manifest(recorded, Path(recorded.manifest) if manifest is None else manifest)
    pinned = replace(read, targets=tuple(_pinned(each, recorded) for each in read.targets))
    with tempfile.TemporaryDirectory(prefix="prejit-rebuild-") as temporary:
        directory = Path(temporary)
        forms = directory / "chosen-forms.json"
        forms.write_text(to_text(_chosen_forms(pinned.targets, recorded)))
        store = DirectoryStore.open(directory / "store")
        options = BuildOptions(
            store=store,
            executor=WorkerPool(
                store, workers=workers, progress=progress, timeout_seconds=timeout_seconds
            ),
            progress=progress,
            forms=forms,
            measure=False,
            timeout_seconds=timeout_seconds,
            kernels_by=_recorded_compilers(recorded),
        )
        only = tuple(each.name for each in pinned.targets if each.name in recorded.targets)
        built = build(pinned, directory / "bundles", options, only=only)
        with progress.phase("comparing"):
            parts = compare(recorded, read_recorded(built.path))
    return Rebuilt(bundle, recorded.digest, built.digest, parts)


def _read_manifest(recorded: Recorded, path: Path) -> Manifest:
    """Return the manifest, after all sources were found to be what they were."""
    if not path.is_file():
        raise BuildError(
            f"{recorded.path}: expected its manifest at {path}, found no file",
            hint="give it: --manifest FILE, in a checkout of the sources that the bundle was built from",
        )
    with store_errors(path, "read"):
        found = digest_of(path.read_bytes())
    problems = []
    if found != recorded.manifest_digest:
        problems.append(_problem(path, recorded.manifest_digest, found))
    problems += _changed(recorded, "manifest", path.parent)
    if not problems:
        manifest = read_manifest(path)
        models: tuple[tuple[Base, Manifest | None], ...] = (
            ("model", manifest),
            ("draft", manifest.of_draft),
        )
        for base, of in models:
            if of is not None and of.model is not None and of.model.source is not None:
                weights = any(source.base == base for source in recorded.sources)
                directory = resolve_source(of.model.source, of.directory, weights=weights)
                problems += _changed(recorded, base, directory)
    if problems:
        listed = "\n".join(f"  {each}" for each in problems)
        raise BuildError(
            f"{recorded.path}: {len(problems)} of the files that it was built from differ\n{listed}",
            hint="check out the sources of that build, and give its manifest with --manifest",
        )
    return manifest


def _changed(recorded: Recorded, base: Base, directory: Path) -> list[str]:
    """Return the sources in a directory that are no longer what they were."""
    return [
        _problem(directory / source.name, source.digest, now)
        for source in recorded.sources
        if source.base == base and (now := digest_now(source, directory)) != source.digest
    ]


def _problem(name: Path, expected: str, found: str | None) -> str:
    return f"{name}: expected {expected}, found {found or 'no file'}"


def _pinned(target: Target, recorded: Recorded) -> Target:
    """Return a target that is compiled with the bundle's own version of jax."""
    contents = recorded.targets.get(target.name)
    if contents is None or target.jax is not None:
        return target
    wanted = contents.config.versions.get("jax")
    return target if wanted in (None, versions("jax")["jax"]) else replace(target, jax=wanted)


def _recorded_compilers(recorded: Recorded) -> Mapping[str, str]:
    """Return the compiler of each target's kernels. A target that was built without them gets none.

    Where no program calls a kernel the bundle has no library, but the forms of its products all the same.
    """
    return {
        name: recorded.kernels.get(name, {}).get("compiler", "")
        for name, contents in recorded.targets.items()
        if contents.config.kernels is not None or contents.config.forms is not None
    }


def _chosen_forms(targets: Iterable[Target], recorded: Recorded) -> FormTable:
    """Return a table from which a build chooses the forms of products that a bundle has.

    Forms were chosen by measurement, which is no input that could be read again. They may differ between
    versions of jaxlib.
    """
    entries = []
    for target in targets:
        level = level_of(target)
        if target.name not in recorded.targets or isinstance(level, NoKernels):
            continue
        config = recorded.targets[target.name].config
        jaxlib = config.versions.get("jaxlib", "")
        conditions = Conditions(level, "the bundle that is rebuilt", 0, jaxlib, "", "")
        for each in config.forms or ():
            product = Product.parse(each.product)
            entries.append(Measured(product, {each.form: 1}, conditions, each.date or "2026-01-01"))
    return FormTable().merged(FormTable(tuple(entries)))
