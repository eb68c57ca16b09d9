"""Compiling: from lowered programs to executables, side by side in worker processes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from prejit.compiler.compile.executor import Executor, collect
from prejit.compiler.compile.jobs import Compiled, CompileJob, Source
from prejit.compiler.manifest.manifest import Manifest
from prejit.compiler.manifest.specs import ProgramSpec
from prejit.compiler.native.library import KernelLibrary
from prejit.compiler.pipeline.keys import compile_key
from prejit.compiler.pipeline.libraries import bind_libraries
from prejit.compiler.pipeline.plan import (
    Lowered,
    Plan,
    PlannedProgram,
    TargetKernels,
    UnknownError,
    calls_kernels,
    choose_source,
    known_native,
)
from prejit.compiler.store.interface import Store
from prejit.compiler.targets.toolchain import Toolchain


@dataclass(frozen=True)
class TargetTools:
    """What compiles for a target.

    Attributes:
        toolchain: compiler, versions and flags.
        kernels: the native kernels; None: the target has none.
    """

    toolchain: Toolchain
    kernels: TargetKernels | None

    @property
    def name(self) -> str:
        """The name of the target."""
        return self.toolchain.target.name


@dataclass(frozen=True)
class CompiledExecutable:
    """A program that was compiled for a target.

    Attributes:
        spec: the program.
        lowered: its portable form.
        job: what was compiled, and for which target.
        compiled: the result.
    """

    spec: ProgramSpec
    lowered: Lowered
    job: CompileJob
    compiled: Compiled


@dataclass(frozen=True)
class CompiledTarget:
    """All executables of a target.

    Attributes:
        tools: what compiled them.
        executables: one for each program, in the order of the plan.
    """

    tools: TargetTools
    executables: tuple[CompiledExecutable, ...]

    @property
    def library(self) -> KernelLibrary | None:
        """The kernels that executables call; None: they call none."""
        return next((e.job.source.kernels for e in self.executables if e.job.source.kernels), None)

    @property
    def calls(self) -> frozenset[str]:
        """The names by which programs call handlers of the user's libraries."""
        return frozenset(name for each in self.executables for name, _ in each.job.source.calls)

    @property
    def results(self) -> Mapping[str, Compiled]:
        """What the compiler returned, by program."""
        return {each.spec.name: each.compiled for each in self.executables}


@dataclass(frozen=True)
class Submitted:
    """A program that the executor compiles for one target.

    Attributes:
        spec: the program.
        lowered: its portable form.
        job: what the executor compiles.
        future: gets the result.
    """

    spec: ProgramSpec
    lowered: Lowered
    job: CompileJob
    future: Future[Compiled]


def submit(
    manifest: Manifest,
    spec: ProgramSpec,
    lowered: Lowered,
    source: Source,
    tools: TargetTools,
    executor: Executor,
) -> Submitted:
    """Hand a program to the executor, which takes it from the store or compiles it."""
    key = compile_key(manifest, spec, tools.toolchain, source)
    job = CompileJob(spec.name, tools.toolchain, source, key)
    return Submitted(spec, lowered, job, executor.submit(job))


def submit_known(
    plan: Plan,
    program: PlannedProgram,
    *,
    tools: Sequence[TargetTools],
    store: Store,
    executor: Executor,
) -> list[Submitted] | None:
    """Hand a program to the executor for each target, if the store has what it is compiled from.

    Returns:
        None if it has to be lowered, or traced.
    """
    if (lowered := program.lowered) is None:
        return None
    found = []
    manifest, spec = plan.manifest, program.spec
    native = partial(known_native, program.key, store)
    try:
        for each in tools:
            kernels = each.kernels if calls_kernels(manifest, spec) else None
            source = choose_source(lowered, kernels, native)
            target = each.toolchain.target
            source = bind_libraries(plan.libraries, manifest.where, spec, source, target, store)
            found.append((source, each))
    except UnknownError:
        return None
    return [submit(manifest, spec, lowered, source, each, executor) for source, each in found]


def compiled_targets(
    submitted: Sequence[Submitted], tools: Iterable[TargetTools]
) -> tuple[CompiledTarget, ...]:
    """Wait until all programs are compiled, and return them by target.

    Raises:
        BuildError: programs did not compile; one line or more for each. The others are in the store.
        StoreError: the store cannot be written.
    """
    results = collect({(each.spec.name, each.job.target.name): each.future for each in submitted})
    found = [
        CompiledExecutable(
            each.spec, each.lowered, each.job, results[each.spec.name, each.job.target.name]
        )
        for each in submitted
    ]
    return tuple(
        CompiledTarget(one, tuple(each for each in found if each.job.target.name == one.name))
        for one in tools
    )
