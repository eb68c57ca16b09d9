"""A build cache whose programs of models are damaged: the next build makes them again, and says so."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.decoders import write_random
from tests.extent import cases
from tests.quick_compiling import XLA_FLAGS

from prejit.compiler.compile.pool import WorkerPool
from prejit.compiler.manifest.manifest import Generate, Manifest, Model
from prejit.compiler.pipeline.build_interface import Built
from prejit.compiler.pipeline.build_run import build
from prejit.compiler.pipeline.plan import (
    Plan,
    choose_source,
    find_toolchain,
    kernels_of,
    plan_build,
)
from prejit.compiler.pipeline.reuse import known_native
from prejit.compiler.progress import Progress
from prejit.compiler.store.directory_store import DirectoryStore


class Told(Progress):
    """Keeps what people would read."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def _tell(self, text: str) -> None:
        self.texts.append(text)

    def _tell_finished(self, text: str) -> None:
        pass


@dataclass(frozen=True)
class Project:
    """A model that was built.

    Attributes:
        manifest: of the model.
        output: directory of the bundle.
        store: the build cache.
        digest: of the bundle.
    """

    manifest: Manifest
    output: Path
    store: DirectoryStore
    digest: str

    @property
    def plan(self) -> Plan:
        return plan_build(self.manifest, self.store)

    def build(self) -> tuple[Built, list[str]]:
        told = Told()
        return _build(self.manifest, self.output, self.store, told), told.texts

    def forget(self, kind: str, *names: str) -> None:
        """Delete the results of a kind, all or those of some programs."""
        for path in (self.store.root / "v1" / "actions" / kind).glob("*.json"):
            body = json.loads(path.read_bytes().partition(b"\n")[2])
            of_ours = body["name"].startswith("healing/")
            if not names or (of_ours and body["name"].endswith(names)):
                path.unlink()


def _build(manifest: Manifest, output: Path, store: DirectoryStore, told: Progress) -> Built:
    quickly = {**os.environ, "XLA_FLAGS": XLA_FLAGS}
    pool = WorkerPool(store, workers=1, progress=told, environ=quickly)
    return build(manifest, output, store=store, executor=pool, progress=told, measure=False)


@pytest.fixture(scope="module")
def project(build_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Project:
    directory = tmp_path_factory.mktemp("healing")
    manifest = Manifest(
        "healing",
        model=Model(str(write_random("gpt2", directory / "gpt2"))),
        generate=Generate(batch=(1,), prompt=(8,), context=(20, 28)),
        targets=["cpu-host"],
    )
    store = DirectoryStore.open(build_cache)
    built = _build(manifest, directory / "out", store, Told())
    return Project(manifest, directory / "out", store, built.digest)


def delete(path: Path) -> None:
    path.unlink()


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def blobs(project: Project) -> Iterator[tuple[str, str, str]]:
    """Yield a program that is compiled from its portable form, one with kernels and one to be packed.

    Each with `source` or `frame`, and the digest of that blob.
    """
    plan = project.plan
    programs = {each.spec.name: each for each in plan.programs}
    copy, decode, prompt = (
        next(name for name, each in programs.items() if each.spec.kind == kind)
        for kind in ("copy", "decode", "prefill")
    )
    lowered = {name: each.lowered for name, each in programs.items()}
    plain, with_kernels, packed = lowered[copy], lowered[decode], lowered[prompt]
    assert plain is not None
    assert with_kernels is not None
    assert packed is not None
    yield copy, "source", plain.portable.raw_digest
    toolchain = find_toolchain(plan.targets[0])
    assert toolchain is not None
    from prejit.compiler.native.kernel_library import KernelLibrary, find_kernels

    library = find_kernels(toolchain, project.store)
    if isinstance(library, KernelLibrary):
        kernels = kernels_of(library, toolchain, plan.forms)
        source = choose_source(
            plan.manifest,
            programs[decode].spec,
            with_kernels,
            kernels,
            lambda f: known_native(programs[decode].key, project.store, f),
        )
        assert source.program != with_kernels.portable.raw_digest
        yield f"{decode} with kernels", "source", source.program
    yield prompt, "frame", packed.portable.digest


@pytest.mark.parametrize("damage", cases([flip], others=[delete]))
def test_damaged_programs_of_a_model_are_lowered_again_by_the_same_build(
    project: Project, damage: Callable[[Path], None]
) -> None:
    """Programs to compile and to pack. Those that neither needs are not read, and stay as they are."""
    damaged = list(blobs(project))
    for _, _, digest in damaged:
        path = project.store.blob_path(digest)
        assert path is not None
        damage(path)
    compiled = [name.partition(" ")[0] for name, what, _ in damaged if what == "source"]
    project.forget("compile", *compiled)
    project.forget("pack")
    built, told = project.build()
    assert built.digest == project.digest
    assert built.compiled == len(compiled)
    again = "was damaged or deleted in the build cache and is lowered again"
    assert sorted(each for each in told if again in each) == sorted(
        f"{name} {again}" for name, _, _ in damaged
    )
    for _, _, digest in damaged:
        assert project.store.read_blob(digest) is not None
