"""An executor whose futures a test completes: nothing is compiled."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from prejit.compiler.compile.compile_jobs import Compiled, CompileJob


class HeldExecutor:
    """Takes jobs. `answer`, if there is one, is called with each and its future, and may raise."""

    compiled = frozenset[str]()
    lowering_processes = 0

    def __init__(
        self, answer: Callable[[CompileJob, Future[Compiled]], object] | None = None
    ) -> None:
        self.answer = answer
        self.taken: list[tuple[CompileJob, Future[Compiled]]] = []
        self.closed = False

    def submit(self, job: CompileJob) -> Future[Compiled]:
        future: Future[Compiled] = Future()
        if self.answer is not None:
            self.answer(job, future)
        self.taken.append((job, future))
        return future

    def close(self) -> None:
        self.closed = True
        for _, future in self.taken:
            future.cancel()

    def __enter__(self) -> HeldExecutor:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()
