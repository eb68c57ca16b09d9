"""A manifest as a value: what to compile and for which machines.

    [bundle]      BundleTable        name, license
    [model]       Model              source, dtype, evaluation; it needs one of the next two
    [generate]    Generate           batch, prompt, context, draft_tokens, cache_dtype
    [encode]      Encode             shapes
    [mesh]        Mesh               data, tensor: several devices run one program
    [[program]]   Program            name, function, args, buckets, params
    [[target]]    Target             name, jax, ...: see target_table.TargetTable

`reading.read_manifest` makes it from TOML. Python code makes it with `Manifest(...)`, and
`reading.check_manifest` then finds the same mistakes as in a file.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from prejit.compiler.targets.target_table import TableError, TargetTable, resolve
from prejit.runtime.errors import ManifestError
from prejit.runtime.format.arrays import Mesh
from prejit.runtime.machine.targets import Target

STRICT = {"strict": True, "extra": "forbid"}
"""The pydantic settings of every section: no conversions and no unknown keys."""


@dataclass(frozen=True, slots=True)
class BundleTable:
    """`[bundle]`: the bundle that the build writes.

    Attributes:
        name: name of the bundle; a valid name in an OCI reference.
        license: path of the licence text, relative to the manifest.
    """

    __pydantic_config__: ClassVar = STRICT

    name: str
    license: str | None = None


@dataclass(frozen=True, slots=True)
class Model:
    """`[model]`: a published checkpoint.

    Attributes:
        source: a directory in the Hugging Face layout, relative to the manifest, or
            `hf://org/name@revision`.
        dtype: dtype in which the matrices are stored. All arithmetic is float32.
        evaluation: path of a text, relative to the manifest. The build measures on its last tokens what
            the dtypes cost in accuracy; without it, on text that a decoder writes itself or on random tokens.
    """

    __pydantic_config__: ClassVar = STRICT

    source: str
    dtype: str = "float32"
    evaluation: str | None = None


@dataclass(frozen=True, slots=True)
class Generate:
    """`[generate]`: the buckets of a decoder.

    Attributes:
        batch: numbers of sequences that are decoded together.
        prompt: numbers of tokens that one prefill takes.
        context: lengths of the KV cache in tokens; a cache grows from one to the next as its text grows.
        draft_tokens: largest number of draft tokens (prompt lookup) that one pass verifies; 0 builds no
            programs for drafts.
        cache_dtype: dtype of the KV cache.
    """

    __pydantic_config__: ClassVar = STRICT

    batch: tuple[int, ...]
    prompt: tuple[int, ...]
    context: tuple[int, ...]
    draft_tokens: int = 0
    cache_dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class Encode:
    """`[encode]`: the buckets of an encoder.

    Attributes:
        shapes: pairs of batch and length: sentences that are encoded together, and the tokens of each.
    """

    __pydantic_config__: ClassVar = STRICT

    shapes: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """A function of the user: a `[[program]]` section, or a Python object.

    Attributes:
        name: name of the program; unique in the bundle.
        fn: a function, a flax.linen module or a flax.nnx module: the object itself, or
            `package.module:attribute`.
        args: shape strings such as `float32[{batch}, 128]`: a dict of keyword arguments or a list of
            positional ones, nested as the pytrees that the function takes.
        buckets: the sizes that each variable of args takes.
        params: the first argument of the function: a pytree of arrays, or the path of a .safetensors file
            or orbax directory, relative to the manifest. None: the function takes `args` alone, or is a
            flax.nnx module with parameters of its own.
    """

    name: str
    fn: str | Callable[..., Any]
    args: Any
    buckets: Mapping[str, Sequence[int]] = field(default_factory=dict)
    params: Any = None

    @property
    def label(self) -> str:
        """The name of the function, for messages."""
        return self.fn if isinstance(self.fn, str) else getattr(self.fn, "__qualname__", self.name)

    def expand(self) -> tuple[dict[str, int], ...]:
        """Return every combination of bucket sizes, first variable outermost; [{}] without buckets."""
        combinations = itertools.product(*self.buckets.values())
        return tuple(dict(zip(self.buckets, sizes, strict=True)) for sizes in combinations)


@dataclass(frozen=True, slots=True, init=False, eq=False)
class Manifest:
    """A manifest: the programs to compile, and the machines to compile them for.

    Attributes:
        bundle: the bundle that the build writes.
        model: a decoder, with `generate`, or an encoder, with `encode`.
        generate: the buckets of a decoder.
        encode: the buckets of an encoder.
        mesh: the devices that run a decoder's programs together; None: one device.
        programs: functions of the user.
        targets: the machines to compile for.
        path: the TOML file; None: the manifest was made in Python.
    """

    bundle: BundleTable
    model: Model | None
    generate: Generate | None
    encode: Encode | None
    mesh: Mesh | None
    programs: tuple[Program, ...]
    targets: tuple[Target, ...]
    path: Path | None

    def __init__(
        self,
        bundle: BundleTable | str,
        *,
        targets: Iterable[str | TargetTable | Target],
        programs: Iterable[Program] = (),
        model: Model | None = None,
        generate: Generate | None = None,
        encode: Encode | None = None,
        mesh: Mesh | None = None,
        path: Path | None = None,
    ) -> None:
        """Make a manifest. Paths in it are relative to `path`, else to the working directory.

        Args:
            bundle: the bundle, or its name.
            targets: targets, or their names as `prejit targets` lists them.
            programs: see the attributes, as for the others.
            model: see above.
            generate: see above.
            encode: see above.
            mesh: see above.
            path: see above.

        Raises:
            ManifestError: a target does not exist.
        """
        mesh = mesh if mesh is not None and mesh.size > 1 else None
        set_ = object.__setattr__
        set_(self, "bundle", BundleTable(bundle) if isinstance(bundle, str) else bundle)
        set_(self, "model", model)
        set_(self, "generate", generate)
        set_(self, "encode", encode)
        set_(self, "mesh", mesh)
        set_(self, "programs", tuple(programs))
        set_(self, "path", path)
        set_(self, "targets", tuple(self._target(at, each) for at, each in enumerate(targets)))

    @property
    def where(self) -> str:
        """The manifest's file, or its bundle's name: the start of an error message."""
        return f"manifest {self.bundle.name!r}" if self.path is None else str(self.path)

    @property
    def directory(self) -> Path:
        """The directory that the manifest's paths are relative to."""
        return Path() if self.path is None else self.path.parent

    def resolve(self, path: str) -> Path:
        """Return the absolute form of a path in the manifest."""
        return Path(os.path.abspath(self.directory / path))

    def _target(self, place: int, given: str | TargetTable | Target) -> Target:
        if isinstance(given, Target):
            return given
        table = TargetTable(given) if isinstance(given, str) else given
        try:
            return resolve(table, self.directory, self.mesh)
        except TableError as error:
            raise ManifestError(
                f"{self.where}: target[{place}].{error.key}: {error}",
                hint="`prejit targets` lists the names",
            ) from error
