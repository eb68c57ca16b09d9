"""From a program and a target to the job that compiles it, and to its executable.

`known_job` makes the job of an executable, which a build submits and for which a plan asks the store. The
job's key decides for both (`compile_jobs.find_compiled`), so a plan says "cached" of what a build takes from
the store. `Jobs` hands jobs to the executor, which compiles them side by side in worker processes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import final

from prejit.compiler.compile.compile_jobs import (
    Compiled,
    CompileJob,
    Source,
    executable_key,
    find_compiled,
)
from prejit.compiler.compile.executor import Executor, collect, pass_on
from prejit.compiler.manifest.manifest import Manifest
from prejit.compiler.manifest.specs import ProgramSpec
from prejit.compiler.native.kernel_library import KernelLibrary, find_kernels
from prejit.compiler.native.products import Product
from prejit.compiler.pipeline.model import calls_kernels, uses_kernels
from prejit.compiler.pipeline.plan import Lowered, Native, Plan, PlannedProgram, find_native
from prejit.compiler.pipeline.result_keys import native_key
from prejit.compiler.pipeline.target_tools import (
    TargetKernels,
    TargetTools,
    bind_libraries,
    find_toolchain,
    kernels_of,
)
from prejit.compiler.progress import Progress
from prejit.compiler.store.build_cache_key import Key, nearest, why
from prejit.compiler.store.store_interface import Store
from prejit.compiler.targets.target_classes import Target
from prejit.runtime.errors import PrejitError

_log = logging.getLogger(__name__)

CACHED = "cached"
COMPILE = "compile"
TRACED = "traced at build"
"""The state of changed code of the user: only tracing it shows whether its executable is in the store."""


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


def choose_source(
    manifest: Manifest,
    spec: ProgramSpec,
    lowered: Lowered,
    kernels: TargetKernels | None,
    native: Callable[[Mapping[Product, str]], Native],
) -> Source:
    """Return what a program is compiled from for a target: with kernels, if it has a use for them.

    `native` returns the program with kernels, with other forms for the given products.
    """
    portable = Source(lowered.portable.raw_digest, lowered.platforms)
    if kernels is None or not calls_kernels(manifest, spec):
        return portable
    program = native({})
    if not program.calls:
        return portable
    choices = map(kernels.choose, (product for product, _ in program.products))
    # The last form of a product is the kernel, if it has one.
    differing = {c.product: c.form for c in choices if c.form != c.product.forms[-1]}
    if differing:
        program = native(differing)
    return Source(program.program, ("cpu",), kernels.library)


def job_of(
    plan: Plan, spec: ProgramSpec, source: Source, tools: TargetTools, store: Store
) -> CompileJob:
    """Return the job that makes the executable of a program for a target, with the user's libraries."""
    manifest, target = plan.manifest, tools.toolchain.target
    source = bind_libraries(plan.libraries, manifest.where, spec, source, target, store)
    name = f"{manifest.bundle.name}/{target.name}/{spec.name}"
    key = executable_key(name, tools.toolchain, source)
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


@dataclass(frozen=True)
class Submitted:
    """A program that the executor compiles, or has compiled, for one target.

    Attributes:
        lowered: its portable form.
        job: what the executor compiles.
        future: gets the result.
        new: whether it is compiled for this manifest: no store had it, and no other program has its key.
    """

    spec: ProgramSpec
    lowered: Lowered
    job: CompileJob
    future: Future[Compiled]
    new: bool

    @property
    def compiled(self) -> Compiled:
        """The result, once there is one."""
        return self.future.result()


@dataclass(frozen=True)
class CompiledTarget:
    """All executables of a target, one for each program in the order of the plan, and what compiled them."""

    tools: TargetTools
    executables: tuple[Submitted, ...]

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
        """The results of the compiler, by program."""
        return {each.spec.name: each.compiled for each in self.executables}


