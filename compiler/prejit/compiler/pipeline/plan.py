"""The plan of a build: programs x targets, and what the store already holds of them.

Planning reads and hashes files. It traces no function, compiles nothing, imports neither JAX nor the user's
modules, and uses no network.

Two steps make an executable, and the store keeps the result of each under a key of its own:

    lower    a model or function, at a bucket    -> portable program   once for all targets
             again, with calls of kernels        -> native program     once for all CPUs with kernels
    compile  one of the two, for a target        -> executable         in a worker process
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

from prejit.compiler.checkpoint.source import find_source
from prejit.compiler.compile.jobs import Source
from prejit.compiler.manifest.manifest import Manifest
from prejit.compiler.manifest.specs import ProgramSpec, program_specs
from prejit.compiler.native.form_choice import FormChoice, KnownForms
from prejit.compiler.native.form_table import (
    FormTable,
    conditions_of,
    own_path,
    read_own,
    read_recorded,
    read_table,
)
from prejit.compiler.native.library import KernelLibrary, NoKernels, find_kernels
from prejit.compiler.native.products import Product
from prejit.compiler.pipeline.keys import (
    compile_key,
    lower_key,
    native_key,
    own_lower_key,
    versions,
)
from prejit.compiler.pipeline.libraries import (
    ReadLibrary,
    bind_libraries,
    handlers_of,
    read_libraries,
)
from prejit.compiler.pipeline.model import ModelFiles, find_model, stores_out_in, uses_kernels
from prejit.compiler.pipeline.traces import (
    MODEL,
    Known,
    Presents,
    decoder_section,
    find_trace,
    function_section,
)
from prejit.compiler.store.interface import Store
from prejit.compiler.store.key import Key, nearest, why
from prejit.compiler.targets import environments
from prejit.compiler.targets.build_host import can_build
from prejit.compiler.targets.installing import obstacle
from prejit.compiler.targets.target_table import chosen
from prejit.compiler.targets.toolchain import Toolchain, host_toolchain, read_tuning, toolchain_of
from prejit.runtime.errors import BuildError
from prejit.runtime.format.schema import Segment
from prejit.runtime.machine.targets import Target

CACHED = "cached"
COMPILE = "compile"
TRACED = "traced at build"
"""The state of changed code of the user: only tracing it shows whether its executable is in the store."""

_WITHOUT_KERNELS = ("copy", "embed", "call")
"""The kinds of programs that call no kernels."""


@dataclass(frozen=True, slots=True)
class Lowered:
    """A portable program in the store.

    Attributes:
        portable: its zstd frame; the offset in the bundle is not known yet.
        platforms: the platforms that it was lowered for, in the order of its platform index.
        stablehlo: the version of its form.
        weights: names of the tensors that come first among the arguments, in order.
        arguments, results: the other arguments, and the results, as `Array` prints them.
        decoder: the fields of `schema.Decoder` that the model decides; None for other programs.
        weight_shardings: for each weight that a mesh splits, the mesh axis of each dimension.
        encoder: the fields of `schema.Encoder` that the model decides; None for other programs.
        weight_sets: the sets of tensors that the program runs with in turn; empty: `weights` alone.
        estimated_microseconds: estimated time of a run, for machines that cannot measure it; 0: unknown.
        arguments_tree, results_tree: how arguments and results of a user's function are nested.
        symbolic: the zstd frame of a user's function for any size of some variables; None: there is none.
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
    arguments_tree: str | None = None
    results_tree: str | None = None
    symbolic: Segment | None = None

    @classmethod
    def from_json(cls, result: Mapping[str, Any]) -> Lowered:
        """Return the program that `dataclasses.asdict` turned into JSON."""
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
            result.get("arguments_tree"),
            result.get("results_tree"),
            Segment(**symbolic) if (symbolic := result.get("symbolic")) else None,
        )

    @property
    def blobs(self) -> tuple[str, ...]:
        """The digests of its contents in the store."""
        segments = (self.portable, self.symbolic)
        return tuple(d for s in segments if s for d in (s.digest, s.raw_digest))


@dataclass(frozen=True, slots=True)
class Native:
    """A program with kernels in the store.

    Attributes:
        program: digest of its StableHLO. The names of kernels still lack the digest of a library.
        products: the products that it computes, each with its form.
    """

    program: str
    products: tuple[tuple[Product, str], ...]

    @classmethod
    def from_json(cls, result: Mapping[str, Any]) -> Native:
        """Return the program that `dataclasses.asdict` turned into JSON."""
        products = ((Product(**product), form) for product, form in result["products"])
        return cls(result["program"], tuple(products))


