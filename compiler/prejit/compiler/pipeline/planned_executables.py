"""The executables that a plan needs, and which of them the store has.

`known_job` makes the job of an executable, which a build submits and for which a plan asks the store. The
job's key decides for both (`compile_jobs.find_compiled`), so a plan says "cached" of what a build takes from
the store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

from prejit.compiler.compile.compile_jobs import CompileJob, Source
from prejit.compiler.manifest.manifest import Manifest
from prejit.compiler.manifest.specs import ProgramSpec
from prejit.compiler.native.kernel_library import KernelLibrary, find_kernels
from prejit.compiler.native.products import Product
from prejit.compiler.pipeline.libraries import bind_libraries
from prejit.compiler.pipeline.model import uses_kernels
from prejit.compiler.pipeline.plan import (
    Native,
    Plan,
    PlannedProgram,
    TargetKernels,
    calls_kernels,
    choose_source,
    find_native,
    find_toolchain,
    kernels_of,
)
from prejit.compiler.pipeline.result_keys import compile_key, native_key
from prejit.compiler.store.build_cache_key import Key, nearest, why
from prejit.compiler.store.store_interface import Store
from prejit.compiler.targets.target_classes import Target
from prejit.compiler.targets.toolchain import Toolchain

CACHED = "cached"
COMPILE = "compile"
TRACED = "traced at build"
"""The state of changed code of the user: only tracing it shows whether its executable is in the store."""


@dataclass(frozen=True)
class TargetTools:
    """The compiler of a target with its versions and flags, and the native kernels, if it has some."""

    toolchain: Toolchain
    kernels: TargetKernels | None

    @property
    def name(self) -> str:
        """The name of the target."""
        return self.toolchain.target.name


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


class UnknownError(Exception):
    """The store does not hold what decides an executable's key; the text says what has to be made."""


class UntracedError(UnknownError):
    """Only tracing the user's code shows what an executable is compiled from."""


def job_of(
    plan: Plan, spec: ProgramSpec, source: Source, tools: TargetTools, store: Store
) -> CompileJob:
    """Return the job that makes the executable of a program for a target, with the user's libraries."""
    manifest, target = plan.manifest, tools.toolchain.target
    source = bind_libraries(plan.libraries, manifest.where, spec, source, target, store)
    key = compile_key(manifest, spec, tools.toolchain, source)
    return CompileJob(spec.name, tools.toolchain, source, key)


def known_job(
    plan: Plan, program: PlannedProgram, tools: Callable[[ProgramSpec], TargetTools], store: Store
) -> CompileJob:
    """Return the job that makes an executable, if the store has all that decides it.

    `tools` returns what compiles a program for the target, or raises UnknownError.
    """
    manifest, lowered = plan.manifest, program.lowered
    if lowered is None and (program.spec.kind == "call" or manifest.has_own_model):
        raise UntracedError(_why_traced(manifest, program, store))
    if lowered is None and program.key is not None:
        raise UnknownError(why_made(program.key, store))
    if lowered is None:
        assert manifest.model is not None
        still = "fetched" if plan.model is None else "measured: how many bits its matrices need"
        raise UnknownError(f"{manifest.model.source} has still to be {still}")
    found, native = tools(program.spec), partial(known_native, program.key, store)
    source = choose_source(manifest, program.spec, lowered, found.kernels, native)
    return job_of(plan, program.spec, source, found, store)


def planned_executables(plan: Plan, store: Store) -> tuple[PlannedExecutable, ...]:
    """Return, for each program and target, what a build would do and why."""
    tools = {target.name: _found_tools(plan, target, store) for target in plan.targets}

    def planned(pair: tuple[PlannedProgram, Target]) -> PlannedExecutable:
        program, target = pair
        found = partial(PlannedExecutable, program.spec, target)
        try:
            job = known_job(plan, program, tools[target.name], store)
        except UnknownError as missing:
            state = TRACED if isinstance(missing, UntracedError) else COMPILE
            return found(state, str(missing))
        if (where := store.where(job.key)) is not None:
            return found(CACHED, where=where)
        return found(COMPILE, why_made(job.key, store))

    return tuple(store.map(planned, product(plan.programs, plan.targets)))


def _found_tools(plan: Plan, target: Target, store: Store) -> Callable[[ProgramSpec], TargetTools]:
    """Return what finds the tools that compile a program for a target: see `known_job`."""
    toolchain, kernels, is_missing = find_toolchain(target), None, False
    if toolchain is not None and uses_kernels(plan.manifest):
        library = find_kernels(toolchain, store)
        is_missing = library is None
        if isinstance(library, KernelLibrary):
            kernels = kernels_of(library, toolchain, plan.forms)

    def find(spec: ProgramSpec) -> TargetTools:
        if toolchain is None:
            raise UnknownError("its environment has still to be made")
        if is_missing and calls_kernels(plan.manifest, spec):
            raise UnknownError("its kernels have still to be compiled")
        return TargetTools(toolchain, kernels)

    return find


def _why_traced(manifest: Manifest, program: PlannedProgram, store: Store) -> str:
    if program.trace is not None:
        return program.trace.why(store)
    section = (
        manifest.section(program.spec.section) if program.spec.kind == "call" else manifest.model
    )
    assert section is not None
    return f"{section.label} is an object of Python, which every build traces"


def known_native(lowered: Key | None, store: Store, forms: Mapping[Product, str]) -> Native:
    """Return a model's program with kernels from the store, by the key of its portable program."""
    assert lowered is not None
    key = native_key(lowered, forms)
    if (found := find_native(key, store)) is None:
        raise UnknownError(why_made(key, store))
    return found


def why_made(key: Key, store: Store) -> str:
    """Return why the result of a key has to be made, beside the last ones of its kind and name."""
    return why(nearest(store.last_keys(key.kind, key.name), key), key)


def reasons(executables: Sequence[PlannedExecutable]) -> dict[str, int]:
    """Return why executables are not cached, each reason with the number of executables."""
    counts: dict[str, int] = {}
    for each in executables:
        if not each.cached:
            counts[each.why] = counts.get(each.why, 0) + 1
    return counts
