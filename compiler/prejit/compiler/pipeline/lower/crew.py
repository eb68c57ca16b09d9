"""Processes that lower the programs of one build, side by side.

They fill the store; the build then finds there what it would have lowered itself. A process that ends early
loses nothing but its unit: another process gets it, and after a second loss the build's own process.

`lowerer_child` runs in such a process. A message is a line of JSON:

    Project                                what to read; the first request, which has no answer of its own
    Work                                   a unit to lower
    {"lowered": ...}                       a Done
    {"declined": why}                      the process does not find what the build has: it lowers nothing
    {"error": {code, message, hint}}       an error of the user, in place of the other answers
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any, final

from prejit.compiler.base.process_errors import error_of
from prejit.compiler.compile.executor import Executor
from prejit.compiler.manifest.manifest import Manifest
from prejit.compiler.pipeline.plan import (
    Lowered,
    Plan,
    PlannedProgram,
    PlanOptions,
    find_lowered,
)
from prejit.compiler.pipeline.result_keys import own_lower_key
from prejit.compiler.progress import Progress
from prejit.compiler.store.build_cache_key import Key
from prejit.compiler.store.store_interface import Store
from prejit.runtime.base.child_process import Child, ending
from prejit.runtime.base.files import digest_of
from prejit.runtime.base.typed_json import from_plain

_COMMAND = (sys.executable, "-P", "-m", "prejit.compiler.pipeline.lower.lowerer_child")
_TRIES = 2
"""Number of processes that may end while they lower the same unit."""
Unit = tuple[PlannedProgram, ...]
"""Programs that one process lowers in a row. All are of one section."""

_PROCESS_SECONDS = 3.0
"""CPU time of lowering that makes another process worth its start, which takes 1.5 s."""
_SECONDS = {"call": 0.1, "copy": 0.1, "draft-copy": 0.1, "embed": 0.1, "pool": 0.1}
"""Estimated CPU time of lowering by kind of program: small ones."""
_MODEL_SECONDS = 1.0
"""Estimated CPU time of lowering any other program of a model."""
_LEAST, _MOST = 4, 16
"""Numbers of programs of code of the user in a unit: for each unit one of them is traced a second time."""


@dataclass(frozen=True)
class Project:
    """The input with which a process plans as its build does.

    Attributes:
        manifest: path of the manifest.
        content: digest of what the build has read there, as `manifest_digest` gives it.
        root: directory of the store.
        namespace: separates its results from those of others in the same directory.
        path: `sys.path` of the build.
    """

    manifest: str
    content: str
    options: PlanOptions
    root: str
    namespace: str
    path: tuple[str, ...]


def manifest_digest(manifest: Manifest) -> str:
    """Return a digest of a manifest that was read from a file."""
    return digest_of(repr(manifest).encode())


@dataclass(frozen=True)
class Work:
    """A unit of programs to lower.

    Attributes:
        programs: by name, the portable form of those that have one; None: it is to be made.
        chosen: whether programs with kernels get the forms of products that tables choose now; false: all
            products stay with their kernels, because forms are measured first.
    """

    programs: dict[str, Lowered | None]
    chosen: bool


@dataclass(frozen=True)
class Done:
    """A unit of programs that was lowered. Contents are in the store.

    Attributes:
        programs: the portable forms by name.
        parameters: those of the unit's function, as `content_of` describes them.
        keys: the keys of the results that were put into the store.
        notes: lines for the user.
    """

    programs: dict[str, Lowered]
    parameters: dict[str, str]
    keys: tuple[Key, ...]
    notes: tuple[str, ...] = ()


class ProcessEndedError(Exception):
    """A process ended without an answer; the text says how, as the rest of a sentence about it."""


class DeclinedError(Exception):
    """A process does not find what its build has; the text says why."""


def start_process(project: Project) -> Child:
    """Start a process that lowers programs of a project. Its stderr is the build's.

    It begins to read the manifest, the model and the user's code.
    """
    process = Child(_COMMAND)
    process.send(asdict(project))
    return process


def ask(process: Child, work: Work) -> Done:
    """Let a process lower a unit of programs.

    Raises:
        PrejitError: the manifest, the model or the user's code has a mistake.
        DeclinedError: the manifest is another one than the build's.
        ProcessEndedError: the process has ended.
    """
    answer: dict[str, Any] | None = process.ask(asdict(work))
    if answer is None:
        raise ProcessEndedError(ending(process.exit_code()))
    if "error" in answer:
        raise error_of(answer["error"])
    if "declined" in answer:
        raise DeclinedError(answer["declined"])
    return from_plain(Done, answer["lowered"])


def open_crew(
    plan: Plan, options: PlanOptions, executor: Executor, store: Store, progress: Progress
) -> Crew | None:
    """Start processes that lower the programs of a plan; None: the build's process lowers them as fast."""
    new = [each for each in plan.programs if each.lowered is None]
    if plan.manifest.path is None or not new:
        return None
    if not (count := process_count(new, executor.lowering_processes)):
        return None
    project = Project(
        str(plan.manifest.path),
        manifest_digest(plan.manifest),
        options,
        str(store.root),
        store.namespace,
        tuple(sys.path),
    )
    return Crew(project, count, store, progress)


def process_count(programs: Sequence[PlannedProgram], limit: int) -> int:
    """Return how many processes lower programs, up to a limit; 0: the build's process does it as fast."""
    if any(each.key is None and each.trace is None for each in programs):
        return 0  # no other process has an object of Python
    seconds = sum(_SECONDS.get(each.spec.kind, _MODEL_SECONDS) for each in programs)
    count = min(limit, int(seconds / _PROCESS_SECONDS), len(split(programs, limit)))
    return count if count > 1 else 0


