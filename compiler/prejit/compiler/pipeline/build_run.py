"""A build, from the manifest to the bundle on disk: a line of values.

    manifest -> plan        programs x targets, and what the store has     plan, stored_traces
             -> lowered     programs and functions as StableHLO            lower.program_submission
             -> compiled    executables, made in worker processes          executable_jobs
             -> packed      tables, layers and index                       pack.contents
             -> written     the OCI image layout, with its descriptions    pack.bundle_writing

`begin` goes from the manifest to programs that are being compiled, `finish` from there to the bundle.
Workers compile a program while the next one is lowered and while weights are packed. `build_all` does this
for several manifests at the same time. Every call below is one step: its module says what it does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import date
from functools import cache, partial
from glob import iglob
from pathlib import Path
from typing import TypeVar

from prejit.compiler.checkpoint.model_source import resolve_source
from prejit.compiler.compile.compile_jobs import Compiled
from prejit.compiler.compile.stablehlo_contents import has_plain_convolutions
from prejit.compiler.manifest.manifest import Manifest
from prejit.compiler.pipeline.build_interface import (
    BuildOptions,
    Built,
    BuiltProgram,
    Failed,
    Packing,
    Services,
    Turn,
)
from prejit.compiler.pipeline.executable_jobs import (
    CompiledTarget,
    Jobs,
    Submitted,
    compiled_targets,
)
from prejit.compiler.pipeline.lower.crew import open_crew
from prejit.compiler.pipeline.lower.model_checks import check
from prejit.compiler.pipeline.lower.program_lowering import is_lowered_again, lower, products_of
from prejit.compiler.pipeline.lower.program_submission import Submitting
from prejit.compiler.pipeline.lower.trace_keeping import read_own, remember
from prejit.compiler.pipeline.measure.accuracy import choose_bits, measure_accuracy, round_by_text
from prejit.compiler.pipeline.measure.golden_answers import with_golden_answers
from prejit.compiler.pipeline.measure.measured_speed import measure_costs
from prejit.compiler.pipeline.measure.other_sizes import check_sizes
from prejit.compiler.pipeline.measure.reference_checks import with_checked_answers
from prejit.compiler.pipeline.pack.bundle_descriptions import attach_descriptions, build_provenance
from prejit.compiler.pipeline.pack.bundle_files import LostFramesError, PackedLayer
from prejit.compiler.pipeline.pack.bundle_writing import check_place, write
from prejit.compiler.pipeline.pack.contents import pack_bundle, pack_targets, readable_until
from prejit.compiler.pipeline.pack.model_layers import read_layers
from prejit.compiler.pipeline.pack.weights_layer import RoundedByText, WeightsLayer, pack_weights
from prejit.compiler.pipeline.plan import Lowered, PlanOptions, plan_build
from prejit.compiler.pipeline.published_files import Published, find_published
from prejit.compiler.pipeline.result_keys import versions
from prejit.compiler.pipeline.target_tools import TargetTools, make_toolchain
from prejit.compiler.pipeline.workspace import Workspace
from prejit.compiler.progress import Progress
from prejit.compiler.store.store_interface import Store
from prejit.compiler.targets.toolchain import Toolchain
from prejit.runtime.base.files import digest_of
from prejit.runtime.base.typed_json import to_json
from prejit.runtime.errors import PrejitError
from prejit.runtime.fallback_reporting import expiry_notice

_Step = TypeVar("_Step")


def build(
    manifest: Manifest, output: Path, options: BuildOptions, *, only: tuple[str, ...] = ()
) -> Built:
    """Build the bundle of a manifest into `output/NAME`.

    `only` has names of targets; empty: all targets of the manifest.

    Raises:
        BuildError: a program does not compile, or its worker died or took too long. What was finished stays
            in the store.
        ManifestError, CheckpointError, StoreError, NetworkError: something that the build starts from is
            wrong, or cannot be read.
    """
    results: list[Built | Failed] = []
    build_all([(manifest, only)], output, options, done=results.append)
    return only_built(results)


def only_built(results: Sequence[Built | Failed]) -> Built:
    """Return the one build that ended, or raise its error."""
    [result] = results
    if isinstance(result, Failed):
        raise result.error
    return result


def build_all(
    requests: Sequence[tuple[Manifest, tuple[str, ...]]],
    output: Path,
    options: BuildOptions,
    *,
    done: Callable[[Built | Failed], None],
) -> None:
    """Build the bundles of several manifests with one executor, each with its targets.

    The next manifest is planned and lowered while programs of the others compile. Each bundle is written as
    soon as its programs are compiled. A build that fails ends no other one. Equal programs compile once.

    Shards begin with different manifests. Each bundle is packed by the first shard that has all its programs;
    the others go on meanwhile.

    `requests` are manifests with different bundle names, each with the names of its targets (empty: all).
    `done` is called with each build as it ends.

    Raises:
        StoreError: the build has shards, and the store cannot be read.
    """
    executor, store, shard = options.executor, options.store, options.shard
    jobs = Jobs(executor, store, options.progress, several=len(requests) > 1)
    # Before any program: another shard may pack the last bundle before this one plans it.
    names = [manifest.bundle.name for manifest, _ in requests]
    packings = {} if shard is None else {name: Packing(shard, name, store) for name in names}
    service = Services(output=output, jobs=jobs, packings=packings, **vars(options))
    left: list[Begun] = []

    def end(ready: Sequence[Begun], *, patient: bool) -> None:
        for begun in ready:
            step = partial(finish, begun, service, lambda: not patient)
            if (result := _attempt(begun.space.plan.manifest, step)) is not None:
                left.remove(begun)
                done(result)

    with executor:
        for manifest, only in requests if shard is None else shard.ordered(requests):
            begun = _attempt(manifest, partial(begin, manifest, only, service))
            if isinstance(begun, Failed):
                done(begun)
            else:
                left.append(begun)
            end([each for each in left if not each.unfinished], patient=False)
        while unfinished := [future for each in left for future in each.unfinished]:
            wait(unfinished, return_when=FIRST_COMPLETED)
            if any(each.unfinished for each in left):
                end([each for each in left if not each.unfinished], patient=False)
    # The last ones are packed without workers, which take memory.
    end([*left], patient=False)
    while left:
        end(left[:1], patient=True)  # other shards pack all that is left
        end([*left], patient=False)


@dataclass(frozen=True)
class Begun:
    """A build whose programs are being compiled. It holds no weights, unless it is a shard or of the user.

    Attributes:
        published: the files of the checkpoint.
        weights: returns the weights layer, which a shard packs only if it packs the bundle.
        layers: the other layers that all targets share.
        packing: decides which shard packs; None: the build has no shards.
    """

    space: Workspace
    published: Published | None
    tools: Sequence[TargetTools]
    submitted: Sequence[Submitted]
    weights: Callable[[], WeightsLayer | None]
    layers: Sequence[PackedLayer]
    packing: Packing | None

    @property
    def unfinished(self) -> list[Future[Compiled]]:
        """The programs that are still compiled."""
        return [each.future for each in self.submitted if not each.future.done()]


def begin(manifest: Manifest, only: tuple[str, ...], service: Services) -> Begun:
    """Plan a build, submit its programs, and pack its weights while they are compiled."""
    store, progress, name = service.store, service.progress, manifest.bundle.name
    check_place(name, service.output)
    space, options, published, rounded = _planned(manifest, only, service)
    crew = open_crew(space.plan, options, service.executor, store, progress)
    with crew or nullcontext():  # its processes read the model meanwhile
        check(space, None if published is None else published.checkpoint)
        space = read_own(space)
        # After the model: to try a tokenizer may take half a minute.
        layers = tuple(read_layers(space))
        toolchains = [make_toolchain(target, progress) for target in space.plan.targets]
        _note_cpus(toolchains, progress)
        _note_expiry(name, progress)
        submitting = Submitting(space, crew, service)
        submitting.run(toolchains)
    space = submitting.space
    submitted = [each for p in space.plan.programs for each in submitting.found[p.spec.name]]
    user = space.parameters()
    lowered = {each.spec.name: each.lowered for each in submitted}
    remember(submitting.untraced, lowered, user)
    rounding = partial(round_by_text, earlier=rounded)
    weights = cache(partial(pack_weights, space, published, user, rounding))
    if service.shard is None:
        packed = weights()  # while workers compile
        weights = cache(lambda: packed)
    check_sizes(space, lowered, user, weights, service.timeout_seconds)
    packing = service.packings.get(name)
    return Begun(space, published, submitting.tools, submitted, weights, layers, packing)


def _planned(
    manifest: Manifest, only: tuple[str, ...], service: Services
) -> tuple[Workspace, PlanOptions, Published | None, RoundedByText | None]:
    """Return the plan of a build, with which other processes plan too, and the files of its checkpoint.

    The last is what deciding the dtypes of an encoder's matrices rounded already; None: nothing.
    """
    store, progress = service.store, service.progress
    paths = (service.forms, _fetch(manifest), _fetch(manifest.of_draft))
    forms, directory, draft = (None if path is None else str(path) for path in paths)
    _note_reads(manifest, progress)
    options = PlanOptions(only, forms, directory, draft, service.retrace)
    plan = plan_build(manifest, store, options)
    published, rounded = find_published(manifest, plan.model, plan.draft), None
    if published is not None and plan.model is not None and plan.model.chosen is None:
        unmeasured = Workspace.of(plan, store, progress)
        check(unmeasured, published.checkpoint)
        bits, rounded = choose_bits(unmeasured, published)
        options = replace(options, bits=bits)
        plan = plan_build(manifest, store, options)
    elif plan.model is not None:
        options = replace(options, bits=plan.model.chosen)  # so that no process hashes files for it
    return Workspace.of(plan, store, progress), options, published, rounded


def finish(
    begun: Begun, service: Services, give_up: Callable[[], bool] = lambda: False
) -> Built | None:
    """Wait for the programs of a build, and write its bundle, unless another shard does.

    `give_up` is called while another shard packs; true ends the wait, and None is returned.
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
    path = service.output / begun.space.plan.manifest.bundle.name
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


