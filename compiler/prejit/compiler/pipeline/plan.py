"""The plan of a build: programs x targets, and what the store already holds of them.

Planning reads and hashes files. It traces no function, compiles nothing, imports neither JAX nor the user's
modules, and uses no network.

Two steps make an executable, and the store keeps the result of each under a key of its own:

    lower    a model or function, at a bucket    -> portable program   once for all targets
             again, with calls of kernels        -> native program     once for all CPUs with kernels
    compile  one of the two, for a target        -> executable         in a worker process
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from prejit.compiler.checkpoint.model_source import find_source
from prejit.compiler.lowering.user.trace_inputs import Present
from prejit.compiler.manifest.manifest import Manifest
from prejit.compiler.manifest.specs import ProgramSpec, program_specs, undrafted
from prejit.compiler.native.form_table import (
    FormTable,
    KnownForms,
    own_path,
    read_own,
    read_recorded,
    read_table,
)
from prejit.compiler.native.products import Product
from prejit.compiler.pipeline.model import (
    ModelFiles,
    chooses_bits,
    find_model,
    stores_out_in,
)
from prejit.compiler.pipeline.published_files import Published, ResultOfFiles, find_published
from prejit.compiler.pipeline.result_keys import bits_key, lower_key, own_lower_key
from prejit.compiler.pipeline.stored_traces import (
    MODEL,
    Known,
    decoder_section,
    find_trace,
    function_section,
)
from prejit.compiler.pipeline.target_tools import ReadLibrary, handlers_of, read_libraries
from prejit.compiler.store.build_cache_key import Key
from prejit.compiler.store.store_interface import Store
from prejit.compiler.targets.build_host import can_build
from prejit.compiler.targets.target_classes import Target
from prejit.compiler.targets.target_table import chosen
from prejit.runtime.base.typed_json import from_plain
from prejit.runtime.errors import BuildError
from prejit.runtime.format.bundle_schema import Images, Segment
from prejit.runtime.format.names import DRAFT


@dataclass(frozen=True, slots=True)
class StoredTrial:
    """A function at other sizes than a bucket's, in the store: see `lowering.export.SizedTrial`.

    `portable` is the blob of its StableHLO.
    """

    sizes: dict[str, int]
    padded: bool
    has_places: bool
    portable: str


@dataclass(frozen=True, slots=True)
class Lowered:
    """A portable program in the store.

    Attributes:
        portable: its zstd frame; the offset in the bundle is not known yet.
        platforms: the platforms that it was lowered for, in the order of its platform index.
        stablehlo: the version of its form.
        weights: names of the tensors that come first among the arguments, in order.
        arguments, results: the other arguments, and the results, as `Array` prints them.
        decoder: the fields of `bundle_schema.Decoder` that the model decides; None for other programs.
        weight_shardings: for each weight that a mesh splits, the mesh axis of each dimension.
        encoder: the fields of `bundle_schema.Encoder` that the model decides; None for other programs.
        images: what a program that reads images does; None for other programs.
        weight_sets: the sets of tensors that the program runs with in turn; empty: `weights` alone.
        estimated_microseconds: estimated time of a run, for machines that cannot measure it; 0: unknown.
        arguments_tree, results_tree: how arguments and results of a user's function are nested.
        symbolic: the zstd frame of a user's function for any size of some variables; None: there is none.
        settings, state: as `bundle_schema.ProgramEntry` has them.
        modules, search_path: as `LoweredProgram` has them.
        trials: the user's function at sizes for which the program is compared with it.
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
    images: Images | None = None
    weight_sets: dict[str, tuple[str, ...]] = field(default_factory=dict)
    estimated_microseconds: int = 0
    arguments_tree: str | None = None
    results_tree: str | None = None
    symbolic: Segment | None = None
    settings: dict[str, str] | None = None
    state: dict[str, str] | None = None
    modules: tuple[str, ...] = ()
    search_path: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    trials: tuple[StoredTrial, ...] = ()

    @property
    def blobs(self) -> tuple[str, ...]:
        """The digests of its contents in the store."""
        segments = (self.portable, self.symbolic)
        frames = (d for s in segments if s for d in (s.digest, s.raw_digest))
        return (*frames, *(each.portable for each in self.trials))


