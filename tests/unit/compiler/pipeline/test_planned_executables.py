"""A plan says what a build then does, whatever manifest, store and edits come together."""

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.extent import examples
from tests.manifests import functions_manifest

from prejit.compiler.compile.compile_jobs import Compiled
from prejit.compiler.manifest.reading import read_manifest
from prejit.compiler.pipeline.build_interface import Services
from prejit.compiler.pipeline.build_run import begin
from prejit.compiler.pipeline.plan import plan_build
from prejit.compiler.pipeline.planned_executables import (
    CACHED,
    COMPILE,
    TRACED,
    planned_executables,
)
from prejit.compiler.pipeline.submitted_jobs import Jobs
from prejit.compiler.progress import Quiet
from prejit.compiler.store.directory_store import DirectoryStore
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
            (directory / f"m{n}.py").write_text(
                f"{first}def f(x):\n    return {used}x * {factor}\n"
            )
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
        store.put(job.key, result.to_plain(), blobs=[frame])
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
