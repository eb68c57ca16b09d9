"""A build, from the manifest to the bundle on disk. Each stage takes values and returns values.

    fetch         find or download the model directory           checkpoint.source
    plan          programs x targets, and what the store has     plan
    check         model, files, functions: mistakes come first   checks, pack.model_layers
    environments  make the environments of pinned versions       targets.installing
    kernels       compile the C++ kernels of each CPU level      native.library
    forms         measure how products are computed fastest      measure.forms
    lower         trace programs to StableHLO                    lowering; lowerers: in processes, if many
    compile       StableHLO to executables, in workers           executables
    weights       round or quantize, and pack                    pack.weights
    accuracy      measure what the dtypes cost                   measure.accuracy
    costs         measure an encoder's programs                  measure.costs
    pack          tables and layers                              pack.contents
    golden        ask programs for their golden answers          measure.golden
    assemble      blobs and index                                pack.contents
    write         the OCI image layout                           here
    describe      attach the list of parts and the provenance    describe.attaching

Workers compile a program while the next one is lowered and while weights are packed. `build_all` does this
for several manifests at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TypeVar, final

from prejit.compiler.checkpoint.source import resolve_source
from prejit.compiler.compile.executor import Executor
from prejit.compiler.compile.jobs import Compiled
from prejit.compiler.compile.worker_process import JOB_SECONDS
from prejit.compiler.manifest.manifest import Manifest
from prejit.compiler.native.form_choice import KnownForms
from prejit.compiler.native.library import KernelLibrary, NoKernels, build_kernels
from prejit.compiler.pipeline.checks import check, read_planned, vocab_size
from prejit.compiler.pipeline.code import ReadCode, find_code
from prejit.compiler.pipeline.describe.attaching import attach_descriptions
from prejit.compiler.pipeline.describe.provenance import build_provenance
from prejit.compiler.pipeline.executables import (
    CompiledExecutable,
    CompiledTarget,
    Jobs,
    Submitted,
    TargetTools,
    compiled_targets,
    submit,
    submit_known,
)
from prejit.compiler.pipeline.keys import versions
from prejit.compiler.pipeline.libraries import bind_libraries
from prejit.compiler.pipeline.lowerers.crew import Crew, open_crew
from prejit.compiler.pipeline.lowering import (
    has_lost_native,
    is_lowered_again,
    lower,
    lower_own,
    lowered_again,
    products_of,
    source_of,
)
from prejit.compiler.pipeline.measure.accuracy import measure_accuracy
from prejit.compiler.pipeline.measure.costs import measure_costs
from prejit.compiler.pipeline.measure.forms import measure_missing, runs_here
from prejit.compiler.pipeline.measure.golden import with_golden_answers
from prejit.compiler.pipeline.model import ReadModel, stores_out_in, uses_kernels
from prejit.compiler.pipeline.pack.bundle_files import LostFramesError, PackedLayer
from prejit.compiler.pipeline.pack.contents import PackedBundle, pack_bundle, pack_targets
from prejit.compiler.pipeline.pack.model_layers import read_layers
from prejit.compiler.pipeline.pack.weights import (
    Published,
    find_published,
    pack_weights,
)
from prejit.compiler.pipeline.plan import (
    Lowered,
    Plan,
    PlannedProgram,
    find_toolchain,
    kernels_of,
    plan_build,
)
from prejit.compiler.pipeline.shards import Packing, Shard, Turn
from prejit.compiler.pipeline.tracing import parameters_of, remember
from prejit.compiler.progress import Progress
from prejit.compiler.store.interface import Store
from prejit.compiler.targets.environments import spec_for
from prejit.compiler.targets.installing import make_environment
from prejit.compiler.targets.toolchain import Toolchain
from prejit.runtime.base.digests import digest_of
from prejit.runtime.base.typed_json import to_json
from prejit.runtime.errors import PrejitError, RejectError, StoreError
from prejit.runtime.format.blobs import check_blobs
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.opening import match, read_manifest
from prejit.runtime.format.referrers import referrers
from prejit.runtime.format.root import read_root
from prejit.runtime.format.schema import Accuracy
from prejit.runtime.format.writing import write_layout
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.machine.targets import Target
from prejit.runtime.store.receipts import Receipts

_Step = TypeVar("_Step")


@dataclass(frozen=True, slots=True)
class BuiltProgram:
    """A program of a bundle for one target.

    Attributes:
        program: its name.
        target: name of the target.
        key: digest of the key of its executable.
        compile_milliseconds: time that the compiler took, now or in an earlier build.
        new: whether it was compiled now, for this program.
    """

    program: str
    target: str
    key: str
    compile_milliseconds: int
    new: bool


@dataclass(frozen=True)
class Built:
    """What a build did.

    Attributes:
        path: directory of the bundle.
        digest: digest of the bundle.
        compiled: number of programs x targets that were compiled now.
        cached: number of those that were in the store.
        written: whether the directory was changed.
        accuracy: what the dtypes of weights and cache cost; None: all are float32.
        programs: every program for every target.
        packed_by: number of the shard that packed the bundle; None: the build had no shards.
        packed_here: whether the bundle is in `path`, and not in the directory of another shard.
    """

    path: Path
    digest: str
    compiled: int
    cached: int
    written: bool
    accuracy: Accuracy | None = None
    programs: tuple[BuiltProgram, ...] = ()
    packed_by: int | None = None
    packed_here: bool = True


def build(
    manifest: Manifest,
    output: Path,
    *,
    store: Store,
    executor: Executor,
    progress: Progress,
    only: tuple[str, ...] = (),
    forms: Path | None = None,
    measure: bool | None = None,
    timeout_seconds: float = JOB_SECONDS,
    retrace: bool = False,
    shard: Shard | None = None,
    kernels_by: Mapping[str, str] | None = None,
) -> Built:
    """Build the bundle of a manifest into `output/NAME`.

    Args:
        manifest: what to build.
        output: directory of bundles.
        store: keeps results.
        executor: compiles programs and forms of products. The build closes it once all is compiled.
        progress: shows every step.
        only: names of targets; empty: all targets of the manifest.
        forms: a table of measured forms, which goes before all others.
        measure: which products are measured. True: those that this machine has not measured itself; False:
            none; None: large ones that no table has.
        timeout_seconds: time limit of measuring one product, of measuring an encoder's programs for a target,
            and of asking all programs for their golden answers.
        retrace: whether the user's code is traced again, whatever the store has.
        shard: which part of the build this is; None: the build has one machine.
        kernels_by: identity of the C++ compiler that is tried first for each target's kernels, by target; a
            target that is not named gets no kernels. None: every target, with the first compiler.

    Raises:
        BuildError: a program does not compile, or its worker died or took too long. What was finished stays
            in the store.
        ManifestError, CheckpointError, StoreError, NetworkError: something that the build starts from is
            wrong, or cannot be read.
    """
    jobs = Jobs(executor, store, progress)
    packings = _packings([manifest], shard, store)
    service = _Services(
        *(output, store, progress, forms, measure, timeout_seconds, retrace),
        *(executor, jobs, shard, packings, kernels_by),
    )
    with executor:
        begun = _begin(manifest, only, executor, service)
        service.jobs.wait()
    built = _finish(begun, service)
    assert built is not None
    return built


@dataclass(frozen=True)
class Failed:
    """A build that failed beside others.

    Attributes:
        manifest: what it was to build.
        error: why it failed.
    """

    manifest: Manifest
    error: PrejitError


def build_all(
    requests: Sequence[tuple[Manifest, tuple[str, ...]]],
    output: Path,
    *,
    store: Store,
    executor: Executor,
    progress: Progress,
    forms: Path | None = None,
    measure: bool | None = None,
    timeout_seconds: float = JOB_SECONDS,
    retrace: bool = False,
    shard: Shard | None = None,
    done: Callable[[Built | Failed], None],
) -> None:
    """Build the bundles of several manifests with one executor, each as `build` does.

    The next manifest is planned and lowered while programs of the others compile. Each bundle is written as
    soon as its programs are compiled. A build that fails ends no other one. Equal programs compile once.

    Shards begin with different manifests. Each bundle is packed by the first shard that has all its programs;
    the others go on meanwhile.

    Args:
        requests: manifests with different bundle names, each with the names of its targets (empty: all).
        output: directory of bundles.
        store: see `build`.
        executor: see `build`.
        progress: see `build`.
        forms: see `build`.
        measure: see `build`.
        timeout_seconds: see `build`.
        retrace: see `build`.
        shard: see `build`.
        done: called with each build as it ends.

    Raises:
        StoreError: the build has shards, and the store cannot be read.
    """
    jobs = Jobs(executor, store, progress, several=True)
    packings = _packings([manifest for manifest, _ in requests], shard, store)
    service = _Services(
        *(output, store, progress, forms, measure, timeout_seconds, retrace),
        *(executor, jobs, shard, packings),
    )
    left: list[_Begun] = []

    def finish(ready: Sequence[_Begun], *, patient: bool) -> None:
        for begun in ready:
            step = partial(_finish, begun, service, lambda: not patient)
            if (end := _attempt(begun.plan.manifest, step)) is not None:
                left.remove(begun)
                done(end)

    with executor:
        for manifest, only in requests if shard is None else shard.ordered(requests):
            begun = _attempt(manifest, partial(_begin, manifest, only, executor, service))
            if isinstance(begun, Failed):
                done(begun)
            else:
                left.append(begun)
            finish([each for each in left if each.is_compiled], patient=False)
        while left:
            wait([f for each in left for f in each.unfinished], return_when=FIRST_COMPLETED)
            before = len(left)
            finish([each for each in left if each.is_compiled], patient=False)
            if len(left) == before and all(each.is_compiled for each in left):
                finish(left[:1], patient=True)  # other shards pack all that is left


def _packings(
    manifests: Sequence[Manifest], shard: Shard | None, store: Store
) -> Mapping[str, Packing]:
    """Return what decides which shard packs each bundle, by its name; empty: the build has no shards.

    All are made before any program: another shard may pack the last bundle before this one plans it.
    """
    if shard is None:
        return {}
    return {each.bundle.name: Packing(shard, each.bundle.name, store) for each in manifests}


def _attempt(manifest: Manifest, step: Callable[[], _Step]) -> _Step | Failed:
    """Return what a step of a build returns, or the error that ends this build alone."""
    try:
        return step()
    except PrejitError as error:
        return Failed(manifest, error)


@dataclass(frozen=True)
class _Services:
    """What all builds of a command share: see `build`."""

    output: Path
    store: Store
    progress: Progress
    forms: Path | None
    measure: bool | None
    timeout_seconds: float
    retrace: bool
    executor: Executor
    jobs: Jobs
    shard: Shard | None
    packings: Mapping[str, Packing]
    kernels_by: Mapping[str, str] | None = None


@dataclass(frozen=True)
class _Begun:
    """A build whose programs are being compiled. It holds no weights, unless it is a shard or of the user.

    Attributes:
        plan: its plan.
        model: reads its model.
        code: reads the user's code.
        published: the files of the checkpoint.
        tools: what compiles for each target.
        submitted: the programs that are compiled.
        weights: returns the weights layer, which a shard packs only if it packs the bundle.
        layers: the other layers that all targets share.
        packing: decides which shard packs; None: the build has no shards.
    """

    plan: Plan
    model: ReadModel
    code: ReadCode
    published: Published | None
    tools: Sequence[TargetTools]
    submitted: Sequence[Submitted]
    weights: Callable[[], PackedLayer | None]
    layers: Sequence[PackedLayer]
    packing: Packing | None

    @property
    def unfinished(self) -> list[Future[Compiled]]:
        """The programs that are still compiled."""
        return [each.future for each in self.submitted if not each.future.done()]

    @property
    def is_compiled(self) -> bool:
        """Whether all programs are compiled, or failed."""
        return not self.unfinished


def _begin(
    manifest: Manifest, only: tuple[str, ...], executor: Executor, service: _Services
) -> _Begun:
    """Plan a build, submit its programs, and pack its weights while they are compiled."""
    store, progress = service.store, service.progress
    directory = _fetch(manifest)
    plan = plan_build(
        manifest,
        store,
        only=only,
        forms=service.forms,
        directory=directory,
        retrace=service.retrace,
    )
    model: ReadModel = cache(partial(read_planned, plan))
    out_in = stores_out_in(manifest, plan.targets)
    code: ReadCode = cache(partial(find_code, manifest, out_in=out_in))
    crew = open_crew(
        plan,
        executor,
        store,
        progress,
        only=only,
        directory=directory,
        forms=service.forms,
        retrace=service.retrace,
    )
    with nullcontext() if crew is None else crew:

        def count_tokens() -> int:
            checked = None if crew is None else crew.check()
            known = None if checked is None else checked.vocab_size
            return vocab_size(plan, model, code) if known is None else known

        layers = read_layers(plan, count_tokens, store, progress)
        published = find_published(plan)
        checked = None if crew is None else crew.check()
        if checked is None:
            check(plan, model, None if published is None else published.checkpoint, code)
        elif plan.own is None:
            plan = replace(plan, own=checked.own)
        toolchains = [_make_toolchain(target, progress) for target in plan.targets]
        _note_cpus(toolchains, progress)
        lowering = _Lowering(plan, model, code, None if checked is None else crew, service)
        lowering.run(toolchains, executor)
    plan, tools, found = lowering.plan, lowering.tools, lowering.found
    submitted = [each for program in plan.programs for each in found[program.spec.name]]
    user = parameters_of(plan, code)
    lowered = {each.spec.name: each.lowered for each in submitted}
    remember(lowering.untraced, lowered, user, plan.own, code, store, progress)
    weights = cache(partial(pack_weights, plan, published, user, code, model, store, progress))
    if service.shard is None:
        packed = weights()  # while workers compile
        weights = cache(lambda: packed)
    return _Begun(
        plan,
        model,
        code,
        published,
        tools,
        submitted,
        weights,
        tuple(layers),
        service.packings.get(manifest.bundle.name),
    )


@final
class _Lowering:
    """Lowers the programs of a build and submits them: in processes of their own, and here what is left.

    Attributes:
        plan: the plan, with all that is known of each program.
        untraced: the same plan, without the traces that this process made.
        tools: what compiles for each target.
        found: the submitted programs by name.
    """

    def __init__(
        self, plan: Plan, model: ReadModel, code: ReadCode, crew: Crew | None, service: _Services
    ) -> None:
        """Lower nothing yet.

        Args:
            plan: the plan of the build.
            model: reads its model.
            code: reads the user's code.
            crew: processes that lower; None: this one does.
            service: what all builds share.
        """
        self.plan = self.untraced = plan
        self.tools: Sequence[TargetTools] = ()
        self.found: dict[str, list[Submitted]] = {}
        self._model = model
        self._code = code
        self._crew = crew
        self._apart = set[str]()  # names of the programs that other processes lowered
        self._service = service

    def run(self, toolchains: list[Toolchain], executor: Executor) -> None:
        """Lower all programs, and submit each to the executor as soon as it is lowered.

        Raises:
            PrejitError: a program cannot be lowered.
        """
        store, progress, shard = self._service.store, self._service.progress, self._service.shard
        kernels_by = self._service.kernels_by
        libraries = _build_kernels(self.plan, toolchains, kernels_by, store, progress)
        known = self.plan.forms
        measures = self._service.measure is not False
        if measures and libraries:
            # All products have to be known before the first program is compiled.
            self._lower_apart([each for each in self.plan.programs if each.lowered is None])
            self._lower_own()
            known = _measure_forms(
                self.plan,
                toolchains,
                libraries,
                self._model,
                self._code,
                executor,
                self._service,
            )
        self.tools = [_tools(toolchain, libraries, known) for toolchain in toolchains]
        # First what the stores know: a shared one answers many questions at a time.
        ordered = self.plan.programs if shard is None else shard.ordered(self.plan.programs)
        left = [
            program
            for program, is_known in zip(
                ordered, store.map(self._submit_known, ordered), strict=True
            )
            if not is_known
        ]
        self._lower_apart(left, submits=True)
        self._lower_own()
        here = {program.spec.name: program for program in self.plan.programs}
        for name in [each.spec.name for each in left]:
            if name not in self.found:
                self.found[name] = self._lower_here(here[name])

    def _submit_known(self, program: PlannedProgram) -> bool:
        """Submit a program if the store has what it is compiled from."""
        store, jobs = self._service.store, self._service.jobs
        known = submit_known(self.plan, program, tools=self.tools, store=store, jobs=jobs)
        if known is not None:
            self.found[program.spec.name] = known
        return known is not None

    def _lower_apart(self, programs: Sequence[PlannedProgram], *, submits: bool = False) -> None:
        """Lower programs in other processes, if there are some.

        What the store has lost is lowered here, which says so.
        """
        if self._crew is None:
            return
        store, apart = self._service.store, self._apart
        asked = [
            each
            for each in programs
            if (each.lowered is None or each.spec.name in apart)
            and not has_lost_native(each, store)
        ]
        then = self._submit_known if submits else None
        lowered = self._crew.lower(self.plan, asked, then, chosen=submits)
        self.plan = self.plan.with_programs(lowered)
        self.untraced = self.untraced.with_programs(
            {name: each for name, each in lowered.items() if name not in apart}
        )
        apart |= lowered.keys()

    def _lower_own(self) -> None:
        """Lower the user's decoder here, as far as no other process did."""
        service = self._service
        self.plan = lower_own(self.plan, self._code, service.store, service.progress)

    def _lower_here(self, program: PlannedProgram) -> list[Submitted]:
        """Lower a program in this process, and submit it."""
        plan, store, jobs = self.plan, self._service.store, self._service.jobs
        lowered = lower(plan, program, self._model, self._code, store, self._service.progress)
        progress = self._service.progress
        found, lost = [], has_lost_native(program, store)
        for each in self.tools:
            find = partial(
                source_of, plan, program, lowered, each.kernels, self._model, self._code, store
            )
            source = find()
            if store.read_blob(source.program) is None:  # which deletes what is damaged
                lost = True
                source = find()
            target, where = each.toolchain.target, plan.manifest.where
            source = bind_libraries(plan.libraries, where, program.spec, source, target, store)
            found.append(submit(plan.manifest, program.spec, lowered, source, each, jobs))
        if lost:
            progress.note(lowered_again(f"{program.spec.name} with kernels"))
        return found