@final
class Jobs:
    """The jobs of a build, or of several builds at the same time. The executor gets each key once.

    Equal programs of other buckets, targets and manifests wait for its result and take no worker meanwhile.
    Any thread may submit.
    """

    def __init__(
        self, executor: Executor, store: Store, progress: Progress, *, several: bool = False
    ) -> None:
        """Submit nothing yet. If several manifests are built, messages name the bundle of a program."""
        self._executor = executor
        self._store = store
        self._progress = progress
        self._several = several
        self._lock = threading.Lock()
        self._first: dict[str, tuple[CompileJob, Future[Compiled]]] = {}
        self._stored: dict[str, Compiled | None] = {}  # by digest of the key

    def lacks_program(self, job: CompileJob) -> bool:
        """Return whether a job has to be compiled, and what it is compiled from is lost or damaged.

        Only a program that is compiled is read: a build that changes nothing reads none.
        """
        if job.key.digest in self._first or self._find(job) is not None:
            return False
        return self._store.read_blob(job.source.program) is None

    def submit(self, bundle: str, job: CompileJob) -> tuple[Future[Compiled], bool]:
        """Take a job of a bundle.

        Returns:
            Its result, and whether it is compiled for this job.
        """
        if self._several:
            job = replace(job, program=f"{bundle}/{job.program}")
        future: Future[Compiled] = Future()
        with self._lock:
            first, awaited = self._first.setdefault(job.key.digest, (job, future))
        if awaited is not future:
            _log.info("%s for %s: equals %s", job.program, job.target.name, first.program)
            self._progress.add()
            awaited.add_done_callback(partial(self._follow, first, job, future))
            return future, False
        try:
            if (stored := self._find(job)) is not None:
                _log.info("%s for %s: cached", job.program, job.target.name)
                self._progress.add()
                self._progress.cached()
                future.set_result(stored)
                return future, False
            if _log.isEnabledFor(logging.INFO):
                why = why_made(job.key, self._store)
                _log.info("%s for %s: compiles: %s", job.program, job.target.name, why)
            found = self._executor.submit(job)
        except BaseException as error:
            future.set_exception(error)  # nobody waits for ever
            raise
        new = not found.done()
        found.add_done_callback(partial(pass_on, future))
        return future, new

    def wait(self) -> None:
        """Wait until nothing is compiled: who measures needs a quiet machine."""
        with self._lock:
            futures = [future for _, future in self._first.values()]
        wait(futures)

    def _find(self, job: CompileJob) -> Compiled | None:
        """Return a result from the store, which is read once."""
        digest = job.key.digest
        if digest not in self._stored:
            self._stored[digest] = find_compiled(self._store, job.key)
        return self._stored[digest]

    def _follow(
        self,
        first: CompileJob,
        job: CompileJob,
        future: Future[Compiled],
        awaited: Future[Compiled],
    ) -> None:
        error = None if awaited.cancelled() else awaited.exception()
        if isinstance(error, PrejitError):
            names = [f"{each.program} for {each.target.name}" for each in (first, job)]
            reason = str(error).removeprefix(f"{names[0]}: ")
            self._progress.failed(job.program, job.target.name, reason)
            future.set_exception(type(error)(f"{names[1]}: {reason}", hint=error.hint))
            return
        if error is None and not awaited.cancelled():
            self._progress.cached()
        pass_on(future, awaited)


def submit(
    plan: Plan, spec: ProgramSpec, lowered: Lowered, job: CompileJob, jobs: Jobs
) -> Submitted:
    """Hand a program to the executor, which takes it from the store or compiles it."""
    return Submitted(spec, lowered, job, *jobs.submit(plan.manifest.bundle.name, job))


def submit_known(
    plan: Plan, program: PlannedProgram, *, tools: Sequence[TargetTools], store: Store, jobs: Jobs
) -> list[Submitted] | None:
    """Hand a program to the executor for each target, if the store has what it is compiled from.

    Returns:
        None if it has to be lowered, or traced, or is damaged in the store.
    """

    def known(each: TargetTools) -> CompileJob:
        return known_job(plan, program, lambda _: each, store)

    try:
        found = [*map(known, tools)]
    except UnknownError:
        return None
    assert program.lowered is not None
    if any(map(jobs.lacks_program, found)):
        return None
    return [submit(plan, program.spec, program.lowered, job, jobs) for job in found]


def compiled_targets(
    submitted: Sequence[Submitted], tools: Iterable[TargetTools]
) -> tuple[CompiledTarget, ...]:
    """Wait until all programs are compiled, and return them by target.

    Raises:
        BuildError: programs did not compile; one line or more for each. The others are in the store.
        StoreError: the store cannot be written.
    """
    collect({(each.spec.name, each.job.target.name): each.future for each in submitted})
    return tuple(
        CompiledTarget(one, tuple(each for each in submitted if each.job.target.name == one.name))
        for one in tools
    )
