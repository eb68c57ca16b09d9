"""Programs that other processes lower are those that the build would have lowered, whatever happens."""

import io
import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests import own_decoders
from tests.decoders import write_random
from tests.extent import one_in, sampled

from prejit.compiler.compile.executor import Executor
from prejit.compiler.manifest.manifest import Manifest, Program
from prejit.compiler.manifest.reading import read_manifest
from prejit.compiler.pipeline.lower import crew
from prejit.compiler.pipeline.lower.crew import open_crew
from prejit.compiler.pipeline.lower.model_checks import check
from prejit.compiler.pipeline.lower.program_lowering import lower, lower_own
from prejit.compiler.pipeline.lower.trace_keeping import remember
from prejit.compiler.pipeline.model import open_weights
from prejit.compiler.pipeline.plan import PlanOptions, plan_build
from prejit.compiler.pipeline.workspace import Workspace
from prejit.compiler.progress import Progress
from prejit.compiler.sharing.layered import LayeredStore
from prejit.compiler.sharing.objects import Objects
from prejit.compiler.sharing.shared_result import Tier
from prejit.compiler.store.directory_store import DirectoryStore
from prejit.runtime.errors import PrejitError

TWO = cast("Executor", SimpleNamespace(lowering_processes=2))
"""What an executor says that leaves room for two processes."""
CODE = """
import os, sys
import jax.numpy as jnp
print("this line is no answer")
sys.stdin.read()  # nor are requests for it
def f(x):
    return jnp.tanh(x) * 2
def g(params, x):
    return x * params["w"]
"""
SECTIONS = (
    'name = "f"\nfunction = "code_of_crew:f"\nargs = ["float32[{n}]"]\nbuckets = { n = [1, 2, 3, 4, 5, 6] }',
    'name = "g"\nfunction = "code_of_crew:g"\nargs = ["float32[3]"]\nparams = "w.safetensors"',
)


class Notes(Progress):
    def __init__(self):
        super().__init__()
        self.lines = []

    def _tell(self, text):
        self.lines.append(text)

    _tell_finished = _tell


class Project:
    """A manifest with a module beside it, and the steps of a build up to lowering."""

    def __init__(self, directory, code, *sections, more=""):
        directory.mkdir()
        self.directory = directory
        (directory / "code_of_crew.py").write_text(code)
        save_file({"w": np.float32([1, 2, 3])}, directory / "w.safetensors")
        programs = "".join(f"[[program]]\n{each}\n" for each in sections)
        text = f'[bundle]\nname = "crew"\n{more}{programs}[[target]]\nname = "cpu-host"\n'
        (directory / "m.toml").write_text(text)
        self.manifest = read_manifest(directory / "m.toml")
        self.notes = Notes()

    def store(self, name):
        return DirectoryStore.open(self.directory / name)

    def plan(self, store):
        return plan_build(self.manifest, store)

    def lower(self, store):
        """Lower all programs in this process, as a build does on a small machine."""
        plan = self.plan(store)
        own = self.manifest.has_own_model
        weights = None if plan.model is None or own else open_weights(plan.model)
        before = Workspace.of(plan, store, self.notes)
        check(before, weights)
        space = before.with_plan(lower_own(before))
        found = {each.spec.name: lower(space, each) for each in space.plan.programs}
        remember(before, found, space.parameters(), space.plan.own)
        return {each.spec.name: each for each in self.plan(store).programs}

    def open(self, plan, store):
        return open_crew(plan, PlanOptions(), TWO, store, self.notes)

    def crew(self, plan, store):
        found = self.open(plan, store)
        assert found is not None
        return found

    def lower_apart(self, store):
        """Lower all programs in two processes."""
        plan = self.plan(store)
        with self.crew(plan, store) as crew:
            assert crew.check() is not None
            return crew.lower(plan, plan.programs, None, chosen=True)


@pytest.fixture(autouse=True)
def small_work_is_enough(monkeypatch):
    monkeypatch.setattr(crew, "_PROCESS_SECONDS", 0.05)


@pytest.fixture
def project(tmp_path):
    return partial(Project, tmp_path / "project")


def forms(programs):
    """Return what decides the rest of a build, by program."""
    return {
        name: (asdict(each.lowered), each.spec.kind == "call" and each.parameters, each.key)
        for name, each in programs.items()
        if each.lowered is not None
    }


@pytest.mark.thorough
def test_programs_are_those_of_the_builds_own_process(project, tmp_path, monkeypatch):
    """Though the user's code prints, and reads stdin: neither touches the messages."""
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    made = project(CODE, *SECTIONS)
    expected = forms(made.lower(made.store("one")))
    assert len(expected) == 7
    made.notes.lines.clear()

    def machine(name):
        tiers = [Tier(Objects((tmp_path / "shared").as_uri()))]
        return LayeredStore(made.store(name), tiers, made.notes.note)

    (tmp_path / "shared").mkdir()
    store = machine("two")
    assert forms(made.lower_apart(store)) == expected
    assert made.notes.lines == []
    # And the traces are kept, as the build keeps its own.
    assert all(each.lowered for each in made.plan(store).programs)
    assert made.open(made.plan(store), store) is None
    store.finish()
    another = machine("three")
    assert all(each.lowered for each in made.plan(another).programs)
    another.finish()


