"""An executor that compiles on a Ray cluster.

    caller's threads    submit: the store's answer, or a job for the coordinator
    one thread a job    holds the right to make its result, sends its inputs, fetches and stores the result
    the coordinator     asks the Schedule what to do and does it: the only thread that talks to Ray

The right (`Store.making`) is the same that builds on one machine use, so a cluster and a worker pool that
share a store compile nothing twice. A job has its thread only while it is in the schedule's window.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import final

from prejit.compiler.base.process_errors import error_of
from prejit.compiler.cluster.connection import Ended, RayConnection, Size, check_address
from prejit.compiler.cluster.node import (
    Order,
    bring,
    counted_variables,
    inputs_of,
    open_exchange,
    own_cpu,
    send,
)
from prejit.compiler.compile.compile_jobs import Compiled, CompileJob, compile_once
from prejit.compiler.compile.executor import begin, give_error, give_result, need_of, pass_on
from prejit.compiler.compile.pool import WorkerPool, default_workers
from prejit.compiler.compile.schedule import Cancel, GiveUp, Loss, Need, Schedule, Start
from prejit.compiler.compile.worker_process import JOB_SECONDS
from prejit.compiler.progress import Progress, Quiet
from prejit.compiler.sharing.sharing_settings import written_address
from prejit.compiler.store.directory_store import DirectoryStore
from prejit.compiler.store.store_interface import Store
from prejit.compiler.targets import environments
from prejit.runtime.base.typed_json import from_plain
from prejit.runtime.errors import BuildError, UsageError
from prejit.runtime.machine.fingerprint import read_xla_flags

_TICK_SECONDS = 0.1
"""How long the coordinator waits for news at a time."""
_SIZE_SECONDS = 2.0
"""Interval at which it looks how large the cluster is."""
_PATIENCE_SECONDS = 30.0
"""Time without any core after which it says so."""


class _OtherCpuError(Exception):
    """A node has another CPU than the build's machine, and the code would depend on it."""


class _Task:
    """A job on its way: what the coordinator knows of it."""

    def __init__(self, job: CompileJob, future: Future[Compiled], need: Need) -> None:
        self.job, self.future, self.need = job, future, need
        self.answer: Future[Compiled] = Future()
        self.orders: list[tuple[int, Need]] = []  # attempts that wait until its inputs are sent
        self.keeper: threading.Thread | None = None
        self.is_prepared = self.is_shown = False

    def show(self, progress: Progress, node: str) -> None:
        self.is_shown = True
        progress.started(self.job.program, self.job.target.name, node)