def _compiled_here(begun: Begun, service: Services) -> list[bool]:
    """Return of each program of a build whether this process compiled it now, and for no other build."""
    here = service.executor.compiled
    return [each.new and each.job.key.digest in here for each in begun.submitted]


def _pack(begun: Begun, targets: tuple[CompiledTarget, ...], service: Services) -> Built:
    """Pack the compiled programs of a build, and write its bundle."""
    store, progress, seconds = service.store, service.progress, service.timeout_seconds
    space, manifest, weights = begun.space, begun.space.plan.manifest, begun.weights()
    _note_convolutions(targets, store, progress)
    programs = [each.lowered.portable.raw_digest for each in targets[0].executables]
    accuracy = measure_accuracy(space, begun.published, weights, programs)
    costs = measure_costs(manifest, targets, weights, service)
    pack = partial(
        pack_targets,
        space.plan,
        layers=begun.layers if weights is None else (*begun.layers, weights),
        products=products_of(space) if any(each.kernels for each in begun.tools) else (),
        accuracy=accuracy,
        costs=costs,
        store=store,
    )
    try:
        packed = pack(targets)
    except LostFramesError as lost:
        targets = _with_lost_frames(begun, targets, lost)
        packed = pack(targets)
    packed = with_golden_answers(packed, store, progress, seconds)
    packed = with_checked_answers(space, packed, seconds)
    bundle = pack_bundle(manifest.bundle.name, packed, manifest.slo)
    path, written = write(bundle, service.output, progress)
    digest = digest_of(bundle.index)
    provenance = partial(build_provenance, space.plan, targets, begun.published, store, digest)
    attach_descriptions(path, digest, provenance)
    compiled = _compiled_here(begun, service)
    built = tuple(
        BuiltProgram(
            each.spec.name,
            each.job.target.name,
            each.job.key.digest,
            each.compiled.milliseconds,
            new,
        )
        for each, new in zip(begun.submitted, compiled, strict=True)
    )
    cached = len(built) - sum(compiled)
    bits = None if weights is None else weights.few_bits
    int4 = "" if weights is None else weights.int4
    return Built(
        path, digest, sum(compiled), cached, written, accuracy, built, few_bits=bits, int4=int4
    )


