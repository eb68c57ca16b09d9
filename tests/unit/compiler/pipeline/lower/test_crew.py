"""Programs that other processes lower are those that the build would have lowered, each once."""

import io
import json
import sys
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests import own_decoders
from tests.decoders import write_random
from tests.extent import one_in, sampled

from prejit.compiler.manifest.manifest import Manifest, Program
from prejit.compiler.manifest.reading import read_manifest
from prejit.compiler.manifest.specs import ProgramSpec
from prejit.compiler.pipeline.lower import crew
from prejit.compiler.pipeline.lower.crew import open_crew, process_count, split
from prejit.compiler.pipeline.lower.model_checks import check
from prejit.compiler.pipeline.lower.program_lowering import lower, lower_own
from prejit.compiler.pipeline.lower.trace_keeping import read_own, remember
from prejit.compiler.pipeline.model import open_weights
from prejit.compiler.pipeline.plan import PlannedProgram, PlanOptions, plan_build
from prejit.compiler.pipeline.stored_traces import Known
from prejit.compiler.pipeline.workspace import Workspace
from prejit.compiler.progress import Quiet
from prejit.compiler.sharing.layered import LayeredStore
from prejit.compiler.sharing.objects import Objects
from prejit.compiler.sharing.shared_result import Tier
from prejit.compiler.store.build_cache_key import Key
from prejit.compiler.store.directory_store import DirectoryStore
from prejit.runtime.errors import PrejitError

from .projects import Project, tensors

TWO = SimpleNamespace(lowering_processes=2)
"""An executor that leaves room for two processes."""
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
SIX = 'code_of_crew:f\nargs = ["float32[{n}]"]\nbuckets = { n = [1, 2, 3, 4, 5, 6] }'
SEVEN = {"f": SIX, "g": 'code_of_crew:g\nargs = ["float32[3]"]\nparams = "w.safetensors"'}


class Crewed(Project):
    """Programs that this process lowers, or two others."""

    def __init__(self, tmp_path, code, functions, more=""):
        files = {"w.safetensors": tensors(1)}
        super().__init__(tmp_path / "project", functions, files, code_of_crew=code)
        self.write_manifest(functions, more)
        self.manifest = read_manifest(self.directory / "m.toml")
        self.progress = Quiet()
        self.progress.note = self.notes.append
        self.one, self.two = (DirectoryStore.open(tmp_path / name) for name in ("one", "two"))

    def plan(self, store):
        return plan_build(self.manifest, store)

    def lower(self, store):
        """Lower all programs in this process, as a build does on a small machine."""
        plan = self.plan(store)
        own = self.manifest.has_own_model
        weights = None if plan.model is None or own else open_weights(plan.model)
        before = Workspace.of(plan, store, self.progress)
        check(before, weights)
        before = read_own(before)
        space = before.with_plan(lower_own(before))
        found = {each.spec.name: lower(space, each) for each in space.plan.programs}
        remember(before, found, space.parameters())
        return forms(self.plan(store).programs)

    def crew(self, plan, store):
        with pytest.MonkeyPatch.context() as patch:  # little work is enough
            patch.setattr(crew, "_PROCESS_SECONDS", 0.05)
            return open_crew(plan, PlanOptions(), TWO, store, self.progress)

    def lower_apart(self, store):
        """Lower all programs in two processes."""
        plan = self.plan(store)
        with self.crew(plan, store) as crew:
            return crew.lower(plan, plan.programs, None, chosen=True)


def forms(programs):
    """Return what decides the rest of a build, by program."""
    return {
        each.spec.name: (
            asdict(each.lowered),
            each.spec.kind == "call" and each.parameters,
            each.key,
        )
        for each in programs
        if each.lowered is not None
    }


@pytest.mark.thorough
def test_programs_are_those_of_the_builds_own_process(tmp_path, monkeypatch):
    """Though the user's code prints, and reads stdin: neither touches the messages."""
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    made = Crewed(tmp_path, CODE, SEVEN)
    expected = made.lower(made.one)
    assert len(expected) == 7
    made.notes.clear()
    (tmp_path / "shared").mkdir()
    tiers = [Tier(Objects((tmp_path / "shared").as_uri()))]
    store = LayeredStore(made.two, tiers, made.notes.append)
    assert forms(made.lower_apart(store).values()) == expected
    assert made.notes == []
    # And the traces are kept, as the build keeps its own, and shared.
    assert made.crew(made.plan(store), store) is None
    assert forms(made.plan(store).programs) == expected
    store.finish()
    another = LayeredStore(DirectoryStore.open(tmp_path / "three"), tiers, made.notes.append)
    assert forms(made.plan(another).programs) == expected
    another.finish()


