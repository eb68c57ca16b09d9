"""The hook in a process of its own: what it writes, and that it never breaks the program."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from prejit.runtime.recorded.hook.watch import Orders
from prejit.runtime.recorded.hook_events import WatchedProcess, read_events
from prejit.runtime.recorded.watched_command import cache_settings, environment_for


def watched(
    tmp_path: Path, code: str, orders: Orders, status: int = 0, **env: str
) -> tuple[subprocess.CompletedProcess[str], tuple[WatchedProcess, ...]]:
    """A program after `import jax, jax.numpy as jnp`, and the lines that its processes wrote."""
    script = tmp_path / "program.py"
    script.write_text(f"import jax, jax.numpy as jnp\n{code}")
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment_for(orders, {**os.environ, **env}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stderr
    return done, read_events(tmp_path / "events")


@pytest.fixture
def recording(tmp_path: Path) -> Orders:
    for name in ("cache", "events"):
        (tmp_path / name).mkdir()
    settings = cache_settings(tmp_path / "cache", write=True)
    return Orders(settings, str(tmp_path / "events"), functions=True)


def test_functions_and_lines_are_those_of_the_program(tmp_path: Path, recording: Orders) -> None:
    """Of two lowered programs of one name nothing tells which is compiled first."""
    (tmp_path / "model.py").write_text("import jax\n@jax.jit\ndef score(x, y): return x * y\n")
    code = (
        "from model import score\n"
        "@jax.jit\ndef own(x): return x - 1\n"
        "score(1.0, 2.0)\nown(1.0)\njax.jit(lambda x: x * 3)(1.0)\n"
        "def one(x): return x + 1\n"
        "def two(x): return x + 2\n"
        "a, b = (jax.ShapeDtypeStruct((n,), 'float32') for n in (2, 3))\n"
        "first = jax.jit(one).lower(a)\n"
        "both = [jax.jit(two).lower(each) for each in (a, b)]\n"
        "first.compile(), [each.compile() for each in both]\n"
        "jax.jit(two)(jax.numpy.zeros(5, 'int32'))\n"
    )
    _, [process] = watched(tmp_path, code, recording)
    named = {r.name: (r.function, r.where) for r in process.requests}
    assert named["jit_score"] == ("model:score", "program.py:5")
    assert named["jit_own"] == ("program:own", "program.py:6")
    assert named["jit__lambda"] == (None, "program.py:7")
    assert {r.outcome for r in process.requests} == {"miss"}
    keys = {f"{r.key}-cache" for r in process.requests}
    assert keys == set(os.listdir(tmp_path / "cache"))
    found = [(r.name, r.arguments) for r in process.requests if r.name in ("jit_one", "jit_two")]
    assert found == [
        ("jit_one", ("float32[2]",)),
        ("jit_two", None),
        ("jit_two", None),
        ("jit_two", ("int32[5]",)),
    ]


def test_the_hook_needs_no_prejit_in_the_program(tmp_path: Path, recording: Orders) -> None:
    """The program's Python may be another one: here an import of prejit fails before jax is imported."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Missing:\n"
        "    @staticmethod\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        if name == 'prejit': raise ModuleNotFoundError('no prejit', name=name)\n"
        "sys.meta_path.insert(0, Missing)\n"
    )
    code = (
        "print(float(jax.jit(lambda x: x + 1)(1.0)))\n"
        "try: import prejit.runtime\n"
        "except ImportError as error: print(error)\n"
    )
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done, [process] = watched(tmp_path, code, recording, PYTHONPATH=path)
    assert (done.stdout, done.stderr) == ("2.0\nno prejit\n", "")
    assert [r.outcome for r in process.requests] == ["miss"]


def test_each_process_has_lines_of_its_own(tmp_path: Path, recording: Orders) -> None:
    code = (
        "import os\n"
        "for n in (1, 2):\n"
        "    if os.fork() == 0:\n"
        "        jax.jit(lambda x: x + n)(1.0)\n"
        "        os._exit(0)\n"
        "    os.wait()\n"
    )
    _, processes = watched(tmp_path, code, recording)
    assert [len(process.requests) for process in processes] == [1, 1]


@pytest.mark.parametrize("error", ["AttributeError", "FileNotFoundError"])
def test_a_failure_is_reported_and_the_program_goes_on(tmp_path: Path, error: str) -> None:
    events = tmp_path / ("events" if error == "AttributeError" else "gone")
    (tmp_path / "events").mkdir()
    code = "print(float(jax.jit(lambda x: x + 1)(1.0)))\nprint(float(jax.jit(lambda x: x)(2.0)))\n"
    settings = {"jax_no_such_setting": 1} if events.exists() else {}
    done, processes = watched(tmp_path, code, Orders(settings, str(events)))
    assert done.stdout == "2.0\n2.0\n"
    assert done.stderr.count(f"prejit: cannot watch jax any more: {error}") == 1
    assert ["jax_no_such_setting" in (each.failure or "") for each in processes] == [
        True
    ] * events.exists()


@pytest.mark.parametrize(
    "code",
    [
        "from jax import monitoring\nmonitoring.clear_event_listeners()\n",
        "import logging\nlogging.disable()\n",
        "jax.config.update('jax_enable_compilation_cache', False)\n",
    ],
)
def test_a_hidden_compile_is_refused(code: str, tmp_path: Path, recording: Orders) -> None:
    settings = cache_settings(tmp_path / "cache", write=False)
    orders = Orders(settings, recording.events, refuse=True)
    run = f"{code}def score(x): return x + 1\njax.jit(score)(1.0)\nprint('went on')\n"
    done, _ = watched(tmp_path, run, orders, status=1)
    assert done.stdout == ""
    assert "NotRecordedError: program.py:" in done.stderr
