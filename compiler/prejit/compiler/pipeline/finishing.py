"""The second half of a build: wait for compiled programs, and pack, describe and write the bundle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from prejit.compiler.pipeline.beginning import Begun
from prejit.compiler.pipeline.built import Built, BuiltProgram
from prejit.compiler.pipeline.bundle_writing import write
from prejit.compiler.pipeline.describe.attaching import attach_descriptions
from prejit.compiler.pipeline.describe.provenance import build_provenance
from prejit.compiler.pipeline.executables import (
    CompiledExecutable,
    CompiledTarget,
    compiled_targets,
)
from prejit.compiler.pipeline.lowering import is_lowered_again, lower, products_of
from prejit.compiler.pipeline.measure.accuracy import measure_accuracy
from prejit.compiler.pipeline.measure.costs import measure_costs
from prejit.compiler.pipeline.measure.golden_answers import with_golden_answers
from prejit.compiler.pipeline.pack.bundle_files import LostFramesError
from prejit.compiler.pipeline.pack.contents import pack_bundle, pack_targets
from prejit.compiler.pipeline.plan import Lowered
from prejit.compiler.pipeline.services import Services
from prejit.compiler.pipeline.shards import Turn
from prejit.runtime.base.files import digest_of
from prejit.runtime.base.typed_json import to_json


def finish(
    begun: Begun, service: Services, give_up: Callable[[], bool] = lambda: False
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


def _compiled_here(begun: Begun, service: Services) -> list[bool]:
    """Return of each program of a build whether this process compiled it now, and for no other build."""
    here = service.executor.compiled
    return [each.new and each.job.key.digest in here for each in begun.submitted]


def _pack(begun: Begun, targets: tuple[CompiledTarget, ...], service: Services) -> Built:
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
    begun: Begun,
    targets: tuple[CompiledTarget, ...],
    lost: LostFramesError,
    service: Services,
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
