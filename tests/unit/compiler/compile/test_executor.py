"""Jobs and results without a process: a job is compiled once, and its need is what it took last."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest

from prejit.compiler.compile.compile_jobs import Compiled, CompileJob, Source
from prejit.compiler.compile.executor import (
    WORKER_BYTES,
    collect,
    compile_once,
    need_of,
    size_need,
)
from prejit.compiler.progress import Quiet
from prejit.compiler.store.build_cache_key import Key
from prejit.compiler.store.directory_store import DirectoryStore
from prejit.compiler.targets.target_table import target
from prejit.compiler.targets.toolchain import host_toolchain
from prejit.runtime.errors import BuildError, StoreError
from prejit.runtime.format.bundle_schema import Memory, Segment

TOOLCHAIN = host_toolchain(target("cpu-host"), {"jax": "0.12.0", "jaxlib": "0.12.0"})
Compile = Callable[[CompileJob], Compiled | None]
Outcome = tuple[Compiled | None, bool]


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore.open(tmp_path)


@pytest.fixture
def compile_job(store: DirectoryStore) -> Compile:
    """Compiles a program to its own name."""

    def compile_job(job: CompileJob) -> Compiled:
        content = job.program.encode()
        digest = store.put_blob(content)
        segment = Segment(0, len(content), digest, len(content), digest)
        return Compiled(segment, ("avx2",), Memory(1, 2, 3, 4), 5, 5, 1 << 20)

    return compile_job


def once(
    store: DirectoryStore, job: CompileJob, compile_job: Compile, give_up: bool = False
) -> Outcome:
    return compile_once(store, job, compile_job, progress=Quiet(), give_up=lambda: give_up)


def job(program: str, source: str = "sha256:0") -> CompileJob:
    return CompileJob(program, TOOLCHAIN, Source(source, ()), key_of(program))


def key_of(program: str) -> Key:
    return Key("compile", program, (("program", program),))


def ended(outcome: Compiled | Exception) -> Future[Compiled]:
    future: Future[Compiled] = Future()
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
    return future


def test_a_failure_names_every_program(compile_job: Compile) -> None:
    good = compile_job(job("good"))
    assert good is not None
    futures = {("b", "t"): ended(good), ("a", "t"): ended(good)}
    assert list(collect(futures).items()) == [(("b", "t"), good), (("a", "t"), good)]
    for name in ("bad2", "bad1"):
        futures[name, "t"] = ended(BuildError(f"{name}: no such\noperation", hint=f"mend {name}"))
    with pytest.raises(BuildError) as caught:
        collect(futures)
    assert str(caught.value) == (
        "2 of 4 programs did not compile\n"
        "  bad1: no such\n  operation\n  bad2: no such\n  operation"
    )
    assert caught.value.hint == "mend bad1; mend bad2; 2 finished and stay cached"
    with pytest.raises(StoreError) as full:
        collect({("a", "t"): ended(BuildError("x")), ("b", "t"): ended(StoreError("a full disk"))})
    assert full.value.hint is None


def test_what_another_build_compiles_is_waited_for_and_not_compiled_again(
    store: DirectoryStore, compile_job: Compile
) -> None:
    one, outcome = job("a"), list[Outcome]()
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
    store: DirectoryStore, compile_job: Compile
) -> None:
    one = job("a")
    with store.making(one.key):
        assert once(store, one, compile_job, give_up=True) == (None, False)
    assert once(store, one, lambda _: None) == (None, True)
    assert store.get(one.key) is None


def test_a_program_counts_by_its_last_compile_and_a_new_one_by_its_size(
    store: DirectoryStore,
) -> None:
    """Also when the executable is gone, and not where another prejit wrote the result."""
    new = job("f", store.put_blob(b"x" * 1000))
    assert need_of(store, new) == size_need(1000)
    assert size_need(1 << 20).bytes > size_need(0).bytes
    assert size_need(1 << 20).seconds > size_need(0).seconds
    digest = store.put_blob(b"executable")
    segment = Segment(0, 10, digest, 10, digest)
    result = Compiled(segment, (), Memory(1, 2, 3, 4), 4000, 8000, 100 << 20)
    older = Key("compile", "f", (("program", "an older one"),))
    store.put(older, result.to_plain(), blobs=[digest])
    path = store.blob_path(digest)
    assert path is not None
    path.unlink()
    need = need_of(store, new)
    assert (need.seconds, need.cores) == (4.0, 2)
    assert need.bytes == 125 * (1 << 20) + WORKER_BYTES
    store.put(older, {"seconds": "many"})
    assert need_of(store, new) == size_need(1000)