@dataclass(frozen=True)
class TargetKernels:
    """The kernels of a target, and the form that each product takes beside them.

    Attributes:
        library: the kernels.
        choose: returns the form of a product.
    """

    library: KernelLibrary
    choose: Callable[[Product], FormChoice]


@dataclass(frozen=True)
class OwnFacts:
    """What a build needs to know of a decoder of the user when nothing is traced.

    Attributes:
        vocab_size: number of tokens.
        parameters: its parameters by name, as `keys.content_of` describes them.
        orders: those whose axes are stored in another order, with that order.
    """

    vocab_size: int
    parameters: Mapping[str, str]
    orders: Mapping[str, tuple[int, ...]]

    @classmethod
    def from_json(cls, result: Mapping[str, Any]) -> OwnFacts:
        """Return the facts that `dataclasses.asdict` turned into JSON."""
        orders = {name: tuple(axes) for name, axes in result["orders"].items()}
        return cls(result["vocab_size"], result["parameters"], orders)


@dataclass(frozen=True, slots=True)
class PlannedProgram:
    """A program of the manifest, before it is lowered.

    Attributes:
        spec: the program.
        key: the key of a model's lowering; None: a function of the user, a decoder of the user that has to be
            traced, or a model that was not fetched yet.
        lowered: what the store holds of it; None: nothing.
        trace: what the store knows of tracing the user's code; None: it is traced at every build.
    """

    spec: ProgramSpec
    key: Key | None = None
    lowered: Lowered | None = None
    trace: Known | None = None

    @property
    def parameters(self) -> Mapping[str, str] | None:
        """The parameters of a function that need not be traced, as `keys.content_of` describes them."""
        if self.lowered is None or self.trace is None or self.trace.result is None:
            return None
        found: Mapping[str, str] = self.trace.result["parameters"]
        return found


@dataclass(frozen=True)
class Plan:
    """What a manifest asks for.

    Attributes:
        manifest: the manifest.
        targets: the targets to compile for.
        programs: the programs.
        model: the files of the model; None: the manifest has no source, or it was not fetched yet.
        forms: the measured forms of products that are known.
        libraries: the user's own libraries.
        own: what is known of the user's decoder; None: there is none, or it has to be read.
        own_trace: what the store knows of it; None: it is read at every build.
    """

    manifest: Manifest
    targets: tuple[Target, ...]
    programs: tuple[PlannedProgram, ...]
    model: ModelFiles | None
    forms: KnownForms
    libraries: tuple[ReadLibrary, ...] = ()
    own: OwnFacts | None = None
    own_trace: Known | None = None

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


@dataclass(frozen=True, slots=True)
class PlannedExecutable:
    """A program for a target, and what a build does about it.

    Attributes:
        spec: the program.
        target: the target.
        state: CACHED, COMPILE or TRACED.
        why: why it is not CACHED.
        where: the store that has it, if it is CACHED: that of this machine, or a shared one.
    """

    spec: ProgramSpec
    target: Target
    state: str
    why: str = ""
    where: str | None = None

    @property
    def cached(self) -> bool:
        """True if a store has the executable."""
        return self.state == CACHED


def plan_build(
    manifest: Manifest,
    store: Store,
    *,
    only: tuple[str, ...] = (),
    forms: Path | None = None,
    directory: Path | None = None,
    retrace: bool = False,
    names: Collection[str] | None = None,
) -> Plan:
    """Return the plan of a build.

    Args:
        manifest: what to build.
        store: the results of earlier builds.
        only: names of targets; empty: all targets of the manifest.
        forms: a table of measured forms, which goes before the store's and the recorded one.
        directory: the model directory, if it was fetched for this build; None: a local one.
        retrace: whether the user's code is traced again, whatever the store has.
        names: names of the programs that the plan has; None: all programs of the manifest.

    Raises:
        BuildError: this machine cannot compile for a target.
        UsageError: a name in `only` is no target of the manifest.
        ManifestError, CheckpointError, RejectError, StoreError: a file cannot be read, or is wrong.
    """
    targets = chosen(manifest.targets, only, manifest.where)
    for target in targets:
        if reason := can_build(target):
            raise BuildError(
                f"{manifest.where}: target {target.name}: {reason}",
                hint="leave the target out, or pass --skip-unbuildable",
            )
    source = None if manifest.model is None or manifest.has_own_model else manifest.model.source
    if directory is None and source is not None:
        directory = find_source(source, manifest.directory)
    model = None if directory is None else find_model(manifest, targets, directory)
    libraries = read_libraries(manifest)
    presents = Presents(manifest)
    own_trace, own = None, None
    if manifest.has_own_model:
        out_in = stores_out_in(manifest, targets)
        section = decoder_section(manifest, None, presents.plain, out_in=out_in)
        if section is not None:
            own_trace = find_trace(f"{manifest.bundle.name}/{MODEL}", section, store, presents)
        if own_trace is not None and own_trace.result is not None and not retrace:
            own = OwnFacts.from_json(own_trace.result)

    def planned(spec: ProgramSpec) -> PlannedProgram:
        if spec.kind == "call" or manifest.has_own_model:
            return _planned_trace(manifest, targets, libraries, spec, store, presents, retrace)
        if model is None:
            return PlannedProgram(spec)
        key = lower_key(manifest, model, spec)
        return PlannedProgram(spec, key, find_lowered(key, store))

    specs = [each for each in program_specs(manifest) if names is None or each.name in names]
    return Plan(
        manifest,
        targets,
        tuple(store.map(planned, specs)),
        model,
        KnownForms(
            FormTable() if forms is None else read_table(forms),
            read_own(own_path(store.root)),
            read_recorded(),
        ),
        libraries,
        own,
        own_trace,
    )


