"""A build, from the manifest to the bundle on disk. Each stage takes values and returns values.

    fetch         find or download the model directory           checkpoint.source
    plan          programs x targets, and what the store has     plan
    check         model, files, functions: mistakes come first   model, pack.model_layers, lowering
    environments  make the environments of pinned versions       targets.installing
    kernels       compile the C++ kernels of each CPU level      native.library
    forms         measure how products are computed fastest      measure.forms
    lower         trace programs to StableHLO                    lowering
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
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

from prejit.compiler.checkpoint.source import resolve_source
from prejit.compiler.compile.executor import Executor
from prejit.compiler.compile.jobs import Compiled
from prejit.compiler.compile.worker_process import JOB_SECONDS
from prejit.compiler.manifest.manifest import Manifest
from prejit.compiler.native.form_choice import KnownForms
from prejit.compiler.native.library import KernelLibrary, NoKernels, build_kernels
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
from prejit.compiler.pipeline.lowering import (
    has_lost_native,
    is_lowered_again,
    lower,
    lower_own,
    lowered_again,
    own_shape,
    products_of,
    source_of,
)
from prejit.compiler.pipeline.measure.accuracy import measure_accuracy
from prejit.compiler.pipeline.measure.costs import measure_costs
from prejit.compiler.pipeline.measure.forms import measure_missing, runs_here
from prejit.compiler.pipeline.measure.golden import with_golden_answers
from prejit.compiler.pipeline.model import (
    ModelSource,
    ReadModel,
    check_model,
    check_own_model,
    read_model,
    stores_out_in,
    uses_kernels,
)
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
    model: ReadModel = cache(partial(_read_model, plan))
    out_in = stores_out_in(manifest, plan.targets)
    code: ReadCode = cache(partial(find_code, manifest, out_in=out_in))
    layers = read_layers(plan, partial(_vocab_size, plan, model, code), store, progress)
    published = find_published(plan)
    _check(plan, model, published, code)
    before_tracing = plan
    plan = lower_own(plan, code, store, progress)
    toolchains = [_make_toolchain(target, progress) for target in plan.targets]
    _note_cpus(toolchains, progress)
    libraries = _build_kernels(plan, toolchains, service.kernels_by, store, progress)
    known = plan.forms
    if service.measure is not False:
        known = _measure_forms(plan, toolchains, libraries, model, code, executor, service)
    tools = [_tools(toolchain, libraries, known) for toolchain in toolchains]

    def submit_new(program: PlannedProgram) -> list[Submitted]:
        lowered = lower(plan, program, model, code, store, progress)
        found, lost = [], has_lost_native(program, store)
        for each in tools:
            source = source_of(plan, program, lowered, each.kernels, model, code, store)
            if store.read_blob(source.program) is None:  # which deletes what is damaged
                lost = True
                source = source_of(plan, program, lowered, each.kernels, model, code, store)
            target = each.toolchain.target
            source = bind_libraries(
                plan.libraries, manifest.where, program.spec, source, target, store
            )
            found.append(submit(manifest, program.spec, lowered, source, each, service.jobs))
        if lost:
            progress.note(lowered_again(f"{program.spec.name} with kernels"))
        return found

    # First what the stores know: a shared one answers many questions at a time.
    ask = partial(submit_known, plan, tools=tools, store=store, jobs=service.jobs)
    ordered = plan.programs if service.shard is None else service.shard.ordered(plan.programs)
    answers = list(store.map(ask, ordered))
    found = {
        program.spec.name: submit_new(program) if known is None else known
        for program, known in zip(ordered, answers, strict=True)
    }
    submitted = [each for program in plan.programs for each in found[program.spec.name]]
    user = parameters_of(plan, code)
    lowered = {each.spec.name: each.lowered for each in submitted}
    remember(before_tracing, lowered, user, plan.own, code, store, progress)
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


def _read_model(plan: Plan) -> ModelSource:
    assert plan.model is not None
    return read_model(plan.manifest, plan.model)


def _vocab_size(plan: Plan, model: ReadModel, code: ReadCode) -> int:
    if plan.own is not None:
        return plan.own.vocab_size
    own = code().model if plan.manifest.has_own_model else None
    size: int = model().shape.vocab_size if own is None else own.vocab_size
    return size


def _check(plan: Plan, model: ReadModel, published: Published | None, code: ReadCode) -> None:
    """Check the model and the user's code against the programs that have to be lowered.

    Others were checked before. All code is imported if any is, so that it finds the same modules each time.
    """
    traced = any(
        each.lowered is None and (each.spec.kind == "call" or plan.manifest.has_own_model)
        for each in plan.programs
    )
    if (traced or (plan.manifest.has_own_model and plan.own is None)) and (own := code().model):
        check_own_model(plan.manifest, own, own_shape(plan.manifest, own), plan.specs)
    new = [each.spec for each in plan.programs if each.key is not None and each.lowered is None]
    if new and published is not None:
        check_model(plan.manifest, model(), published.checkpoint, new)


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
