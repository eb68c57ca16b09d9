"""Jobs of one build and of several: each key is compiled once, and who waits for an equal one learns all."""

from concurrent.futures import CancelledError

import pytest

from prejit.compiler.compile.compile_jobs import Compiled, CompileJob, Source
from prejit.compiler.pipeline.submitted_jobs import Jobs
from prejit.compiler.progress import Quiet
from prejit.compiler.store.build_cache_key import Key
from prejit.compiler.store.directory_store import DirectoryStore
from prejit.compiler.targets.target_table import target
from prejit.compiler.targets.toolchain import host_toolchain
from prejit.runtime.errors import BuildError, StoreError
from prejit.runtime.format.bundle_schema import Memory, Segment

from .held_executor import HeldExecutor

TOOLCHAIN = host_toolchain(target("cpu-host"), {"jax": "0.12.0", "jaxlib": "0.12.0"})
DIGEST = f"sha256:{'0' * 64}"
RESULT = Compiled(Segment(0, 1, DIGEST, 1, DIGEST), (), Memory(0, 0, 0, 0), 1, 1, 1)


def job(program, content="same"):
    key = Key("compile", program, (("stablehlo", content),))
    return CompileJob(program, TOOLCHAIN, Source(content, ("cpu",)), key)


@pytest.fixture
def held(tmp_path):
    """`held(...)`: a new executor and its jobs, beside one store."""
    store = DirectoryStore.open(tmp_path)

    def held(answer=None, **options):
        executor = HeldExecutor(answer)
        return executor, Jobs(executor, store, Quiet(), **options)

    held.store = store
    return held


def test_equal_programs_take_one_worker_and_each_gets_its_error(held):
    executor, jobs = held()
    first, new = jobs.submit("a", job("f"))
    second, again = jobs.submit("b", job("g"))
    _, other = jobs.submit("b", job("h", "another"))
    assert (new, again, other) == (True, False, True)
    assert [each.program for each, _ in executor.taken] == ["f", "h"]
    executor.taken[0][1].set_result(RESULT)
    assert first.result() is second.result() is RESULT
    assert jobs.submit("c", job("late"))[0].result() is RESULT
    executor, jobs = held(several=True)
    both = [jobs.submit("a", job("f"))[0], jobs.submit("b", job("g"))[0]]
    assert executor.taken[0][0].program == "a/f"
    executor.taken[0][1].set_exception(BuildError("a/f for cpu-host: XLA died", hint="try again"))
    for future, program in zip(both, ("a/f", "b/g"), strict=True):
        with pytest.raises(BuildError, match=rf"(?m)^{program} for cpu-host: XLA died$") as caught:
            future.result()
        assert caught.value.hint == "try again"


def test_nobody_waits_for_a_job_that_was_ended_and_programs_are_looked_at_before(held):
    def refuse(job, future):
        raise StoreError("no room")

    executor, jobs = held()
    waiting = [jobs.submit("a", job(name))[0] for name in ("f", "g")]
    executor.close()
    jobs.wait()
    for each in waiting:
        with pytest.raises(CancelledError):
            each.result(timeout=60)
    executor.answer = refuse
    with pytest.raises(StoreError):
        jobs.submit("a", job("h", "another"))
    jobs.wait()
    with pytest.raises(StoreError):
        jobs.submit("b", job("h", "another"))[0].result(timeout=60)
    _, jobs = held()
    program = held.store.put_blob(b"stablehlo")
    assert not jobs.lacks_program(job("f", program))
    path = held.store.blob_path(program)
    path.write_bytes(b"STABLEHLO")
    assert jobs.lacks_program(job("f", program))
    assert not path.exists()
    jobs.submit("a", job("f", program))
    assert not jobs.lacks_program(job("g", program))  # the worker of the first one says it