@dataclass(frozen=True, slots=True)
class Native:
    """A program with kernels in the store.

    Attributes:
        program: digest of its StableHLO. The names of kernels still lack the digest of a library.
        products: the products that it computes, each with its form.
        calls: whether it calls a kernel: for a product, or for a norm alone.
    """

    program: str
    products: tuple[tuple[Product, str], ...]
    calls: bool


@dataclass(frozen=True)
class OwnFacts:
    """The facts about a decoder of the user that a build needs when nothing is traced.

    Attributes:
        parameters: its parameters by name, as `content_of` describes them.
        orders: those whose axes are stored in another order, with that order.
    """

    vocab_size: int
    parameters: dict[str, str]
    orders: dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class PlannedProgram:
    """A program of the manifest, before it is lowered.

    Attributes:
        key: the key of a model's lowering; None: a function of the user, a decoder of the user that has to be
            traced, or a model that was not fetched, or an encoder whose matrices were not measured yet.
        lowered: what the store holds of it; None: nothing.
        trace: what the store knows of tracing the user's code; None: it is traced at every build.
    """

    spec: ProgramSpec
    key: Key | None = None
    lowered: Lowered | None = None
    trace: Known | None = None

    @property
    def parameters(self) -> Mapping[str, str] | None:
        """The parameters of a function that need not be traced, as `content_of` describes them."""
        if self.lowered is None or self.trace is None or self.trace.result is None:
            return None
        return self.trace.result["parameters"]


@dataclass(frozen=True)
class Plan:
    """The programs and targets that a manifest asks for.

    Attributes:
        model: the files of the model; None: the manifest has no source, or it was not fetched yet.
        forms: the measured forms of products that are known.
        libraries: the user's own libraries.
        own: what is known of the user's decoder; None: there is none, or it has to be read.
        own_trace: what the store knows of it; None: it is read at every build.
        draft: the files of the draft model; None: there is none, or it was not fetched yet.
    """

    manifest: Manifest
    targets: tuple[Target, ...]
    programs: tuple[PlannedProgram, ...]
    model: ModelFiles | None
    forms: KnownForms
    libraries: tuple[ReadLibrary, ...] = ()
    own: OwnFacts | None = None
    own_trace: Known | None = None
    draft: ModelFiles | None = None

    @property
    def of_draft(self) -> Plan | None:
        """The plan of the draft model alone, without programs; None: there is none, or it was not fetched."""
        manifest = self.manifest.of_draft
        if manifest is None or self.draft is None:
            return None
        return replace(self, manifest=manifest, model=self.draft, draft=None, programs=())

    @property
    def handlers(self) -> tuple[str, ...]:
        """The names by which programs may call the libraries, sorted."""
        return handlers_of(self.libraries)

    @property
    def specs(self) -> tuple[ProgramSpec, ...]:
        """The programs, without what is known of them."""
        return tuple(program.spec for program in self.programs)

    def with_programs(self, known: Mapping[str, PlannedProgram]) -> Plan:
        """Return the plan with more known of some programs, by name."""
        return replace(self, programs=tuple(known.get(p.spec.name, p) for p in self.programs))


@dataclass(frozen=True)
class PlanOptions:
    """The input of a plan beside its manifest and its store. Processes that lower plan with the same options.

    Attributes:
        only: names of targets; empty: all targets of the manifest.
        forms: path of a table of measured forms, which goes before the store's and the recorded one.
        directory, draft: paths of the directories of the model and of the draft model, if they were fetched
            for this build; None: a local one.
        retrace: whether the user's code is traced again, whatever the store has.
        bits: the dtypes of an encoder's matrices, as `ModelFiles.chosen`; None: those that the store has.
    """

    only: tuple[str, ...] = ()
    forms: str | None = None
    directory: str | None = None
    draft: str | None = None
    retrace: bool = False
    bits: tuple[tuple[str, str], ...] | None = None