# Programs of the user's code share units of four, so two processes need more of them.
CONTEXTS = {"own": [16, 32], "published": [16]}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", sampled(CONTEXTS, lambda kind: kind == "published"))
def test_a_decoder_is_the_same(tmp_path, kind):
    source = 'module = "code_of_crew:nnx_decoder"'
    if kind == "published":
        source = f"source = {json.dumps(str(write_random('gpt2', tmp_path / 'gpt2')))}"
    code = Path(own_decoders.__file__).read_text()
    sizes = f"[generate]\nbatch = [1]\nprompt = [8]\ncontext = {CONTEXTS[kind]}\n"
    made = Crewed(tmp_path, code, {}, f"[model]\n{source}\n{sizes}")
    expected = made.lower(made.one)
    assert forms(made.lower_apart(made.two).values()) == expected
    assert forms(made.plan(made.two).programs) == expected


@pytest.mark.parametrize("module", one_in(2, ["code_of_crew", "code_of_nobody"]))
def test_a_mistake_reads_as_in_the_build(tmp_path, module):
    """Also one that keeps a process from beginning."""
    functions = {"f": SIX.replace("code_of_crew", module)}
    made = Crewed(tmp_path, "def f(x):\n    return x @ x.missing\n", functions)
    plan = made.plan(made.one)
    with pytest.raises(PrejitError) as expected:
        made.lower(made.two)
    with pytest.raises(type(expected.value)) as caught:
        with made.crew(plan, made.one) as crew:
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
def test_a_killed_process_loses_nothing_and_what_kills_two_is_left(tmp_path):
    flag = str(tmp_path / "was-killed")
    code = DIES.format(condition=f"not os.path.exists({flag!r})", flag=flag)
    made = Crewed(tmp_path / "once", code, {"f": SIX, "again": SIX})
    assert len(made.lower_apart(made.one)) == 12
    assert Path(flag).exists()
    assert 1 <= len(made.notes) <= 2  # both may have begun before there was a flag
    assert made.notes[0].endswith(": its process was killed by SIGKILL")
    code = DIES.format(condition="x.shape[0] == 5", flag=flag)
    made = Crewed(tmp_path / "always", code, {"f": SIX})
    assert [*made.lower_apart(made.one)] == [f"f/n{n}" for n in (1, 2, 3, 4)]  # the first unit
    label = "lowering f/n5 to f/n6"
    killed = f"{label}: its process was killed by SIGKILL"
    assert made.notes == [killed, killed, f"{label} in the process of the build"]


def test_a_manifest_that_changed_or_was_made_in_python_is_lowered_by_the_build(tmp_path):
    made = Crewed(tmp_path, CODE, SEVEN)
    plan = made.plan(made.one)
    file = made.directory / "m.toml"
    file.write_text(file.read_text().replace("[3]", "[4]"))
    with made.crew(plan, made.one) as crew:
        assert crew.lower(plan, plan.programs, None, chosen=True) == {}
    [line] = made.notes
    assert line.endswith(f"in the process of the build: {file} has changed")
    programs = [Program(f"f{n}", fn=lambda x: x, args=["float32[3]"]) for n in range(9)]
    made.manifest = Manifest("python", programs=programs, targets=["cpu-host"])
    assert made.crew(made.plan(made.one), made.one) is None


def test_a_build_that_fails_leaves_no_process_behind(tmp_path):
    made = Crewed(tmp_path, "def f(x):\n    while True:\n        pass\n", {"f": SIX})
    plan = made.plan(made.one)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        with made.crew(plan, made.one) as crew:
            seen = [each.pid for each in crew._processes]
            raise KeyboardInterrupt
    assert len(seen) == 2
    assert not [pid for pid in seen if Path(f"/proc/{pid}").exists()]


def function(section, number):
    """A bucket of a function of the user."""
    spec = ProgramSpec(f"{section}/n{number}", "call", {"n": number}, section)
    return PlannedProgram(spec, trace=Known(spec.name, (), {}))


def model(kind, number):
    spec = ProgramSpec(f"{kind}/{number}", kind, {"context": number})
    return PlannedProgram(spec, key=Key("lower", spec.name, (("number", str(number)),)))


programs = st.builds(
    lambda decodes, f, g: [
        *(model("decode", number) for number in range(decodes)),
        *(function("f", number) for number in range(f)),
        *(function("g", number) for number in range(g)),
    ],
    *(st.integers(0, 40), st.integers(0, 90), st.integers(0, 5)),
)


@given(programs, st.integers(1, 64))
def test_every_program_is_in_one_unit(left, processes):
    units = split(left, processes)
    assert list(chain(*units)) == left
    assert all(len({each.spec.section for each in unit}) == 1 for unit in units)


def test_units_and_processes_are_worth_their_start():
    assert [len(unit) for unit in split([model("decode", n) for n in range(5)], 2)] == [1] * 5
    assert all(len(unit) >= 4 for unit in split([function("f", n) for n in range(40)], 64))
    assert len(split([function("f", n) for n in range(400)], 4)) >= 16
    models = [model("decode", n) for n in range(64)]
    assert process_count(models, 16) == 16
    assert process_count(models, 0) == 0, "too few cores: they compile"
    assert process_count(models, 1) == 0, "no faster than the build itself"
    assert process_count(models[:9], 16) == 3
    assert process_count([function("f", n) for n in range(100)], 16) == 3
