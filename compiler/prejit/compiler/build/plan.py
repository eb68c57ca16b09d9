"""What a manifest asks for and what of it is in the cache: programs x targets, each with its key.

Two steps make an executable, and each is cached under a key of its own:

    lower    model or function, at a bucket      -> portable program        once for all targets
             again, with calls of kernels        -> native program          once for all CPUs with kernels
    compile  one of them, for a target           -> executable              in a worker process

A decoder's lowering is found by what it is made from (config, our sources, versions), so a build that
changes nothing imports neither jax nor flax. A user's function can read anything, so it is traced
each time; its compile is cached all the same, under the digest of what tracing gave.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property, partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import zstandard

from prejit.compiler.build.packaging import Tensor
from prejit.compiler.checkpoint.checkpoint import Checkpoint, open_checkpoint, open_encoder
from prejit.compiler.checkpoint.source import resolve_source
from prejit.compiler.checkpoint.tensor_files import read_parameters
from prejit.compiler.compile.executor import find_compiled
from prejit.compiler.compile.jobs import Source, compile_ingredients
from prejit.compiler.lowering.user.modules import UserModules
from prejit.compiler.manifest.manifest import Manifest
from prejit.compiler.manifest.specs import ProgramSpec, program_specs
from prejit.compiler.models.encoders.sentence_layout import SentenceLayout, read_layout
from prejit.compiler.native.calls import called
from prejit.compiler.native.form_choice import FormChoice, KnownForms
from prejit.compiler.native.form_table import (
    Conditions,
    FormTable,
    conditions_of,
    own_path,
    read_own,
    read_recorded,
    read_table,
)
from prejit.compiler.native.library import (
    KERNELS_ARCHITECTURE,
    KernelLibrary,
    NoKernels,
    build_kernels,
    find_kernels,
)
from prejit.compiler.native.products import Product
from prejit.compiler.progress import Progress
from prejit.compiler.store.code import LOWERING, code_digest, jax_configuration
from prejit.compiler.store.interface import Store
from prejit.compiler.store.key import Key, why
from prejit.compiler.targets import environments
from prejit.compiler.targets.target_table import can_build, chosen
from prejit.compiler.targets.toolchain import Toolchain, host_toolchain, read_tuning, toolchain_of
from prejit.runtime.errors import BuildError, ManifestError
from prejit.runtime.format.schema import Segment
from prejit.runtime.machine.target import Target
from prejit.runtime.store.receipts import Receipts

if TYPE_CHECKING:
    import numpy as np

    from prejit.compiler.lowering.program import LoweredProgram
    from prejit.compiler.lowering.user.finding import UserFunction

_WITHOUT_KERNELS = ("copy", "embed", "call")
"""Kinds of programs that have no use for any."""
_ZSTD_LEVEL = 10
MAX_PROGRAM_BYTES = 1 << 42
"""Largest size of a program's arrays in bytes, weights not counted: 4 TiB, more than the machines have that
programs are built for. XLA is slow or wrong far beyond it."""


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
        encoder: fields of `bundle.Encoder` that the model decides.
        weight_sets: tensors that may come first among the arguments, set by set; empty: `weights` alone.
        estimated_microseconds: of a run, where it cannot be measured.
    """

    portable: Segment
    platforms: tuple[str, ...]
    stablehlo: str
    weights: tuple[str, ...]
    arguments: tuple[str, ...]
    results: tuple[str, ...]
    decoder: dict[str, Any] | None = None
    weight_shardings: dict[str, str] = field(default_factory=dict)
    encoder: dict[str, Any] | None = None
    weight_sets: dict[str, tuple[str, ...]] = field(default_factory=dict)
    estimated_microseconds: int = 0

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
            result.get("encoder"),
            {name: tuple(tensors) for name, tensors in result.get("weight_sets", {}).items()},
            result.get("estimated_microseconds", 0),
        )