def _planned_trace(
    manifest: Manifest,
    targets: tuple[Target, ...],
    libraries: tuple[ReadLibrary, ...],
    spec: ProgramSpec,
    store: Store,
    presents: Presents,
    retrace: bool,
) -> PlannedProgram:
    """Return a program of the user's code, with its trace if the store has it."""
    is_file = False
    if spec.kind == "call":
        program = manifest.section(spec.section)
        is_file = program.is_file
        platforms = [target.platform for target in targets]
        handlers = handlers_of(libraries)
        section = function_section(manifest, program, spec, platforms, handlers, presents.plain)
    else:
        out_in = stores_out_in(manifest, targets)
        section = decoder_section(manifest, spec, presents.plain, out_in=out_in)
    if section is None:
        return PlannedProgram(spec)
    name = f"{manifest.bundle.name}/{spec.name}"
    known = find_trace(name, section, store, presents, reads=not is_file)
    if known.result is None or retrace:
        return PlannedProgram(spec, trace=known)
    lowered = Lowered.from_json(known.result["lowered"])
    key = None
    if spec.kind != "call":
        key = own_lower_key(manifest, spec, lowered.portable.raw_digest)
    return PlannedProgram(spec, key, lowered, known)


def find_lowered(key: Key, store: Store) -> Lowered | None:
    """Return a model's portable program from the store; None: it has to be lowered."""
    result = store.get(key)
    return None if result is None else Lowered.from_json(result)


def find_native(key: Key, store: Store) -> Native | None:
    """Return a model's program with kernels from the store; None: it has to be lowered."""
    result = store.get(key)
    return None if result is None else Native.from_json(result)


def find_toolchain(target: Target) -> Toolchain | None:
    """Return what compiles for a target; None: its environment has to be made first.

    Raises:
        BuildError, RejectError, StoreError: the target's tuning does not fit it, or cannot be read.
    """
    spec = environments.spec_for(target, versions("jax")["jax"])
    if spec is None:
        found = host_toolchain(target, versions("jax", "jaxlib"))
    elif (environment := environments.find(spec)) is not None:
        found = toolchain_of(target, environment)
    else:
        return None
    return replace(found, tuned=read_tuning(target))


def why_not(target: Target) -> str | None:
    """Return why this machine cannot compile for a target; None: it can, once packages are fetched."""
    if reason := can_build(target):
        return reason
    spec = environments.spec_for(target, versions("jax")["jax"])
    error = None if spec is None else obstacle(spec)
    return None if error is None else f"{error} ({error.hint})"


def kernels_of(library: KernelLibrary, toolchain: Toolchain, forms: KnownForms) -> TargetKernels:
    """Return the kernels of a target with the choice of forms beside them."""
    conditions = conditions_of(toolchain, library)
    return TargetKernels(library, cache(partial(forms.choice, conditions=conditions)))


def calls_kernels(manifest: Manifest, spec: ProgramSpec) -> bool:
    """Return whether a program has products or norms that kernels may compute."""
    return uses_kernels(manifest) and spec.kind not in _WITHOUT_KERNELS


