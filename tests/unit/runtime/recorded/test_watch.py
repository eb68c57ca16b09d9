"""The hook in a process of its own: what it writes, and that it never breaks the program."""

import os
import sys

import pytest
from tests.processes import ran

from prejit.compiler.recording.jax_cache_packing import RECORDER
from prejit.runtime.recorded.hook.watch import Orders
from prejit.runtime.recorded.watched_command import cache_settings, environment_for, read_events


def watched(tmp_path, code, orders, status=0, **env):
    """A program after `import jax, jax.numpy as jnp`, and the lines that its processes wrote."""
    script = tmp_path / "program.py"
    script.write_text(f"import jax, jax.numpy as jnp\n{code}")
    env = environment_for(orders, {**os.environ, **env})
    return ran(sys.executable, script, env=env, status=status), read_events(tmp_path / "events")


@pytest.fixture
def recording(tmp_path):
    for name in ("cache", "events"):
        (tmp_path / name).mkdir()
    settings = cache_settings(tmp_path / "cache", write=True)
    return Orders(settings, str(tmp_path / "events"), recorder=RECORDER)


SCORES = """
from model import score
@jax.jit
def own(x): return x - 1
score(1.0, 2.0)
own(1.0)
jax.jit(lambda x: x * 3)(1.0)
def one(x): return x + 1
def two(x): return x + 2
a, b = (jax.ShapeDtypeStruct((n,), 'float32') for n in (2, 3))
first = jax.jit(one).lower(a)
both = [jax.jit(two).lower(each) for each in (a, b)]
first.compile(), [each.compile() for each in both]
jax.jit(two)(jnp.zeros(5, 'int32'))
"""


def test_functions_and_lines_are_those_of_the_program(tmp_path, recording):
    """Of two lowered programs of one name nothing tells which is compiled first."""
    (tmp_path / "model.py").write_text("import jax\n@jax.jit\ndef score(x, y): return x * y\n")
    _, [process] = watched(tmp_path, SCORES, recording)
    named = {r.name: (r.function, r.where) for r in process.requests}
    assert named["jit_score"] == ("model:score", "program.py:6")
    assert named["jit_own"] == ("program:own", "program.py:7")
    assert named["jit__lambda"] == (None, "program.py:8")
    assert {r.outcome for r in process.requests} == {"miss"}
    keys = {f"{r.key}-cache" for r in process.requests}
    assert keys == set(os.listdir(tmp_path / "cache"))
    found = [(r.name, r.arguments) for r in process.requests if r.name in ("jit_one", "jit_two")]
    lowered = [("jit_one", ("float32[2]",)), ("jit_two", None), ("jit_two", None)]
    assert found == [*lowered, ("jit_two", ("int32[5]",))]


MISSING = """
import sys
class Missing:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == 'prejit': raise ModuleNotFoundError('no prejit', name=name)
sys.meta_path.insert(0, Missing)
"""
FORKING = """
import os
try: import prejit.runtime
except ImportError as error: print(error, flush=True)
for n in (1, 2):
    if os.fork() == 0:
        print(float(jax.jit(lambda x: x + n)(1.0)), flush=True)
        os._exit(0)
    os.wait()
"""


def test_the_hook_needs_no_prejit_and_processes_have_own_lines(tmp_path, recording):
    """The program's Python may be another one: here an import of prejit fails before jax is imported."""
    (tmp_path / "sitecustomize.py").write_text(MISSING)
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done, processes = watched(tmp_path, FORKING, recording, PYTHONPATH=path)
    assert (done.stdout, done.stderr) == ("no prejit\n2.0\n3.0\n", "")
    outcomes = [[r.outcome for r in each.requests] for each in processes]
    assert outcomes == [["miss"], ["miss"]]


@pytest.mark.parametrize("error", ["AttributeError", "FileNotFoundError"])
def test_a_failure_is_reported_and_the_program_goes_on(tmp_path, error):
    events = tmp_path / ("events" if error == "AttributeError" else "gone")
    (tmp_path / "events").mkdir()
    code = "print(float(jax.jit(lambda x: x + 1)(1.0)))\nprint(float(jax.jit(lambda x: x)(2.0)))\n"
    settings = {"jax_no_such_setting": 1} if events.exists() else {}
    done, processes = watched(tmp_path, code, Orders(settings, str(events)))
    assert done.stdout == "2.0\n2.0\n"
    assert done.stderr.count(f"prejit: cannot watch jax any more: {error}") == 1
    named = ["jax_no_such_setting" in (each.failure or "") for each in processes]
    assert named == [True] * events.exists()


@pytest.mark.parametrize(
    "code",
    [
        "from jax import monitoring\nmonitoring.clear_event_listeners()\n",
        "import logging\nlogging.disable()\n",
        "jax.config.update('jax_enable_compilation_cache', False)\n",
    ],
)
def test_a_hidden_compile_is_refused(code, tmp_path, recording):
    settings = cache_settings(tmp_path / "cache", write=False)
    orders = Orders(settings, recording.events, refuse=True)
    run = f"{code}def score(x): return x + 1\njax.jit(score)(1.0)\nprint('went on')\n"
    done, _ = watched(tmp_path, run, orders, status=1)
    assert done.stdout == ""
    assert "NotRecordedError: program.py:" in done.stderr
