"""The files from which a bundle is built, each with its digest. No JAX, and no code of the user runs.

Modules of the user are found by reading `import` statements, beginning with the modules that the manifest
names. A module that code imports by a computed name is not among them: a rebuild then finds a program that
differs, but cannot name the file.
"""

from __future__ import annotations

import ast
import os
import sys
import sysconfig
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any, Literal

from prejit.compiler.base import python_source
from prejit.compiler.base.python_source import is_in_package
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
    files |= {Path(each) for each in _modules(manifest, directory)}
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
    files = sorted(each for each in path.rglob("*") if each.is_file())
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


def _modules(manifest: Manifest, directory: Path) -> set[str]:
    objects: list[Any] = [each.fn for each in manifest.programs if not each.is_file]
    objects += [each.args for each in manifest.programs]
    objects += [each.check.function for each in manifest.programs if each.check is not None]
    objects += [None if manifest.model is None else manifest.model.module]
    named = [each.partition(":")[0] for each in objects if isinstance(each, str)]
    python = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    path = [str(directory)]
    path += [
        each
        for each in map(os.path.abspath, sys.path)
        if not is_in_package(each)
        and not each.startswith(tuple(python))
        and not os.path.isfile(os.path.join(each, "prejit", "compiler", "api.py"))
    ]
    found: dict[str, str] = {}
    left = [*named]
    while left:
        name = left.pop()
        for module in _with_packages(name):
            if module in found or (file := _find(module, path)) is None:
                continue
            found[module] = file
            left += _imports(module, file)
    return set(found.values())


def _with_packages(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[: count + 1]) for count in range(len(parts)))


def _find(module: str, path: Iterable[str]) -> str | None:
    """Return the file of a module; None: it is not of the user, or a package without code."""
    place = module.replace(".", os.sep)
    for directory in path:
        for name in (os.path.join(place, "__init__.py"), f"{place}.py"):
            file = os.path.join(directory, name)
            if os.path.isfile(file):
                return file
    return None


def _imports(module: str, file: str) -> Iterator[str]:
    """Yield the names that a module may import, of modules and of others."""
    package = module if file.endswith("__init__.py") else module.rpartition(".")[0]
    try:
        tree = python_source.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            start = ".".join([*(above if node.level else ()), *filter(None, [node.module])])
            if start:
                yield start
                yield from (f"{start}.{each.name}" for each in node.names)