def choose_source(
    lowered: Lowered,
    kernels: TargetKernels | None,
    native: Callable[[Mapping[Product, str]], Native],
) -> Source:
    """Return what a program is compiled from for a target: with kernels, if it has a use for them.

    Args:
        lowered: the portable program.
        kernels: the target's kernels; None: it has none, or the program calls none.
        native: returns the program with kernels, with other forms for the given products.
    """
    portable = Source(lowered.portable.raw_digest, lowered.platforms)
    if kernels is None:
        return portable
    program = native({})
    if not program.products:
        return portable
    choices = map(kernels.choose, (product for product, _ in program.products))
    # The last form of a product is the kernel, if it has one.
    differing = {c.product: c.form for c in choices if c.form != c.product.forms[-1]}
    if differing:
        program = native(differing)
    return Source(program.program, ("cpu",), kernels.library)


class UnknownError(Exception):
    """The store does not hold what decides an executable's key; the text says what has to be made."""


def planned_executables(plan: Plan, store: Store) -> tuple[PlannedExecutable, ...]:
    """Return, for each program and target, what a build would do and why.

    Raises:
        BuildError, RejectError, StoreError: a file cannot be read, or is wrong.
    """
    toolchains = {target.name: find_toolchain(target) for target in plan.targets}
    kernels = {
        name: _planned_kernels(plan, toolchain, store) for name, toolchain in toolchains.items()
    }

    def planned(pair: tuple[PlannedProgram, Target]) -> PlannedExecutable:
        program, target = pair
        at = target.name
        return _planned_executable(plan, program, target, toolchains[at], kernels[at], store)

    return tuple(store.map(planned, product(plan.programs, plan.targets)))


def _planned_executable(
    plan: Plan,
    program: PlannedProgram,
    target: Target,
    toolchain: Toolchain | None,
    kernels: TargetKernels | str | None,
    store: Store,
) -> PlannedExecutable:
    found = partial(PlannedExecutable, program.spec, target)
    manifest, spec, lowered = plan.manifest, program.spec, program.lowered
    if lowered is None and (spec.kind == "call" or manifest.has_own_model):
        return found(TRACED, _why_traced(manifest, program, store))
    if lowered is None:
        if program.key is not None:
            return found(COMPILE, _why(program.key, store))
        assert manifest.model is not None
        return found(COMPILE, f"{manifest.model.source} has still to be fetched")
    if toolchain is None:
        return found(COMPILE, "its environment has still to be made")
    if not calls_kernels(manifest, spec):
        kernels = None
    if isinstance(kernels, str):
        return found(COMPILE, kernels)
    try:
        source = choose_source(lowered, kernels, partial(known_native, program.key, store))
    except UnknownError as missing:
        return found(COMPILE, str(missing))
    source = bind_libraries(plan.libraries, manifest.where, spec, source, target, store)
    key = compile_key(manifest, spec, toolchain, source)
    if (where := store.where(key)) is not None:
        return found(CACHED, where=where)
    return found(COMPILE, _why(key, store))


def _why_traced(manifest: Manifest, program: PlannedProgram, store: Store) -> str:
    if program.trace is not None:
        return program.trace.why(store)
    section = (
        manifest.section(program.spec.section) if program.spec.kind == "call" else manifest.model
    )
    assert section is not None
    return f"{section.label} is an object of Python, which every build traces"


def _planned_kernels(
    plan: Plan, toolchain: Toolchain | None, store: Store
) -> TargetKernels | str | None:
    """Return a target's kernels; None: it has none; a text: why they are not known yet."""
    if toolchain is None or not uses_kernels(plan.manifest):
        return None
    library = find_kernels(toolchain, store)
    if library is None:
        return "its kernels have still to be compiled"
    if isinstance(library, NoKernels):
        return None
    return kernels_of(library, toolchain, plan.forms)


def known_native(lowered: Key | None, store: Store, forms: Mapping[Product, str]) -> Native:
    """Return a model's program with kernels from the store.

    Args:
        lowered: the key of the portable program; None: that of a function, which calls no kernels.
        store: the store.
        forms: the forms of products that use no kernel.

    Raises:
        UnknownError: it has to be lowered.
    """
    assert lowered is not None
    key = native_key(lowered, forms)
    if (found := find_native(key, store)) is None:
        raise UnknownError(_why(key, store))
    return found


def _why(key: Key, store: Store) -> str:
    return why(nearest(store.last_keys(key.kind, key.name), key), key)


def reasons(executables: Sequence[PlannedExecutable]) -> dict[str, int]:
    """Return why executables are not cached, each reason with the number of executables."""
    counts: dict[str, int] = {}
    for each in executables:
        if not each.cached:
            counts[each.why] = counts.get(each.why, 0) + 1
    return counts