def _with_lost_frames(
    begun: Begun, targets: tuple[CompiledTarget, ...], lost: LostFramesError
) -> tuple[CompiledTarget, ...]:
    """Return compiled programs whose portable forms the store has again: they are lowered again."""
    found: dict[str, Lowered] = {}
    for program in begun.space.plan.programs:
        if program.spec.name in lost.names and is_lowered_again(begun.space.plan, program):
            found[program.spec.name] = lower(begun.space, program)

    def mended(each: Submitted) -> Submitted:
        made = found.get(each.spec.name, each.lowered)
        if made.portable.raw_digest != each.lowered.portable.raw_digest:
            raise lost
        return replace(each, lowered=made)

    if found.keys() != {*lost.names}:
        raise lost
    return tuple(
        replace(target, executables=tuple(map(mended, target.executables))) for target in targets
    )


def _fetch(manifest: Manifest | None) -> Path | None:
    if manifest is None or manifest.model is None or manifest.model.source is None:
        return None
    weights = not manifest.has_own_model
    return resolve_source(manifest.model.source, manifest.directory, weights=weights)


def _note_reads(manifest: Manifest, progress: Progress) -> None:
    """Say which patterns of `reads` match nothing."""
    for section in (manifest.model, *manifest.programs):
        for pattern in () if section is None else section.reads:
            if next(iglob(pattern, root_dir=manifest.directory, recursive=True), None) is None:
                progress.note(f"{manifest.where}: reads: {pattern!r} matches no file")


