"""The files from which a bundle is built, each with its digest. No JAX, and no code of the user runs.

Modules of the user are found by reading their sources, beginning with the modules that the manifest names.
A module that code imports by a computed name is not among them: a rebuild then finds a program that differs,
but cannot name the file.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any, Literal

from prejit.compiler.lowering.user.source_modules import imports_of
from prejit.compiler.lowering.user.trace_inputs import (
    Present,
    files_below,
    is_installed,
    read_source,
)
from prejit.compiler.manifest.manifest import Manifest, Model, Program
from prejit.compiler.pipeline.model import file_digest
from prejit.runtime.base.files import digest_of
from prejit.runtime.lora.peft_files import adapter_files

Base = Literal["manifest", "model", "draft"]
"""The directory that a name is relative to: the manifest's, or the model's."""

_MOST = 2_000
"""Maximum number of sources, because signed statements have a maximum size."""


@dataclass(frozen=True, order=True, slots=True)
class SourceContent:
    """A file or directory that decides what is in a bundle.

    Attributes:
        base: the directory that the name is relative to.
        name: its relative path; that of a directory ends with a slash.
        digest: digest of its content; of a directory, of the names and digests of all files in it.
    """

    base: Base
    name: str
    digest: str


def manifest_sources(manifest: Manifest) -> tuple[SourceContent, ...]:
    """Return the files that a manifest names, and the modules of the user, sorted."""
    if manifest.path is None:
        return ()
    directory = manifest.directory.absolute()
    files = {Path(os.path.abspath(manifest.resolve(name))) for name in _named(manifest)}
    files |= {Path(os.path.abspath(each)) for each in _modules(manifest)}
    sources = []
    for file in sorted(files)[:_MOST]:
        name = os.path.relpath(file, directory) + "/" * file.is_dir()
        if (digest := _digest(file)) is not None:
            sources.append(SourceContent("manifest", name, digest))
    return tuple(sorted(sources))


def digest_now(source: SourceContent, directory: Path) -> str | None:
    """Return the digest that a source has now in a directory; None: it is gone."""
    return _digest(directory / source.name)


def _digest(path: Path) -> str | None:
    if path.is_file():
        return file_digest(path)
    if not path.is_dir():
        return None
    files = sorted(each for each in files_below(path) if each.is_file())
    lines = (f"{each.relative_to(path)} {file_digest(each)}\n" for each in files)
    return digest_of("".join(lines).encode("utf-8", "surrogateescape"))


def _named(manifest: Manifest) -> Iterator[str]:
    """Yield the paths in a manifest, except that of its model."""
    if manifest.bundle.license is not None:
        yield manifest.bundle.license
    if (model := manifest.model) is not None:
        yield from (each for each in (model.evaluation, model.params) if isinstance(each, str))
        for adapter in model.adapters:
            yield from map(str, adapter_files(manifest.resolve(adapter)))
    for program in manifest.programs:
        if program.is_file:
            yield str(program.fn)
        if isinstance(program.params, str):
            yield program.params
        yield from () if program.check is None else program.check.files
    models = [] if manifest.model is None else [manifest.model]
    sections: list[Program | Model] = [*manifest.programs, *models]
    for section in sections:
        for pattern in section.reads:
            yield from glob(pattern, root_dir=manifest.directory, recursive=True)
    yield from (library.path for library in manifest.libraries)
    assert manifest.path is not None
    if not manifest.path.is_file():  # made in Python, with the path that names are relative to
        return
    with manifest.path.open("rb") as file:  # a resolved target names no files
        tables: list[Any] = tomllib.load(file).get("target", [])
    for table in tables:
        yield from (table[key] for key in ("fingerprint", "tuning") if key in table)


def _modules(manifest: Manifest) -> Iterator[str]:
    """Yield the files of the modules of the user that a manifest names, and of those that these import."""
    objects: list[Any] = [each.fn for each in manifest.programs if not each.is_file]
    objects += [each.args for each in manifest.programs]
    objects += [each.check.function for each in manifest.programs if each.check is not None]
    objects += [None if manifest.model is None else manifest.model.module]
    left = [each.partition(":")[0] for each in objects if isinstance(each, str)]
    present, seen = Present(manifest.directory), {""}
    while left:
        name = left.pop()
        if name in seen:
            continue
        seen.add(name)
        package = name.rpartition(".")[0]
        left.append(package)
        spec = present.spec(name)
        if spec is None or not spec.has_location or is_installed(os.path.abspath(str(spec.origin))):
            continue
        yield str(spec.origin)
        with suppress(OSError):
            is_package = spec.submodule_search_locations is not None
            content = read_source(spec)
            found = imports_of(content, name if is_package else package, is_package)
            left += [*found.names, *found.attributes]
