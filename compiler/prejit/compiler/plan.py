"""What a manifest asks for and what of it is in the cache: programs x targets, each with its key.

Two steps make an executable, and each is cached under a key of its own:

    lower    model or function, at a bucket      -> portable program        once for all targets
    compile  portable program, for a target      -> executable              in a worker process

A decoder's lowering is found by what it is made from (config, our sources, versions), so a build that
changes nothing imports neither jax nor flax. A user's function can read anything, so it is traced
each time; its compile is cached all the same, under the digest of what tracing gave.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import zstandard

from prejit.compiler import environments
from prejit.compiler.cache import Cache
from prejit.compiler.cache_key import Key, why
from prejit.compiler.compilation import find_compiled
from prejit.compiler.manifest import Manifest
from prejit.compiler.progress import Progress
from prejit.compiler.source import resolve_source
from prejit.compiler.specs import ProgramSpec, program_specs
from prejit.compiler.target import can_build, chosen
from prejit.compiler.tensor_files import read_parameters
from prejit.compiler.toolchain import Toolchain, host_toolchain, read_tuning, toolchain_of
from prejit.runtime import bundle
from prejit.runtime.bundle import Segment
from prejit.runtime.errors import BuildError, ManifestError
from prejit.runtime.receipt import Receipts
from prejit.runtime.target import Target

if TYPE_CHECKING:
    import numpy as np

    from prejit.compiler.lowering import LoweredProgram, UserFunction

_ZSTD_LEVEL = 10


@dataclass(frozen=True, slots=True)
class Lowered:
    """A portable program in the cache.

    Attributes:
        portable: its frame; the offset is not known yet.
        platforms: that it was lowered for, in the order of its platform index.
        stablehlo: the version of its form.
        weights: names of the tensors that come first among the arguments, in order.
        arguments, results: the others, as `bundle.Array` prints them.
        decoder: fields of `bundle.Decoder` that the model decides; None for a user's function.
        weight_shardings: of those weights that a mesh splits, as `bundle.Array` spells them.
    """

    portable: Segment
    platforms: tuple[str, ...]
    stablehlo: str
    weights: tuple[str, ...]
    arguments: tuple[str, ...]
    results: tuple[str, ...]
    decoder: dict[str, Any] | None = None
    weight_shardings: dict[str, str] = field(default_factory=dict)

    @classmethod
    def from_json(cls, result: Mapping[str, Any]) -> Lowered:
        """The inverse of dataclasses.asdict, after JSON."""
        return cls(
            Segment(**result["portable"]),
            tuple(result["platforms"]),
            result["stablehlo"],
            tuple(result["weights"]),
            tuple(result["arguments"]),
            tuple(result["results"]),
            result["decoder"],
            result["weight_shardings"],
        )


@dataclass(frozen=True, slots=True)
class PlannedProgram:
    """One program for one target.

    Attributes:
        spec: the program.
        target: the target.
        cached: whether its executable is in the cache.
        why: why it has to be compiled; empty where it is cached.
    """

    spec: ProgramSpec
    target: Target
    cached: bool
    why: str = ""


def make_plan(inputs: Inputs) -> tuple[PlannedProgram, ...]:
    """What a build of a manifest would do. Compiles nothing and writes no bundle.

    Raises:
        ManifestError, CheckpointError, StoreError, NetworkError: the manifest, its model or its
            functions cannot be read.
    """
    planned = []
    for spec in inputs.specs:
        lowered = inputs.cached(spec) if spec.kind != "call" else inputs.lower(spec)
        for target in inputs.targets:
            if lowered is None:
                key = inputs.lower_key(spec)
                reason = why(inputs.cache.last_key(key.kind, key.name), key)
                planned.append(PlannedProgram(spec, target, False, reason))
                continue
            toolchain = inputs.toolchain(target)
            if toolchain is None:
                reason = "its environment has still to be made"
                planned.append(PlannedProgram(spec, target, False, reason))
                continue
            key = inputs.compile_key(spec, toolchain, lowered)
            if find_compiled(inputs.cache, key) is not None:
                planned.append(PlannedProgram(spec, target, True))
            else:
                reason = why(inputs.cache.last_key(key.kind, key.name), key)
                planned.append(PlannedProgram(spec, target, False, reason))
    return tuple(planned)


def why_not(target: Target) -> str | None:
    """Why this machine cannot compile for a target; None: it can, if packages can be fetched."""
    if reason := can_build(target):
        return reason
    wanted = environments.wanted(target, _version("jax"))
    error = None if wanted is None else environments.obstacle(wanted)
    return None if error is None else f"{error} ({error.hint})"


@final
class Inputs:
    """Everything that a build of one manifest starts from, read when it is first wanted."""

    def __init__(self, manifest: Manifest, cache: Cache, only: tuple[str, ...] = ()) -> None:
        """Binds a manifest to a cache.

        Args:
            manifest: what to build.
            cache: where results are kept.
            only: names of targets to build; empty: all of the manifest.

        Raises:
            BuildError: this machine cannot compile for a target.
        """
        self.manifest = manifest
        self.cache = cache
        self.specs = program_specs(manifest)
        self.targets = chosen(manifest.targets, only, str(manifest.path))
        self._toolchains: dict[str, Toolchain] = {}
        for target in self.targets:
            if reason := can_build(target):
                raise BuildError(f"{manifest.path}: target {target.name}: {reason}")

    def toolchain(self, target: Target) -> Toolchain | None:
        """What compiles for a target; None where its environment has still to be made."""
        if target.name not in self._toolchains:
            wanted = environments.wanted(target, _version("jax"))
            if wanted is None:
                found = host_toolchain(target, versions("jax", "jaxlib"))
            elif (environment := environments.find(wanted)) is not None:
                found = toolchain_of(target, environment)
            else:
                return None
            tuned = read_tuning(target, self.cache)
            self._toolchains[target.name] = replace(found, tuned=tuned)
        return self._toolchains[target.name]

    def made_toolchain(self, target: Target, progress: Progress) -> Toolchain:
        """What compiles for a target; its environment is made where it has to be.

        Raises:
            BuildError, NetworkError, StoreError: it cannot be made.
        """
        if (found := self.toolchain(target)) is None:
            wanted = environments.wanted(target, _version("jax"))
            assert wanted is not None
            environments.make(wanted, progress)
            found = self.toolchain(target)
            assert found is not None
        return found

    @cached_property
    def directory(self) -> Path:
        """The model's checkpoint directory, fetched where it is not local."""
        assert self.manifest.model is not None
        return resolve_source(self.manifest.model.source, self.manifest.path.parent)

    @cached_property
    def _user(self) -> dict[str, UserFunction]:
        """The functions of the [[program]] sections, imported, with their parameters' shapes."""
        if not self.manifest.programs:
            return {}  # and jax is not imported for it
        from prejit.compiler.lowering import find_function

        found = {}
        for program in self.manifest.programs:
            parameters = None
            if program.params is not None:
                parameters = read_parameters(self.manifest.resolve(program.params))
            found[program.name] = find_function(program, self.manifest.path, parameters)
        return found

    def lower_key(self, spec: ProgramSpec) -> Key:
        """The key of a decoder's lowering."""
        sizes = ", ".join(f"{name}={size}" for name, size in sorted(spec.bucket.items()))
        mesh = self.manifest.mesh
        assert self.manifest.model is not None
        return Key(
            "lower",
            f"{self.manifest.bundle.name}/{spec.name}",
            (
                ("program", spec.kind),
                ("bucket", sizes),
                ("dtype", self.manifest.model.dtype),
                ("mesh", "none" if mesh is None else f"{mesh.data} x {mesh.tensor}"),
                ("config.json", file_digest(self.directory / "config.json")),
                ("model code", source_digest()),
                *versions("jax", "jaxlib", "flax", "transformers").items(),
            ),
        )

    def compile_key(self, spec: ProgramSpec, toolchain: Toolchain, lowered: Lowered) -> Key:
        """The key of a compile: everything that decides the executable."""
        return Key(
            "compile",
            f"{self.manifest.bundle.name}/{toolchain.target.name}/{spec.name}",
            (
                ("stablehlo", lowered.portable.raw_digest),
                *toolchain.ingredients(os.environ),
                ("format", str(bundle.FORMAT_VERSION)),
            ),
        )

    def cached(self, spec: ProgramSpec) -> Lowered | None:
        """A decoder's lowered program, where it is in the cache."""
        result = self.cache.lookup(self.lower_key(spec))
        return Lowered.from_json(result) if result is not None else None

    def lower(self, spec: ProgramSpec) -> Lowered:
        """Lowers a program, and keeps it in the cache.

        Raises:
            BuildError, ManifestError: it cannot be lowered.
        """
        if spec.kind == "call":
            return self._store(self._lower_function(spec))
        from prejit.compiler.lowering import check_mesh, lower_decoder

        longest = self._shape.max_positions
        if spec.bucket["context"] > longest:
            raise ManifestError(
                f"{self.manifest.path}: generate.context: expected at most {longest}, "
                f"the positions that {self.directory / 'config.json'} gives the model; "
                f"found {spec.bucket['context']}"
            )
        if (mesh := self.manifest.mesh) is not None:
            config = self.directory / "config.json"
            check_mesh(mesh, self.model, self._shape, self.manifest.path, config)
        program = lower_decoder(self.model, self._shape, spec, mesh)
        lowered = self._store(program, asdict(self._shape))
        blobs = [lowered.portable.digest, lowered.portable.raw_digest]
        self.cache.store(self.lower_key(spec), asdict(lowered), blobs=blobs)
        return lowered

    @cached_property
    def _config(self) -> Any:
        from prejit.compiler import models

        return models.load_config(self.directory)

    @cached_property
    def model(self) -> Any:
        """The decoder as an abstract flax module: shapes, no values."""
        from prejit.compiler import models

        return models.decoder(self._config)

    @cached_property
    def _shape(self) -> Any:
        from prejit.compiler import models

        return models.describe(self._config)

    def _lower_function(self, spec: ProgramSpec) -> LoweredProgram:
        from prejit.compiler.lowering import lower_function

        section = next(p for p in self.manifest.programs if p.name == spec.section)
        platforms = [target.platform for target in self.targets]
        user = self._user[section.name]
        return lower_function(user, section, spec, self.manifest.path, platforms)

    def _store(self, program: LoweredProgram, decoder: dict[str, Any] | None = None) -> Lowered:
        raw = program.portable
        frame = zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_checksum=True).compress(raw)
        # The frame goes into the bundle, the program itself to the workers.
        digest, raw_digest = self.cache.put_blob(frame), self.cache.put_blob(raw)
        segment = Segment(0, len(frame), digest, len(raw), raw_digest)
        return Lowered(
            segment,
            program.platforms,
            _stablehlo_version(raw),
            program.weights,
            tuple(map(str, program.arguments)),
            tuple(map(str, program.results)),
            decoder,
            {name: ",".join(axes) for name, axes in program.weight_shardings.items()},
        )

    def parameters(self) -> dict[str, Any]:
        """Shapes and dtypes of the decoder's parameters, by name."""
        from flax import nnx

        from prejit.compiler import models

        return models.flat_parameters(nnx.state(self.model))

    def user_weights(self) -> dict[str, Mapping[str, np.ndarray[Any, Any]]]:
        """The parameters of the user's functions, by section."""
        return {name: user.values for name, user in self._user.items() if user.values}


@cache
def file_digest(path: Path) -> str:
    """Digest of a file, from a receipt where it did not change since it was last hashed."""
    receipts = Receipts(path.parent)
    digest = receipts.digest_of(path)
    receipts.save()
    return digest


@cache
def source_digest() -> str:
    """Digest of our own sources that decide what a decoder's program is."""
    here = Path(__file__).parent
    files = [here / "lowering.py", here / "sampling.py", *sorted((here / "models").glob("*.py"))]
    hasher = hashlib.sha256()
    for file in files:
        hasher.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return f"sha256:{hasher.hexdigest()}"


@cache
def _version(package: str) -> str:
    return metadata.version(package)


def versions(*packages: str) -> dict[str, str]:
    """Versions of installed packages."""
    return {package: _version(package) for package in packages}


def _stablehlo_version(portable: bytes) -> str:
    """The version that a portable artifact names in its header (stablehlo/api/PortableApi.h)."""
    found = re.search(rb"StableHLO_v(\d+\.\d+\.\d+)", portable[:256])
    return found[1].decode() if found else "0.0.0"