def _finish(
    begun: _Begun, service: _Services, give_up: Callable[[], bool] = lambda: False
) -> Built | None:
    """Wait for the programs of a build, and write its bundle, unless another shard does.

    Args:
        begun: the build.
        service: what all builds of the command share.
        give_up: called while another shard packs; true ends the wait.

    Returns:
        None: another shard packs, and `give_up` was true.
    """
    packing = begun.packing
    targets = compiled_targets(begun.submitted, begun.tools)
    if packing is None:
        return _pack(begun, targets, service)
    keys = sorted({each.job.key.digest for each in begun.submitted})
    with packing:
        other = packing.wait(digest_of(to_json(keys)), service.progress, give_up=give_up)
        if other is Turn.LATER:
            return None
        if other is Turn.NOW:
            built = _pack(begun, targets, service)
            packing.finish(built.digest)
            return replace(built, packed_by=packing.shard.number)
    path = service.output / begun.plan.manifest.bundle.name
    compiled = sum(_compiled_here(begun, service))
    return Built(
        path,
        other.digest,
        compiled,
        len(begun.submitted) - compiled,
        written=False,
        packed_by=other.shard,
        packed_here=False,
    )


def _compiled_here(begun: _Begun, service: _Services) -> list[bool]:
    """Return of each program of a build whether this process compiled it now, and for no other build."""
    here = service.executor.compiled
    return [each.new and each.job.key.digest in here for each in begun.submitted]


