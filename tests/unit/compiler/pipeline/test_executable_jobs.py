"""A plan says of each executable what a build does, and jobs reach the executor once."""

from concurrent.futures import CancelledError
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.extent import examples
from tests.manifests import functions_manifest
from tests.unit.compiler.toolchains import HOST, new

from prejit.compiler.compile.compile_jobs import Compiled, CompileJob, Source
from prejit.compiler.manifest.reading import read_manifest
from prejit.compiler.pipeline.build_interface import Services
from prejit.compiler.pipeline.build_run import begin
from prejit.compiler.pipeline.executable_jobs import (
    CACHED,
    COMPILE,
    TRACED,
    Jobs,
    planned_executables,
)
from prejit.compiler.pipeline.plan import plan_build
from prejit.compiler.progress import Quiet
from prejit.compiler.store.build_cache_key import Key
from prejit.compiler.store.directory_store import DirectoryStore
from prejit.runtime.errors import BuildError, StoreError
from prejit.runtime.format.bundle_schema import Memory, Segment

from .held_executor import HeldExecutor


@dataclass(frozen=True)
class Project:
    """A manifest of functions: `factors` has what each multiplies by, `sizes` its buckets."""

    factors: tuple[int, ...]
    sizes: tuple[int, ...]
    targets: tuple[str, ...]
    helper: int
    damages: tuple[tuple[str, int], ...]

    def write(self, directory):
        """Write its files, and delete or damage files of the build cache."""
        keys = f'args = {{ x = "float32[{{n}}]" }}; buckets = {{ n = {[*self.sizes]} }}'
        programs = {f"f{n}": f'function = "m{n}:f"; {keys}' for n in range(len(self.factors))}
        functions_manifest(directory / "m.toml", programs, self.targets)
        (directory / "helper.py").write_text(f"FACTOR = {self.helper}\n")
        for n, factor in enumerate(self.factors):
            first, used = ("import helper\n\n\n", "helper.FACTOR * ") if n == 0 else ("", "")
            code = f"{first}def f(x):\n    return {used}x * {factor}\n"
            (directory / f"m{n}.py").write_text(code)
        for kind, place in self.damages:
            files = sorted((directory / "cache" / "v1").glob(kind))
            if files:
                path = files[place % len(files)]
                path.unlink() if place % 2 else path.write_bytes(path.read_bytes()[:-1] + b"#")


KINDS = ("actions/trace/*", "actions/inputs/*", "actions/compile/*", "last/*/*", "blobs/sha256/*")
TARGETS = st.sampled_from(["cpu-host", "cpu-x86-64-v2"])
PROJECTS = st.builds(
    Project,
    st.lists(st.integers(2, 4), min_size=1, max_size=2).map(tuple),
    st.lists(st.integers(1, 3), min_size=1, max_size=2, unique=True).map(tuple),
    st.lists(TARGETS, min_size=1, max_size=2, unique=True).map(tuple),
    st.integers(1, 2),
    st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 99)), max_size=3).map(tuple),
)


def begin_build(directory, store):
    """Begin a build without XLA: return its executor, and what it takes from the store."""
    executor = HeldExecutor()
    service = Services(
        output=directory / "out",
        store=store,
        progress=Quiet(),
        measure=False,
        executor=executor,
        jobs=Jobs(executor, store, Quiet()),
        packings={},
    )
    begun = begin(read_manifest(directory / "m.toml"), (), service)
    compiled = {job.key.digest for job, _ in executor.taken}
    for job, future in executor.taken:
        frame = store.put_blob(job.key.digest.encode())
        segment = Segment(0, 71, frame, 71, frame)
        result = Compiled(segment, (), Memory(0, 0, 0, 0), 1, 1, 1)
        store.put(job.key, asdict(result), blobs=[frame])
        future.set_result(result)
    found = [each for each in begun.submitted if each.job.key.digest not in compiled]
    taken = {(each.spec.name, each.job.target.name) for each in found}
    return executor, taken


@pytest.mark.thorough
@settings(max_examples=examples(3, 60))
@given(st.lists(PROJECTS, min_size=2, max_size=3))
def test_a_build_does_what_the_plan_said(projects):
    with TemporaryDirectory() as name:
        directory = Path(name)
        store = DirectoryStore.open(directory / "cache")
        for project in projects:
            project.write(directory)

            def states():
                plan = plan_build(read_manifest(directory / "m.toml"), store)
                found = planned_executables(plan, store)
                return {(each.spec.name, each.target.name): each.state for each in found}

            planned = states()
            assert states() == planned, "a plan changes nothing"
            _, taken = begin_build(directory, store)
            known = {at for at, state in planned.items() if state != TRACED}
            assert taken & known == {at for at in known if planned[at] == CACHED}
            assert {at for at in known if planned[at] == COMPILE} == known - taken
            assert set(states().values()) == {CACHED}
            again, all_taken = begin_build(directory, store)
            assert again.taken == []
            assert all_taken == planned.keys()


DIGEST = f"sha256:{'0' * 64}"
RESULT = Compiled(Segment(0, 1, DIGEST, 1, DIGEST), (), Memory(0, 0, 0, 0), 1, 1, 1)


def job(program, content="same"):
    key = Key("compile", program, (("stablehlo", content),))
    return CompileJob(program, new(HOST), Source(content, ("cpu",)), key)


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