def split(programs: Sequence[PlannedProgram], processes: int) -> list[Unit]:
    """Return units that processes lower in any order, so that no two do the same work.

    Programs of a published model are units of their own, because several builds lower each once. The user's
    code is imported and observed by section, and a section with many buckets is several units.
    """

    def section(program: PlannedProgram) -> str | None:  # None: it is of a published model
        return None if program.trace is None else program.spec.section

    units: list[Unit] = []
    size = min(_MOST, max(_LEAST, len(programs) // (4 * max(1, processes))))
    for traced, found in groupby(programs, key=section):
        of_section = tuple(found)
        step = 1 if traced is None else size
        units += [of_section[at : at + step] for at in range(0, len(of_section), step)]
    return units


@final
class Crew:
    """Processes that lower. A context manager, which ends them."""

    def __init__(self, project: Project, count: int, store: Store, progress: Progress) -> None:
        """Start the processes; each begins to read the manifest and the user's code."""
        self._project = project
        self._count = count
        self._store = store
        self._progress = progress
        self._lock = threading.Lock()  # guards what follows
        self._closed = False
        self._processes: set[Child] = set()
        self._declined = False
        self._threads = ThreadPoolExecutor(count, "lower")
        # None: the thread that takes it starts a process.
        self._idle: queue.SimpleQueue[Child | None] = queue.SimpleQueue()
        for _ in range(count):
            self._idle.put(self._start())

    def lower(
        self,
        plan: Plan,
        programs: Sequence[PlannedProgram],
        then: Callable[[PlannedProgram], bool] | None,
        *,
        chosen: bool,
    ) -> dict[str, PlannedProgram]:
        """Lower programs, and call a function with each as soon as it is lowered.

        `then` is called in any thread, and returns whether it needs no more of a program.

        Returns:
            The lowered programs by name. The build's process has to lower the others.
        """
        work = partial(self._lower, plan, then=then, chosen=chosen)
        futures = [self._threads.submit(work, unit) for unit in split(programs, self._count)]
        found: dict[str, PlannedProgram] = {}
        for future in futures:
            found |= {each.spec.name: each for each in future.result()}
        return found

    def close(self) -> None:
        """End all processes, and forget what they have not begun."""
        with self._lock:
            self._closed = True
            processes = [*self._processes]
        for each in processes:
            each.kill()
        self._threads.shutdown(cancel_futures=True)
        for each in processes:
            each.release()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _lower(
        self, plan: Plan, unit: Unit, *, then: Callable[[PlannedProgram], bool] | None, chosen: bool
    ) -> Sequence[PlannedProgram]:
        """Lower a unit in a process, in a thread that waits for it. Returns its programs, or none."""
        label = f"lowering {unit[0].spec.name}"
        if len(unit) > 1:
            label += f" to {unit[-1].spec.name}"
        keys = sorted(
            (each.key for each in unit if each.key is not None and each.lowered is None),
            key=lambda key: key.digest,
        )
        with ExitStack() as stack:
            stack.enter_context(self._progress.phase(label))
            for key in keys:  # several builds that need the same program lower it once
                making = self._store.making(key, give_up=lambda: self._closed)
                if not stack.enter_context(making):
                    raise CancelledError
            known = {each.spec.name: self._known(each) for each in unit}
            if keys and then is not None and all(map(then, known.values())):
                return [*known.values()]  # another build has lowered them meanwhile
            done = self._ask(label, Work({n: e.lowered for n, e in known.items()}, chosen))
            if done is None:
                return ()
            for line in done.notes:
                self._progress.note(line)
            for key in done.keys:  # so that a shared store gets what it lacks
                self._store.get(key)
        lowered = [_with_result(plan, each, done) for each in known.values()]
        if then is not None:
            for each in lowered:
                then(each)
        return lowered

    def _known(self, program: PlannedProgram) -> PlannedProgram:
        """Return a program with its portable form, where another build has lowered it meanwhile."""
        if program.lowered is not None or program.key is None:
            return program
        return replace(program, lowered=find_lowered(program.key, self._store))

    def _ask(self, label: str, work: Work) -> Done | None:
        """Return what a process answers; None: the build's process has to do it."""
        for _ in range(_TRIES):
            process = self._idle.get()
            try:
                if self._declined:
                    return None
                process = process or self._start()
                if process is not None:
                    return ask(process, work)
            except DeclinedError as error:
                self._decline(str(error))
                return None
            except ProcessEndedError as error:
                if self._closed:
                    raise CancelledError from error
                assert process is not None
                process.release()
                process = None
                self._progress.note(f"{label}: its process {error}")
            finally:
                self._idle.put(process)
        self._progress.note(f"{label} in the process of the build")
        return None

    def _start(self) -> Child | None:
        """Start a process; None: this machine has no room for it."""
        with self._lock:  # `close` either sees the process or prevents it
            if self._closed:
                raise CancelledError
            with suppress(OSError):
                process = start_process(self._project)
                self._processes.add(process)
                return process
        return None

    def _decline(self, why: str) -> None:
        with self._lock:
            if self._declined:
                return
            self._declined = True
        self._progress.note(
            f"{self._project.manifest}: programs are lowered in the process of the build: {why}"
        )


def _with_result(plan: Plan, program: PlannedProgram, done: Done) -> PlannedProgram:
    """Return a program as a plan has it that finds its portable form in the store."""
    lowered = done.programs[program.spec.name]
    key, trace = program.key, program.trace
    if trace is not None and program.spec.kind == "call":
        result = {"lowered": asdict(lowered), "parameters": done.parameters}
        trace = replace(trace, result=result)
    elif trace is not None:
        key = own_lower_key(plan.manifest, program.spec, lowered.portable.raw_digest)
    return replace(program, key=key, lowered=lowered, trace=trace)
