"""The first half of a build: plan it, submit all programs to the executor, and pack the weights meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import date
from functools import cache, partial
from glob import iglob
from pathlib import Path

from prejit.compiler.checkpoint.source import resolve_source
from prejit.compiler.compile.jobs import Compiled
from prejit.compiler.manifest.manifest import Manifest
from prejit.compiler.pipeline.bundle_writing import check_place
from prejit.compiler.pipeline.early_checks import check, read_planned, vocab_size
from prejit.compiler.pipeline.executables import Submitted
from prejit.compiler.pipeline.lowerers.crew import open_crew
from prejit.compiler.pipeline.measure.other_sizes import check_sizes
from prejit.compiler.pipeline.model import ReadModel, stores_out_in
from prejit.compiler.pipeline.pack.bundle_files import PackedLayer
from prejit.compiler.pipeline.pack.compatibility import readable_until
from prejit.compiler.pipeline.pack.model_layers import read_layers
from prejit.compiler.pipeline.pack.packed_weights import Published, find_published, pack_weights
from prejit.compiler.pipeline.plan import Plan, find_toolchain, plan_build
from prejit.compiler.pipeline.program_keys import versions
from prejit.compiler.pipeline.reuse import TargetTools
from prejit.compiler.pipeline.services import Services
from prejit.compiler.pipeline.shards import Packing
from prejit.compiler.pipeline.submitting import Submitting
from prejit.compiler.pipeline.tracing import parameters_of, remember
from prejit.compiler.pipeline.user_code import ReadCode, find_code
from prejit.compiler.progress import Progress
from prejit.compiler.targets.environments import spec_for
from prejit.compiler.targets.installing import make_environment
from prejit.compiler.targets.target_classes import Target
from prejit.compiler.targets.toolchain import Toolchain
from prejit.runtime.fallback import expiry_notice


@dataclass(frozen=True)
class Begun:
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


def begin(manifest: Manifest, only: tuple[str, ...], service: Services) -> Begun:
    """Plan a build, submit its programs, and pack its weights while they are compiled."""
    store, progress = service.store, service.progress
    check_place(manifest.bundle.name, service.output)
    directory = _fetch(manifest)
    _note_reads(manifest, progress)
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
        service.executor,
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
        jax = versions("jax")["jax"]
        expiry = expiry_notice(jax, readable_until(jax), date.today())
        if expiry is not None:
            progress.note(f"{manifest.bundle.name}: {expiry}")
        submitting = Submitting(plan, model, code, None if checked is None else crew, service)
        submitting.run(toolchains)
    plan, tools, found = submitting.plan, submitting.tools, submitting.found
    submitted = [each for program in plan.programs for each in found[program.spec.name]]
    user = parameters_of(plan, code)
    lowered = {each.spec.name: each.lowered for each in submitted}
    remember(submitting.untraced, lowered, user, plan.own, code, store, progress)
    weights = cache(partial(pack_weights, plan, published, user, code, model, store, progress))
    if service.shard is None:
        packed = weights()  # while workers compile
        weights = cache(lambda: packed)
    check_sizes(plan, lowered, user, weights, store, progress, service.timeout_seconds)
    return Begun(
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


def _fetch(manifest: Manifest) -> Path | None:
    if manifest.model is None or manifest.model.source is None:
        return None
    weights = not manifest.has_own_model
    return resolve_source(manifest.model.source, manifest.directory, weights=weights)


def _note_reads(manifest: Manifest, progress: Progress) -> None:
    """Say which patterns of `reads` match nothing."""
    for section in (manifest.model, *manifest.programs):
        for pattern in () if section is None else section.reads:
            if next(iglob(pattern, root_dir=manifest.directory, recursive=True), None) is None:
                progress.note(f"{manifest.where}: reads: {pattern!r} matches no file")


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