def _pack(begun: _Begun, targets: tuple[CompiledTarget, ...], service: _Services) -> Built:
    """Pack the compiled programs of a build, and write its bundle."""
    store, progress, seconds = service.store, service.progress, service.timeout_seconds
    plan, manifest, weights = begun.plan, begun.plan.manifest, begun.weights()
    layers = begun.layers if weights is None else (*begun.layers, weights)
    programs = [each.lowered.portable.raw_digest for each in targets[0].executables]
    accuracy = measure_accuracy(
        plan, begun.published, weights, begun.code, programs, begun.model, store, progress
    )
    costs = measure_costs(manifest, targets, weights, store, progress, service.jobs.wait, seconds)
    products = (
        products_of(plan, begun.model, begun.code, store)
        if any(each.kernels for each in begun.tools)
        else ()
    )
    pack = partial(
        pack_targets,
        plan,
        layers=layers,
        products=products,
        accuracy=accuracy,
        costs=costs,
        store=store,
    )
    try:
        packed = pack(targets)
    except LostFramesError as lost:
        targets = _with_lost_frames(begun, targets, lost, service)
        packed = pack(targets)
    packed = with_golden_answers(packed, store, progress, seconds)
    bundle = pack_bundle(manifest.bundle.name, packed)
    path, written = write(bundle, service.output, progress)
    digest = digest_of(bundle.index)
    files = () if begun.published is None else begun.published.files
    attach_descriptions(
        path, digest, partial(build_provenance, plan, targets, files, store, digest)
    )
    compiled = _compiled_here(begun, service)
    built = tuple(
        BuiltProgram(
            each.spec.name,
            each.job.target.name,
            each.job.key.digest,
            each.future.result().milliseconds,
            new,
        )
        for each, new in zip(begun.submitted, compiled, strict=True)
    )
    cached = len(built) - sum(compiled)
    return Built(path, digest, sum(compiled), cached, written, accuracy, built)