def _note_cpus(toolchains: Sequence[Toolchain], progress: Progress) -> None:
    """Say which targets are compiled for fewer CPUs than theirs, because this machine shows XLA no more."""
    for each in toolchains:
        if each.cpus not in (None, each.target.cpus):
            progress.note(
                f"target {each.target.name}: loops are split for {each.cpus} CPUs and not for "
                f"{each.target.cpus}: this machine has no more, and forbids the filter (seccomp) that "
                "shows XLA more; programs run everywhere, and leave further CPUs of a server idle"
            )


def _note_convolutions(targets: Sequence[CompiledTarget], store: Store, progress: Progress) -> None:
    """Say which programs have convolutions that nobody measured on a GPU of their target."""
    for target in targets:
        tools = target.tools.toolchain
        platform, tuned = tools.target.platform, tools.tuned is not None
        names = [
            each.spec.name
            for each in target.executables
            if (program := store.read_blob(each.job.source.program)) is not None
            and has_plain_convolutions(program, each.lowered.platforms, platform, tuned=tuned)
        ]
        if names:
            progress.note(
                f"target {tools.target.name}: {', '.join(names)}: convolutions run as XLA's own loops, "
                "which are slower than cuDNN: run `prejit tune` on such a GPU, and name its file as "
                "`tuning` of the target"
            )


def _note_expiry(name: str, progress: Progress) -> None:
    """Say when jax's promise to read portable programs ends soon."""
    jax = versions("jax")["jax"]
    expiry = expiry_notice(jax, readable_until(jax), date.today())
    if expiry is not None:
        # jax 0.10.2 is the last one for Python 3.11.
        needed = ", which needs Python 3.12" if sys.version_info < (3, 12) else ""
        progress.note(f"note: {name}: {expiry}{needed}")


def _attempt(manifest: Manifest, step: Callable[[], _Step]) -> _Step | Failed:
    """Return what a step of a build returns, or the error that ends this build alone."""
    try:
        return step()
    except PrejitError as error:
        return Failed(manifest, error)