@final
class ClusterExecutor:
    """An `Executor` whose jobs run on a Ray cluster.

    Where a compiler takes the features of its own CPU (`cpu-host`, and all CPU targets of jaxlib before
    0.11), only nodes with this machine's CPU compile; as soon as another one is met, this machine does.
    """

    def __init__(
        self,
        address: str,
        store: Store,
        *,
        shared: str | None = None,
        workers: int | None = None,
        progress: Progress | None = None,
        timeout_seconds: float = JOB_SECONDS,
    ) -> None:
        """Connect to nothing yet: a build that compiles nothing needs no cluster.

        Args:
            address: `ray://HOST:PORT` or `ray://auto`.
            store: the build's store.
            shared: the shared store that the build was given; None: `PREJIT_STORE`.
            workers: number of worker processes on this machine, for its own CPU; None: by cores and memory.
            progress: shows each job.
            timeout_seconds: time limit of one attempt.

        Raises:
            UsageError: the address is none, Ray is not installed, or the shared store is only read.
        """
        check_address(address)
        self._address = address
        self._exchange = written_address(shared)
        self._store = store
        self._workers = workers
        self._contents = DirectoryStore(store.root)
        self._remote = None if self._exchange is None else open_exchange(self._exchange)
        self._progress = progress or Quiet()
        self._timeout_seconds = timeout_seconds
        self._here = WorkerPool(
            store, workers=workers, progress=progress, timeout_seconds=timeout_seconds
        )
        self._lock = threading.Lock()  # guards what submitting threads share
        self._connection: RayConnection | None = None
        self._coordinator: threading.Thread | None = None
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._compiled: set[str] = set()  # digests of keys
        self._submitted = 0
        self._other = ""  # a node with another CPU than this machine
        self._failure: Exception | None = None  # why no job is taken any more
        # The rest belongs to the coordinator.
        self._schedule = Schedule(slots=0)
        self._tasks: dict[str, _Task] = {}
        self._size = Size(0, 0, 0, frozenset())
        self._attempts: dict[int, str] = {}

    @property
    def compiled(self) -> frozenset[str]:
        """See `Executor.compiled`."""
        with self._lock:
            return self._here.compiled.union(self._compiled)

    @property
    def lowering_processes(self) -> int:
        """See `Executor.lowering_processes`. This machine's cores are free while the cluster compiles."""
        return self._workers or default_workers()

    def submit(self, job: CompileJob) -> Future[Compiled]:
        """See `Executor.submit`.

        Raises:
            NetworkError: no cluster answers.
            UsageError: the cluster has other machines, and there is no shared store.
        """
        if _needs_own_cpu(job) and self._other:
            return self._here.submit(job)
        future = begin(self._store, self._progress, job)
        if future.done():
            return future
        task = _Task(job, future, need_of(self._store, job))
        with self._lock:
            if self._coordinator is None:
                self._begin()
            if self._failure is not None:
                future.set_exception(self._failure)
                return future
            self._submitted += 1
            self._calls.put(partial(self._add, f"{self._submitted}", task))
        return future

    def close(self) -> None:
        """See `Executor.close`."""
        self._closed.set()
        if self._coordinator is not None:
            self._calls.put(lambda: None)
            self._coordinator.join()
        self._here.close()

    def __enter__(self) -> ClusterExecutor:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _begin(self) -> None:
        with self._progress.phase(f"connecting to {self._address}"):
            connection = RayConnection(self._address)
        try:
            found = connection.size()
            if self._remote is None and not found.addresses <= _own_addresses():
                others = ", ".join(sorted(found.addresses - _own_addresses())[:3])
                raise UsageError(
                    f"executor {self._address}: expected a shared store, because the cluster has other "
                    f"machines ({others}), found none",
                    hint="give one that all nodes reach: --store URL",
                )
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        self._size = found
        self._schedule.resize(found.cores)
        self._coordinator = threading.Thread(target=self._coordinate, name="cluster", daemon=True)
        self._coordinator.start()

    # ------------------------------------------------------------------ the coordinator

    def _coordinate(self) -> None:
        connection = self._connection
        assert connection is not None
        sized = idle_since = time.monotonic()
        is_reported = False
        try:
            while not self._closed.is_set():
                self._take_calls(wait=not self._attempts)
                for answer in connection.wait(_TICK_SECONDS):
                    self._take(answer)
                for attempt, node in connection.begun():
                    self._show(attempt, node)
                now = time.monotonic()
                if now - sized > _SIZE_SECONDS:
                    sized = now
                    self._size = connection.size()
                    cores = self._size.cores
                    self._schedule.resize(cores)
                    idle_since = now if cores or not self._attempts else idle_since
                    if now - idle_since > _PATIENCE_SECONDS and not is_reported:
                        is_reported = True
                        self._progress.note(f"{self._address}: waiting for nodes with CPUs")
                self._decide(connection)
        except Exception as error:
            # Any error: a thread that ended here would leave futures waiting for ever.
            self._fail_all(error)
        finally:
            self._closed.set()
            self._refuse(CancelledError())
            for task in self._tasks.values():
                if task.keeper is None:
                    task.future.cancel()
                task.answer.cancel()
            with suppress(Exception):
                connection.close()
            for task in self._tasks.values():
                if task.keeper is not None:
                    task.keeper.join()
            self._take_calls(wait=False)

    def _take_calls(self, *, wait: bool) -> None:
        """Run what other threads ask for."""
        with suppress(queue.Empty):
            while True:
                call = self._calls.get(timeout=_TICK_SECONDS) if wait else self._calls.get_nowait()
                wait = False
                call()

    def _add(self, name: str, task: _Task) -> None:
        self._tasks[name] = task
        if self._closed.is_set():
            task.future.cancel()
            return
        self._schedule.add(name, task.need)

    def _decide(self, connection: RayConnection) -> None:
        for decision in self._schedule.decide(time.monotonic()):
            match decision:
                case Start(attempt, name, need):
                    self._attempts[attempt] = name
                    self._tasks[name].orders.append((attempt, need))
                    self._start(connection, name)
                case Cancel(attempt):
                    self._attempts.pop(attempt, None)
                    connection.cancel(attempt)
                case GiveUp(name, reason, losses):
                    self._give_up(self._tasks[name], reason, losses)

    def _start(self, connection: RayConnection, name: str) -> None:
        """Send the attempts at a job that wait, once its inputs are sent."""
        task = self._tasks[name]
        if task.is_prepared:
            for attempt, need in task.orders:
                if attempt in self._attempts:
                    self._send(connection, task, attempt, need)
            task.orders.clear()
        elif task.keeper is None:
            keep = partial(self._keep, name, task)
            task.keeper = threading.Thread(target=keep, name="keep", daemon=True)
            task.keeper.start()

    def _prepared(self, name: str) -> None:
        assert self._connection is not None
        self._tasks[name].is_prepared = True
        self._start(self._connection, name)

    def _send(self, connection: RayConnection, task: _Task, attempt: int, need: Need) -> None:
        if self._closed.is_set():
            return
        size, job = self._size, task.job
        if size.node_bytes:  # Ray would wait for ever for a node that can do more
            need = replace(
                need,
                bytes=min(need.bytes, size.node_bytes),
                cores=min(need.cores, max(1, size.node_cores)),
            )
        here = self._remote is None
        order = Order(
            attempt=attempt,
            target=job.target,
            versions=job.toolchain.versions,
            cpus=job.toolchain.cpus,
            tuned=job.toolchain.tuned,
            host=own_cpu() if _needs_own_cpu(job) else None,
            source=job.source,
            variables=counted_variables(os.environ) | {"XLA_FLAGS": read_xla_flags(os.environ)},
            store=self._exchange,
            root=str(self._store.root) if here else None,
            environments=str(environments.root().parent) if here else None,
            timeout_seconds=self._timeout_seconds,
        )
        connection.start(order, need)

    def _show(self, attempt: int, node: str) -> None:
        self._schedule.began(attempt, time.monotonic(), node)
        if (name := self._attempts.get(attempt)) is None:
            return
        if (task := self._tasks[name]).is_shown:
            self._progress.note(f"{task.job.program} takes long: a second attempt runs on {node}")
        task.show(self._progress, node)

    def _take(self, answer: Ended) -> None:
        if (name := self._attempts.pop(answer.attempt, None)) is None:
            return
        task, now = self._tasks[name], time.monotonic()
        body = answer.body or {}
        loss = Loss.MEMORY if "killed" in body else answer.loss
        if loss is not None:
            self._progress.note(f"{task.job.program} for {task.job.target.name}: {loss.value}")
            task.is_shown = False
            self._schedule.lost(answer.attempt, loss)
            return
        if not self._schedule.finished(answer.attempt, now):
            return
        if answer.failure is not None:
            task.answer.set_exception(answer.failure)
        elif "other" in body:
            if not self._other:
                self._other = body["other"]
                self._progress.note(
                    f"{self._other} has another CPU: programs for {task.job.target.name} are compiled here"
                )
            task.answer.set_exception(_OtherCpuError())
        elif "error" in body:
            task.answer.set_exception(error_of(body["error"]))
        else:
            if not task.is_shown:  # Ray's message about the beginning can come after the result
                task.show(self._progress, body["node"])
            task.answer.set_result(from_plain(Compiled, body["result"]))

    def _give_up(self, task: _Task, reason: str, losses: tuple[Loss, ...]) -> None:
        hints = {
            Loss.MEMORY: "no node may have enough memory for it",
            Loss.WORKER: "XLA or Ray crashed: compile it on this machine to see why (--executor local)",
        }
        hint = next((text for loss, text in hints.items() if loss in losses), None)
        task.answer.set_exception(BuildError(reason, hint=hint))

    def _fail_all(self, error: Exception) -> None:
        failure = BuildError(
            f"executor {self._address}: the cluster does not answer any more: {error}"
        )
        self._refuse(failure)
        for task in self._tasks.values():
            if not task.answer.done():
                task.answer.set_exception(failure)
            if task.keeper is None and not task.future.done():
                task.future.set_exception(failure)

    def _refuse(self, failure: Exception) -> None:
        """Take no job any more but those that were submitted before."""
        with self._lock:
            self._failure = self._failure or failure
        self._take_calls(wait=False)

    # ------------------------------------------------------------------ the thread of a job

    def _keep(self, name: str, task: _Task) -> None:
        """Hold the right to make a job's result until it is stored."""
        job, future = task.job, task.future
        future.set_running_or_notify_cancel()

        def compile_job(job: CompileJob) -> Compiled | None:
            if self._remote is not None:
                send(self._remote, self._contents, *inputs_of(job.source))
            self._calls.put(partial(self._prepared, name))
            try:
                compiled = task.answer.result()
            except CancelledError:
                return None
            if self._remote is not None:
                bring(self._remote, self._contents, compiled.executable.digest)
            return compiled

        try:
            outcome, is_new = compile_once(
                self._store, job, compile_job, progress=self._progress, give_up=self._closed.is_set
            )
        except _OtherCpuError:
            self._progress.add(-1)  # the pool counts it again
            self._here.submit(job).add_done_callback(partial(pass_on, future))
        except Exception as error:
            give_error(self._progress, job, future, error)
        else:
            if outcome is None:
                future.set_exception(self._failure or CancelledError())
                return
            if is_new:
                with self._lock:
                    self._compiled.add(job.key.digest)
            give_result(self._progress, job, future, outcome, is_new=is_new)
        finally:
            self._calls.put(partial(self._forget, name))

    def _forget(self, name: str) -> None:
        self._schedule.drop(name)  # another build compiled it, or its inputs cannot be sent
        self._tasks.pop(name, None)


def _needs_own_cpu(job: CompileJob) -> bool:
    return job.target.platform == "cpu" and not job.toolchain.is_exact


def _own_addresses() -> frozenset[str]:
    found = {"127.0.0.1", "localhost", "::1"}
    with suppress(OSError):
        found.update(str(each[4][0]) for each in socket.getaddrinfo(socket.gethostname(), None))
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outward:
        outward.connect(("192.0.2.1", 9))  # sends nothing: it asks the kernel for the way
        found.add(outward.getsockname()[0])
    return frozenset(found)