def _with_lost_frames(
    begun: _Begun,
    targets: tuple[CompiledTarget, ...],
    lost: LostFramesError,
    service: _Services,
) -> tuple[CompiledTarget, ...]:
    """Return compiled programs whose portable forms the store has again: they are lowered again.

    Raises:
        LostFramesError: one of them is not of a published model, or is another program now.
    """
    store, progress = service.store, service.progress
    found: dict[str, Lowered] = {}
    for program in begun.plan.programs:
        if program.spec.name in lost.names and is_lowered_again(begun.plan, program):
            made = lower(begun.plan, program, begun.model, begun.code, store, progress)
            found[program.spec.name] = made

    def mended(each: CompiledExecutable) -> CompiledExecutable:
        made = found.get(each.spec.name, each.lowered)
        if made.portable.raw_digest != each.lowered.portable.raw_digest:
            raise lost
        return replace(each, lowered=made)

    if found.keys() != {*lost.names}:
        raise lost
    return tuple(
        replace(target, executables=tuple(map(mended, target.executables))) for target in targets
    )


def _fetch(manifest: Manifest) -> Path | None:
    if manifest.model is None or manifest.model.source is None:
        return None
    weights = not manifest.has_own_model
    return resolve_source(manifest.model.source, manifest.directory, weights=weights)