# Programs of the user's code share units of four, so two processes need more of them.
CONTEXTS = {"own": [16, 32], "published": [16]}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", sampled(CONTEXTS, lambda kind: kind == "published"))
def test_a_decoder_is_the_same(project, tmp_path, kind):
    source = 'module = "code_of_crew:nnx_decoder"'
    if kind == "published":
        source = f"source = {json.dumps(str(write_random('gpt2', tmp_path / 'gpt2')))}"
    code = Path(own_decoders.__file__).read_text()
    sizes = f"[generate]\nbatch = [1]\nprompt = [8]\ncontext = {CONTEXTS[kind]}\n"
    made = project(code, more=f"[model]\n{source}\n{sizes}")
    expected = forms(made.lower(made.store("one")))
    assert forms(made.lower_apart(made.store("two"))) == expected
    plan, known = made.plan(made.store("two")), made.plan(made.store("one")).own
    assert forms({each.spec.name: each for each in plan.programs}) == expected
    if kind == "own":  # not their values, which the processes of tests compute with other settings
        assert plan.own.parameters.keys() == known.parameters.keys()


@pytest.mark.parametrize("module", one_in(2, ["code_of_crew", "code_of_nobody"]))
def test_a_mistake_reads_as_in_the_build(project, module):
    """A module that is not there is found before anything is lowered."""
    section = SECTIONS[0].replace("code_of_crew", module)
    made = project("def f(x):\n    return x @ x.missing\n", section)
    plan = made.plan(made.store("one"))
    with pytest.raises(PrejitError) as expected:
        made.lower(made.store("two"))
    with pytest.raises(type(expected.value)) as caught:  # noqa: PT012
        with made.crew(plan, made.store("one")) as crew:
            crew.check()
            assert module == "code_of_crew"
            crew.lower(plan, plan.programs, None, chosen=True)
    assert caught.value.describe() == expected.value.describe()


DIES = """
import os, signal
def f(x):
    if {condition}:
        os.close(os.open({flag!r}, os.O_WRONLY | os.O_CREAT))
        os.kill(os.getpid(), signal.SIGKILL)
    return x * 2
"""


@pytest.mark.thorough
def test_a_killed_process_loses_nothing(project, tmp_path):
    flag = str(tmp_path / "was-killed")
    code = DIES.format(condition=f"not os.path.exists({flag!r})", flag=flag)
    made = project(code, SECTIONS[0], SECTIONS[0].replace('"f"', '"again"'))
    assert len(made.lower_apart(made.store("one"))) == 12
    assert Path(flag).exists()
    assert 1 <= len(made.notes.lines) <= 2  # both may have begun before there was a flag
    assert made.notes.lines[0].endswith(": its process was killed by SIGKILL")


@pytest.mark.thorough
def test_what_kills_two_processes_is_left(project, tmp_path):
    code = DIES.format(condition="x.shape[0] == 5", flag=str(tmp_path / "flag"))
    made = project(code, SECTIONS[0])
    found = made.lower_apart(made.store("one"))
    assert [*found] == [f"f/n{n}" for n in (1, 2, 3, 4)]  # the first unit
    label = "lowering f/n5 to f/n6"
    killed = f"{label}: its process was killed by SIGKILL"
    assert made.notes.lines == [killed, killed, f"{label} in the process of the build"]


def test_a_manifest_that_changed_is_not_lowered(project):
    made = project(CODE, *SECTIONS)
    plan = made.plan(made.store("one"))
    file = made.directory / "m.toml"
    file.write_text(file.read_text().replace("[3]", "[4]"))
    with made.crew(plan, made.store("one")) as crew:
        assert crew.check() is None
        assert crew.lower(plan, plan.programs, None, chosen=True) == {}
    [line] = made.notes.lines
    assert line.endswith(f"in the process of the build: {made.directory / 'm.toml'} has changed")


def test_a_manifest_that_was_made_in_python_starts_no_process(tmp_path):
    store = DirectoryStore.open(tmp_path)
    programs = [Program(f"f{n}", fn=lambda x: x, args=["float32[3]"]) for n in range(9)]
    plan = plan_build(Manifest("python", programs=programs, targets=["cpu-host"]), store)
    assert open_crew(plan, PlanOptions(), TWO, store, Notes()) is None


def test_a_build_that_fails_leaves_no_process_behind(project):
    made = project("def f(x):\n    while True:\n        pass\n", SECTIONS[0])
    plan = made.plan(made.store("one"))
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        with made.crew(plan, made.store("one")) as crew:
            crew.check()
            seen = [each.pid for each in crew._processes]
            raise KeyboardInterrupt
    assert len(seen) == 2
    assert not [pid for pid in seen if Path(f"/proc/{pid}").exists()]
