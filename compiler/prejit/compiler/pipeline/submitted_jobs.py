"""Compiling: from lowered programs to executables, side by side in worker processes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import final

from prejit.compiler.compile.compile_jobs import Compiled, CompileJob, find_compiled
from prejit.compiler.compile.executor import Executor, collect, pass_on
from prejit.compiler.manifest.specs import ProgramSpec
from prejit.compiler.native.kernel_library import KernelLibrary
from prejit.compiler.pipeline.plan import Lowered, Plan, PlannedProgram
from prejit.compiler.pipeline.planned_executables import (
    TargetTools,
    UnknownError,
    known_job,
    why_made,
)
from prejit.compiler.progress import Progress
from prejit.compiler.store.store_interface import Store
from prejit.runtime.errors import PrejitError

_log = logging.getLogger(__name__)


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