def _make_toolchain(target: Target, progress: Progress) -> Toolchain:
    """Return what compiles for a target; its environment is made first if it is not there."""
    if (found := find_toolchain(target)) is None:
        spec = spec_for(target, versions("jax")["jax"])
        assert spec is not None
        make_environment(spec, progress)
        found = find_toolchain(target)
        assert found is not None
    return found


def _note_cpus(toolchains: Sequence[Toolchain], progress: Progress) -> None:
    """Say which targets are compiled for fewer CPUs than theirs, because this machine shows XLA no more."""
    for each in toolchains:
        if each.cpus not in (None, each.target.cpus):
            progress.note(
                f"target {each.target.name}: loops are split for {each.cpus} CPUs and not for "
                f"{each.target.cpus}: this machine has no more, and forbids the filter (seccomp) that "
                "shows XLA more; programs run everywhere, and leave further CPUs of a server idle"
            )


def _build_kernels(
    plan: Plan,
    toolchains: list[Toolchain],
    kernels_by: Mapping[str, str] | None,
    store: Store,
    progress: Progress,
) -> dict[str, KernelLibrary]:
    """Return the kernels of each target that has some, compiled now if the store has none."""
    if not uses_kernels(plan.manifest):
        return {}
    found = {
        each.target.name: build_kernels(
            each,
            store,
            progress,
            first=None if kernels_by is None else kernels_by[each.target.name],
        )
        for each in toolchains
        if kernels_by is None or each.target.name in kernels_by
    }
    missing = [each for each in found.values() if isinstance(each, NoKernels)]
    for reason in dict.fromkeys(each.reason for each in missing if each.worth_telling):
        progress.note(reason)
    return {name: each for name, each in found.items() if isinstance(each, KernelLibrary)}