def plan_build(
    manifest: Manifest,
    store: Store,
    options: PlanOptions = PlanOptions(),
    *,
    names: Collection[str] | None = None,
) -> Plan:
    """Return the plan of a build, of the programs with these names; None: of all programs of the manifest.

    Raises:
        BuildError: this machine cannot compile for a target.
        UsageError: a name in `only` is no target of the manifest.
        ManifestError, CheckpointError, RejectError, StoreError: a file cannot be read, or is wrong.
    """
    targets = chosen(manifest.targets, options.only, manifest.where)
    for target in targets:
        if reason := can_build(target):
            raise BuildError(
                f"{manifest.where}: target {target.name}: {reason}",
                hint="leave the target out, or pass --skip-unbuildable",
            )
    model = _found_model(manifest, targets, options.directory)
    drafts = manifest.of_draft
    draft = None if drafts is None else _found_model(drafts, targets, options.draft)
    if model is not None and chooses_bits(manifest, model):
        chosen_bits = options.bits
        if chosen_bits is None:
            published = find_published(manifest, model)
            chosen_bits = bits_of(stored_bits(manifest, model, published, store).find())
        model = replace(model, chosen=chosen_bits)
    libraries = read_libraries(manifest)
    presents = cache(lambda front, back: Present(manifest.directory, front, back))
    present = presents((), ())
    handlers = handlers_of(libraries)

    def traced(spec: ProgramSpec | None) -> Known | None:
        """Return what the store knows of code of the user; without a program of its decoder as a whole."""
        reads, name = True, MODEL if spec is None else spec.name
        if spec is not None and spec.kind == "call":
            program = manifest.section(spec.section)
            reads = not program.is_file
            platforms = [target.platform for target in targets]
            section = function_section(manifest, program, spec, platforms, handlers, present)
        else:
            out_in = stores_out_in(manifest, targets)
            section = decoder_section(manifest, spec, present, out_in=out_in)
        if section is None:
            return None
        return find_trace(f"{manifest.bundle.name}/{name}", section, store, presents, reads=reads)

    def planned(spec: ProgramSpec) -> PlannedProgram:
        if spec.kind == "call" or manifest.has_own_model:
            known = traced(spec)
            if known is None or known.result is None or options.retrace:
                return PlannedProgram(spec, trace=known)
            lowered = from_plain(Lowered, known.result["lowered"])
            key = None
            if spec.kind != "call":
                key = own_lower_key(manifest, spec, lowered.portable.raw_digest)
            return PlannedProgram(spec, key, lowered, known)
        whole, files = (drafts, draft) if spec.kind.startswith(DRAFT) else (manifest, model)
        if whole is None or files is None or files.chosen is None:
            return PlannedProgram(spec)
        key = lower_key(whole, files, undrafted(spec))
        return PlannedProgram(spec, key, find_lowered(key, store))

    own, own_trace = None, traced(None) if manifest.has_own_model else None
    if own_trace is not None and own_trace.result is not None and not options.retrace:
        own = from_plain(OwnFacts, own_trace.result)

    specs = [each for each in program_specs(manifest) if names is None or each.name in names]
    return Plan(
        manifest,
        targets,
        tuple(store.map(planned, specs)),
        model,
        KnownForms(
            FormTable() if options.forms is None else read_table(Path(options.forms)),
            read_own(own_path(store.root)),
            read_recorded(),
        ),
        libraries,
        own,
        own_trace,
        draft,
    )


def _found_model(
    manifest: Manifest, targets: tuple[Target, ...], fetched: str | None
) -> ModelFiles | None:
    """Return the files of a published model; None: there is none, or it was not fetched yet."""
    source = None if manifest.model is None or manifest.has_own_model else manifest.model.source
    directory = None if fetched is None else Path(fetched)
    if directory is None and source is not None:
        directory = find_source(source, manifest.directory)
    return None if directory is None else find_model(manifest, targets, directory)


def stored_bits(
    manifest: Manifest, model: ModelFiles, published: Published | None, store: Store
) -> ResultOfFiles:
    """Return the place in the store of the dtypes of an encoder's matrices."""
    return ResultOfFiles(store, partial(bits_key, manifest, model), published)


def bits_of(result: Mapping[str, Any] | None) -> tuple[tuple[str, str], ...] | None:
    """Return the dtypes in a result of `stored_bits`; None: there is none."""
    return None if result is None else tuple(sorted(result["chosen"].items()))


def find_lowered(key: Key, store: Store) -> Lowered | None:
    """Return a model's portable program from the store; None: it has to be lowered."""
    result = store.get(key)
    return None if result is None else from_plain(Lowered, result)


def find_native(key: Key, store: Store) -> Native | None:
    """Return a model's program with kernels from the store; None: it has to be lowered."""
    if (result := store.get(key)) is None:
        return None
    products = ((Product(**product), form) for product, form in result["products"])
    return Native(result["program"], tuple(products), result["calls"])