@dataclass(frozen=True, slots=True)
class Native:
    """A program with kernels in the cache.

    Attributes:
        program: digest of its StableHLO, a blob; kernels have no library's name yet.
        products: all that it computes, each with the form that it has in it.
    """

    program: str
    products: tuple[tuple[Product, str], ...]

    @classmethod
    def from_json(cls, result: Mapping[str, Any]) -> Native:
        """The inverse of dataclasses.asdict, after JSON."""
        products = ((Product(**product), form) for product, form in result["products"])
        return cls(result["program"], tuple(products))


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
    """What a build of a manifest would do. Compiles nothing, traces no model and writes no bundle.

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
            source = inputs.planned_source(spec, target, lowered)
            if isinstance(source, str):
                planned.append(PlannedProgram(spec, target, False, source))
                continue
            key = inputs.compile_key(toolchain, spec, source)
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

    def __init__(
        self,
        manifest: Manifest,
        cache: Store,
        only: tuple[str, ...] = (),
        *,
        forms: Path | None = None,
    ) -> None:
        """Binds a manifest to a cache.

        Args:
            manifest: what to build.
            cache: where results are kept.
            only: names of targets to build; empty: all of the manifest.
            forms: a table of measured forms, beside that of the cache and the recorded one.

        Raises:
            BuildError: this machine cannot compile for a target.
        """
        self.manifest = manifest
        self.cache = cache
        self.specs = program_specs(manifest)
        self.targets = chosen(manifest.targets, only, str(manifest.path))
        self._forms = forms
        self._choices: dict[tuple[str, Product], FormChoice] = {}
        self._conditions: dict[str, Conditions] = {}
        self._toolchains: dict[str, Toolchain] = {}
        self._kernels: dict[str, KernelLibrary | NoKernels] | None = None
        self._found_kernels: dict[str, KernelLibrary | NoKernels | None] = {}
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
        from prejit.compiler.lowering.user.finding import find_function

        found, modules = {}, UserModules(self.manifest.path.parent)
        for program in self.manifest.programs:
            parameters = None
            if program.params is not None:
                parameters = read_parameters(self.manifest.resolve(program.params))
            with modules.in_use():
                found[program.name] = find_function(
                    program, self.manifest.path, parameters, modules
                )
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
                ("cache_dtype", self.cache_dtype),
                ("longest context", str(self._longest_context)),
                ("mesh", "none" if mesh is None else f"{mesh.data} x {mesh.tensor}"),
                ("matrices", self.matrices),
                *self._configs(),
                ("our code", code_digest(*LOWERING)),
                ("jax configuration", self.jax_configuration),
                *versions("jax", "jaxlib", "flax", "transformers").items(),
            ),
        )

    @property
    def jax_configuration(self) -> str:
        """The settings of jax that decide what is lowered, as an ingredient of keys."""
        _ = self._user  # a module of the user's may set them when it is imported
        return jax_configuration(os.environ)

    def _configs(self) -> list[tuple[str, str]]:
        """The files that say what the model is, with their digests."""
        if self.manifest.encode is None:
            return [("config.json", file_digest(self.directory / "config.json"))]
        files = [*self.layout.files, self.layout.transformer / "config.json"]
        named = {str(file.relative_to(self.directory)): file for file in files}
        return [(name, file_digest(file)) for name, file in named.items()]

    def compile_key(self, toolchain: Toolchain, spec: ProgramSpec, source: Source) -> Key:
        """The key of a compile: everything that decides the executable."""
        name = f"{self.manifest.bundle.name}/{toolchain.target.name}/{spec.name}"
        return Key("compile", name, compile_ingredients(toolchain, source))

    def cached(self, spec: ProgramSpec) -> Lowered | None:
        """A model's lowered program, where it is in the cache."""
        result = self.cache.get(self.lower_key(spec))
        return Lowered.from_json(result) if result is not None else None

    def lower(self, spec: ProgramSpec) -> Lowered:
        """Lowers a program, and keeps it in the cache.

        Raises:
            BuildError, ManifestError: it cannot be lowered.
        """
        if spec.kind == "call":
            return self._store(self._lower_function(spec))
        # A model that its weights do not fit is refused before it is compiled.
        _ = self._tensor_names
        if self.manifest.encode is not None:
            return self._lower_encoder(spec)
        from prejit.compiler.lowering.decoder import lower_decoder

        self._check_size(spec)
        self._check_mesh()
        program = lower_decoder(self.model, self.shape, spec, self.manifest.mesh)
        lowered = self._store(program, asdict(self.shape))
        blobs = [lowered.portable.digest, lowered.portable.raw_digest]
        self.cache.put(self.lower_key(spec), asdict(lowered), blobs=blobs)
        return lowered

    def check(self) -> None:
        """Checks what takes seconds, before environments are made and kernels are compiled for minutes.

        Programs that are in the cache were checked when they were lowered.

        Raises:
            ManifestError, CheckpointError: a function cannot be found, a model is not built here, its files
                are missing, or it does not allow what the manifest asks of it.
        """
        _ = self._user
        new = [spec for spec in self.specs if spec.kind != "call" and self.cached(spec) is None]
        if not new:
            return
        self.checkpoint()
        for spec in new:
            self._check_size(spec)
        self._check_mesh()

    def _check_mesh(self) -> None:
        """Checks that the model can be split as the manifest says."""
        from prejit.compiler.models.sharding import check_mesh

        if (mesh := self.manifest.mesh) is not None and self.manifest.encode is None:
            config = self.directory / "config.json"
            check_mesh(mesh, self.model, self.shape, self.manifest.path, config)

    def _check_size(self, spec: ProgramSpec) -> None:
        """Checks that the model was made for a bucket, and that there is a machine with room for it."""
        from prejit.compiler.models.registry import describe_encoder

        if self.manifest.encode is not None:
            section, found = "encode.shapes", spec.bucket["length"]
            longest = describe_encoder(self.encoder).max_tokens
            limit = f"{longest} tokens, which is what {self.directory} takes"
        else:
            section, found = "generate.context", spec.bucket["context"]
            longest = self.shape.max_positions
            config = self.directory / "config.json"
            limit = f"{longest}, the positions that {config} gives the model"
        if longest is not None and found > longest:
            raise ManifestError(
                f"{self.manifest.path}: {section}: expected at most {limit}; found {found}"
            )
        needed = self._array_bytes(spec)
        if needed > MAX_PROGRAM_BYTES:
            raise ManifestError(
                f"{self.manifest.path}: {section.partition('.')[0]}: expected programs whose arrays take at "
                f"most {MAX_PROGRAM_BYTES >> 40} TiB, found {spec.name}, whose arrays take "
                f"{needed >> 40} TiB",
                hint="give a smaller batch, or a smaller context",
            )

    def _array_bytes(self, spec: ProgramSpec) -> int:
        """Bytes of what a program of the model reads and gives for its bucket, weights not counted."""
        bucket, rows = spec.bucket, spec.bucket["batch"]
        if self.manifest.encode is not None:
            config = self.encoder.config
            tokens = rows * bucket["length"]
            return 4 * tokens * (config.hidden_size + config.num_attention_heads * bucket["length"])
        shape = self.shape
        heads = 2 * shape.num_layers * shape.num_kv_heads * shape.head_size
        cache = rows * bucket["context"] * heads * (2 if shape.cache_dtype == "bfloat16" else 4)
        # Logits after each token of a draft, biases, counts of tokens.
        return cache + 4 * rows * shape.vocab_size * (3 + bucket.get("draft", 0))

    def kernels(self, progress: Progress | None = None) -> dict[str, KernelLibrary | NoKernels]:
        """The library of each target whose environment is there, from the cache or compiled now.

        Args:
            progress: told of what is compiled.
        """
        if self._kernels is None:
            self._kernels = {}
            if self._has_kernels:
                toolchains = filter(None, map(self.toolchain, self.targets))
                self._kernels = {
                    each.target.name: build_kernels(each, self.cache, progress)
                    for each in toolchains
                }
        return self._kernels

    def source(self, spec: ProgramSpec, target: Target, lowered: Lowered) -> Source:
        """What a program is compiled from for a target: with kernels, where it has a use for them."""
        library = self.kernels().get(target.name)
        if isinstance(library, KernelLibrary) and spec.kind not in _WITHOUT_KERNELS:
            native = self.native(spec)
            if native.products:
                differing = self._differing(native, target, library)
                native = self.native(spec, differing) if differing else native
                return Source(native.program, ("cpu",), library)
        return Source(lowered.portable.raw_digest, lowered.platforms)

    def planned_source(self, spec: ProgramSpec, target: Target, lowered: Lowered) -> Source | str:
        """What `source` would give, from the cache alone; a text: why a build has to make it first."""
        portable = Source(lowered.portable.raw_digest, lowered.platforms)
        toolchain = self.toolchain(target)
        if not self._has_kernels or spec.kind in _WITHOUT_KERNELS or toolchain is None:
            return portable
        if target.name not in self._found_kernels:
            self._found_kernels[target.name] = find_kernels(toolchain, self.cache)
        library = self._found_kernels[target.name]
        if isinstance(library, NoKernels):
            return portable
        if library is None:
            return "its kernels have still to be compiled"
        chosen: Mapping[Product, str] = {}
        while True:
            key = self._native_key(spec, chosen)
            if (known := self.cache.get(key)) is None:
                return why(self.cache.last_key(key.kind, key.name), key)
            native = Native.from_json(known)
            if not native.products:
                return portable
            differing = self._differing(native, target, library)
            if chosen == differing:
                return Source(native.program, ("cpu",), library)
            chosen = differing

    def _differing(
        self, native: Native, target: Target, library: KernelLibrary
    ) -> dict[Product, str]:
        """The products of a program that have another form than the kernel for a target."""
        choices = (self.choice(product, target, library) for product, _ in native.products)
        return {c.product: c.form for c in choices if c.form != c.product.forms[-1]}

    def _native_key(self, spec: ProgramSpec, chosen: Mapping[Product, str]) -> Key:
        lower = self.lower_key(spec)
        differing = ((f"form of {each}", form) for each, form in sorted(chosen.items()))
        return Key("native", lower.name, (*lower.ingredients, *differing))

    def native(self, spec: ProgramSpec, chosen: Mapping[Product, str] | None = None) -> Native:
        """A model's program with kernels, from the cache or lowered now.

        Args:
            spec: of the program.
            chosen: forms of products; others have the kernel.
        """
        chosen = chosen or {}
        key = self._native_key(spec, chosen)
        if (known := self.cache.get(key)) is not None:
            return Native.from_json(known)
        from prejit.compiler.lowering.decoder import lower_decoder
        from prejit.compiler.lowering.encoder import lower_encoder
        from prejit.compiler.models.layers.forms import Forms

        self._check_size(spec)
        forms = Forms(chosen)
        if self.manifest.encode is not None:
            program = lower_encoder(self.model, spec, forms)
        else:
            program = lower_decoder(self.model, self.shape, spec, None, forms)
        digest = self.cache.put_blob(program.portable)
        native = Native(digest, tuple((each, forms.form(each)) for each in sorted(forms.met)))
        self.cache.put(key, asdict(native), blobs=[digest])
        return native

    def products(self) -> tuple[Product, ...]:
        """All products of the programs that may call kernels, sorted."""
        specs = (spec for spec in self.specs if spec.kind not in _WITHOUT_KERNELS)
        return tuple(sorted({p for spec in specs for p, _ in self.native(spec).products}))

    def choice(self, product: Product, target: Target, library: KernelLibrary) -> FormChoice:
        """The form that a product has for a target."""
        at = (target.name, product)
        if at not in self._choices:
            conditions = self.conditions(target, library)
            self._choices[at] = self.known_forms.choice(product, conditions)
        return self._choices[at]

    def conditions(self, target: Target, library: KernelLibrary) -> Conditions:
        """What a target's products would be measured with now."""
        if target.name not in self._conditions:
            toolchain = self.toolchain(target)
            assert toolchain is not None
            self._conditions[target.name] = conditions_of(toolchain, library)
        return self._conditions[target.name]

    def learn(self, own: FormTable) -> None:
        """Goes on with another table of the build cache: more was measured."""
        self.known_forms = replace(self.known_forms, own=own)
        self._choices.clear()

    @cached_property
    def known_forms(self) -> KnownForms:
        """What was measured of products, here and elsewhere.

        Raises:
            RejectError, StoreError: a table that the user gave cannot be read.
        """
        given = FormTable() if self._forms is None else read_table(self._forms)
        own = own_path(self.cache.root)
        return KnownForms(given, read_own(own), read_recorded())

    def _lower_encoder(self, spec: ProgramSpec) -> Lowered:
        from prejit.compiler.lowering.encoder import lower_encoder
        from prejit.compiler.models.registry import describe_encoder

        shape = describe_encoder(self.encoder)
        self._check_size(spec)
        program = lower_encoder(self.model, spec)
        lowered = replace(
            self._store(program),
            encoder=asdict(shape),
            weight_sets=dict(program.weight_sets),
            estimated_microseconds=program.estimated_microseconds,
        )
        blobs = [lowered.portable.digest, lowered.portable.raw_digest]
        self.cache.put(self.lower_key(spec), asdict(lowered), blobs=blobs)
        return lowered

    @cached_property
    def layout(self) -> SentenceLayout:
        """An encoder's modules.

        Raises:
            CheckpointError: a module or setting that is not built here.
        """
        return read_layout(self.directory)

    @property
    def transformer_directory(self) -> Path:
        """With config.json and tokenizer.json: of an encoder it may be a part of `directory`."""
        return self.directory if self.manifest.encode is None else self.layout.transformer

    def checkpoint(self) -> Checkpoint:
        """The model's weights as they are published.

        Raises:
            CheckpointError: files are missing.
        """
        opened = open_checkpoint if self.manifest.encode is None else open_encoder
        return opened(self.directory, out_in=self.out_in)

    @cached_property
    def _tensor_names(self) -> tuple[str, ...]:
        """Of the model's parameters, all of which the checkpoint has in the right shape.

        Raises:
            CheckpointError: it has not.
        """
        return self.checkpoint().names

    @property
    def _has_kernels(self) -> bool:
        """Whether programs of a target may call kernels: those of a model on one device."""
        return self.manifest.model is not None and self.manifest.mesh is None

    @property
    def out_in(self) -> bool:
        """Whether all matrices are stored (out, in), as kernels read them.

        That is decided by what no other target changes: all targets of a bundle have the architecture of
        the build host. Where no compiler for kernels is found, XLA's forms read the same weights.
        """
        return self._has_kernels and self.targets[0].architecture == KERNELS_ARCHITECTURE

    @property
    def matrices(self) -> str:
        """How they are stored, as an ingredient of keys."""
        return "out, in" if self.out_in else "each as XLA wants it"

    @cached_property
    def encoder(self) -> Any:
        """The encoder's configuration: a models.EncoderSource."""
        from prejit.compiler.models import config_file

        return config_file.load_encoder(self.directory)

    @cached_property
    def config(self) -> Any:
        """The model's configuration, read by transformers."""
        from prejit.compiler.models import config_file

        return config_file.load_config(self.directory)

    @cached_property
    def model(self) -> Any:
        """The decoder or encoder as an abstract flax module: shapes, no values."""
        from prejit.compiler.models import registry

        assert self.manifest.model is not None
        if self.manifest.encode is not None:
            return registry.make_encoder(
                self.encoder, self.manifest.model.dtype, out_in=self.out_in
            )
        return registry.make_decoder(
            self.config, self._longest_context, self.manifest.model.dtype, out_in=self.out_in
        )

    @property
    def _longest_context(self) -> int | None:
        """Of a decoder's programs; it chooses LongRoPE's factors for all of them."""
        return None if self.manifest.generate is None else max(self.manifest.generate.context)

    @cached_property
    def shape(self) -> Any:
        """What lowering and generation need to know of the decoder: a models.DecoderConfig."""
        from prejit.compiler.models import registry

        return registry.describe(self.config, self.cache_dtype)

    @property
    def cache_dtype(self) -> str:
        """Of the KV cache."""
        generate = self.manifest.generate
        return "float32" if generate is None else generate.cache_dtype

    def _lower_function(self, spec: ProgramSpec) -> LoweredProgram:
        from prejit.compiler.lowering.user.lower import lower_function

        section = next(p for p in self.manifest.programs if p.name == spec.section)
        platforms = [target.platform for target in self.targets]
        user = self._user[section.name]
        return lower_function(user, section, spec, self.manifest.path, platforms)

    def _store(self, program: LoweredProgram, decoder: dict[str, Any] | None = None) -> Lowered:
        raw = program.portable
        if called(raw):
            raise BuildError(
                "expected a portable program that calls no kernels, found one that does",
                hint="no other machine could run it: report it to prejit's authors",
            )
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

    def tensors(self, read: Callable[[str], np.ndarray[Any, Any]]) -> list[Tensor]:
        """The model's parameters as they are packed: rounded or quantized when they are written.

        Args:
            read: gives the published values of a parameter, float32.
        """
        from flax import nnx

        from prejit.compiler.models import precision
        from prejit.compiler.models.parameters import flat_parameters

        stored = precision.readers(self.model, read)
        return [
            Tensor(name, str(leaf.dtype), leaf.shape, stored.get(name) or partial(read, name))
            for name, leaf in flat_parameters(nnx.state(self.model)).items()
        ]

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
def _version(package: str) -> str:
    return metadata.version(package)


def versions(*packages: str) -> dict[str, str]:
    """Versions of installed packages."""
    return {package: _version(package) for package in packages}


def _stablehlo_version(portable: bytes) -> str:
    """The version that a portable artifact names in its header (stablehlo/api/PortableApi.h)."""
    found = re.search(rb"StableHLO_v(\d+\.\d+\.\d+)", portable[:256])
    return found[1].decode() if found else "0.0.0"