def _measure_forms(
    plan: Plan,
    toolchains: list[Toolchain],
    libraries: dict[str, KernelLibrary],
    model: ReadModel,
    code: ReadCode,
    executor: Executor,
    service: _Services,
) -> KnownForms:
    """Return the tables of measured forms, with what was missing measured for targets that run here."""
    known = plan.forms
    for toolchain in toolchains:
        library = libraries.get(toolchain.target.name)
        if library is None or not runs_here(toolchain, library):
            continue
        with service.progress.phase("looking for products"):
            products = products_of(plan, model, code, service.store)
        known = measure_missing(
            known,
            products,
            toolchain,
            library,
            service.store,
            executor,
            service.progress,
            fresh=bool(service.measure),
            quiet=service.jobs.wait,
            timeout_seconds=service.timeout_seconds,
        )
    return known


def _tools(
    toolchain: Toolchain, libraries: dict[str, KernelLibrary], known: KnownForms
) -> TargetTools:
    library = libraries.get(toolchain.target.name)
    kernels = None if library is None else kernels_of(library, toolchain, known)
    return TargetTools(toolchain, kernels)


def write(bundle: PackedBundle, output: Path, progress: Progress) -> tuple[Path, bool]:
    """Write a bundle into `output/NAME`, unless it is there already.

    Returns:
        The directory, and whether it was changed.

    Raises:
        StoreError: the directory cannot be written.
    """
    path = output / bundle.name
    if is_current(path, bundle.index):
        return path, False
    with progress.phase(f"writing {path}"):
        write_layout(path, bundle.index, bundle.blobs, digest_of_file=Receipts(path).digest_of)
    return path, True


def is_current(path: Path, index: bytes) -> bool:
    """Return whether a directory holds exactly this bundle, undamaged."""
    try:
        with Layout(path) as layout:
            root = read_root(layout)
            if to_json(root.bundle) != index:  # another one, or a copy of some of its targets
                return False
            referrers(layout, root)  # raises an error if something that is attached is damaged
            targets = match(root, Fingerprint.current())
            check_blobs(
                layout, [read_manifest(layout, target) for target in targets], Receipts(path)
            )
    except (RejectError, StoreError):
        return False
    return True
