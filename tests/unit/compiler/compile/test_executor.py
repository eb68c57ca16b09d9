"""Jobs and results without a process or a directory: a store in memory, an executor in this thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from prejit.compiler.compile.executor import Executor, collect, compile_once, find_compiled
from prejit.compiler.compile.jobs import Compiled, CompileJob, Source
from prejit.compiler.progress import Quiet
from prejit.compiler.store.cached_files import BlobWriter
from prejit.compiler.store.interface import Store
from prejit.compiler.store.key import SEALED, Key
from prejit.compiler.targets.target_table import target
from prejit.compiler.targets.toolchain import host_toolchain
from prejit.runtime.base.files import digest_of
from prejit.runtime.errors import BuildError, StoreError
from prejit.runtime.format.bundle_schema import Memory, Segment

TOOLCHAIN = host_toolchain(target("cpu-host"), {"jax": "0.12.0", "jaxlib": "0.12.0"})
Compile = Callable[[CompileJob], Compiled | None]


class MemoryStore:
    """The whole of `Store`, in dictionaries."""

    root = Path("/nonexistent")

    def __init__(self) -> None:
        self.results: dict[Key, Mapping[str, Any]] = {}
        self.blobs: dict[str, bytes] = {}
        self.makers: dict[str, threading.Lock] = {}

    def get(self, key: Key, *, verify: bool = False) -> Mapping[str, Any] | None:
        return self.results.get(key)

    def put(self, key: Key, result: Mapping[str, Any], *, blobs: Iterable[str] = ()) -> None:
        if missing := set(blobs) - self.blobs.keys():
            raise StoreError(f"expected blobs {missing}")
        self.results[key] = result

    @contextmanager
    def making(self, key: Key, *, give_up: Callable[[], bool] = lambda: False) -> Iterator[bool]:
        lock = self.makers.setdefault(key.digest, threading.Lock())
        while not (held := lock.acquire(timeout=0.01)) and not give_up():
            pass
        try:
            yield held
        finally:
            if held:
                lock.release()

    def last_result(self, kind: str, name: str) -> Mapping[str, Any] | None:
        keys = self.last_keys(kind, name)
        return self.results[keys[0]] if keys else None

    def last_keys(self, kind: str, name: str) -> tuple[Key, ...]:
        return tuple(key for key in self.results if (key.kind, key.name) == (kind, name))[-1:]

    def seal(self, text: str) -> str:
        return f"{SEALED}{text}"

    def put_blob(self, content: bytes) -> str:
        self.blobs[digest_of(content)] = content
        return digest_of(content)

    def blob_writer(self) -> BlobWriter:
        raise NotImplementedError

    def read_blob(self, digest: str) -> bytes | None:
        return self.blobs.get(digest)

    def blob_path(self, digest: str) -> Path | None:
        return None


class InlineExecutor:
    """An executor that compiles a job when it is submitted."""

    lowering_processes = 0

    def __init__(self, store: Store, compile_job: Compile) -> None:
        self.store, self.compile_job = store, compile_job
        self.compiled = frozenset[str]()

    def submit(self, job: CompileJob) -> Future[Compiled]:
        future: Future[Compiled] = Future()
        try:
            result, compiled = once(self.store, job, self.compile_job)
        except BuildError as error:
            future.set_exception(BuildError(f"{job.program}: {error}", hint=error.hint))
        else:
            assert result is not None
            if compiled:
                self.compiled |= {job.key.digest}
            future.set_result(result)
        return future

    def close(self) -> None:
        pass

    def __enter__(self) -> InlineExecutor:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def once(
    store: Store, job: CompileJob, compile_job: Compile, give_up: bool = False
) -> tuple[Compiled | None, bool]:
    return compile_once(store, job, compile_job, progress=Quiet(), give_up=lambda: give_up)


def job(program: str) -> CompileJob:
    key = Key("compile", program, (("program", program),))
    return CompileJob(program, TOOLCHAIN, Source(digest_of(program.encode()), ()), key)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def compile_job(store: MemoryStore) -> Compile:
    """Compiles a program to its own name; `bad...` does not compile."""

    def compile_job(job: CompileJob) -> Compiled:
        if job.program.startswith("bad"):
            raise BuildError("no such operation", hint=f"mend {job.program}")
        content = job.program.encode()
        digest = store.put_blob(content)
        segment = Segment(0, len(content), digest, len(content), digest)
        return Compiled(segment, ("avx2",), Memory(1, 2, 3, 4), 5, 5, 1 << 20)

    return compile_job


def run(executor: Executor, *programs: str) -> dict[tuple[str, str], Compiled]:
    return collect({(name, "cpu-host"): executor.submit(job(name)) for name in programs})


def test_a_result_is_compiled_once_and_then_comes_from_the_store(
    store: MemoryStore, compile_job: Compile
) -> None:
    with InlineExecutor(store, compile_job) as executor:
        first = run(executor, "b", "a")
        assert list(first) == [("b", "cpu-host"), ("a", "cpu-host")], "in the order of the jobs"
        assert run(executor, "b", "a") == first
        assert len(executor.compiled) == 2
    assert find_compiled(store, job("a").key) == first["a", "cpu-host"]
    assert store.last_keys("compile", "a") == (job("a").key,)


def test_a_failure_names_every_program_and_the_others_stay_in_the_store(
    store: MemoryStore, compile_job: Compile
) -> None:
    with pytest.raises(BuildError) as caught:
        run(InlineExecutor(store, compile_job), "bad2", "good", "bad1")
    assert str(caught.value) == (
        "2 of 3 programs did not compile\n  bad1: no such operation\n  bad2: no such operation"
    )
    assert caught.value.hint == "mend bad1; mend bad2; 1 finished and stay cached"
    assert list(store.results) == [job("good").key]


def test_what_another_build_compiles_is_waited_for_and_not_compiled_again(
    store: MemoryStore, compile_job: Compile
) -> None:
    one = job("a")
    outcome: list[tuple[Compiled | None, bool]] = []
    with store.making(one.key):
        waiting = threading.Thread(
            target=lambda: outcome.append(once(store, one, lambda _: pytest.fail("compiled again")))
        )
        waiting.start()
        waiting.join(timeout=0.1)
        assert waiting.is_alive(), "it waits"
        compiled = compile_job(one)
        assert compiled is not None
        store.put(one.key, compiled.to_plain())
    waiting.join()
    assert outcome == [(compiled, False)]


def test_a_job_that_is_given_up_is_neither_compiled_nor_stored(
    store: MemoryStore, compile_job: Compile
) -> None:
    one = job("a")
    with store.making(one.key):
        assert once(store, one, compile_job, give_up=True) == (None, False)
    assert once(store, one, lambda _: None) == (None, True)
    assert store.results == {}
