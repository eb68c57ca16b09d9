"""Traces of the user's code: used again only while everything that they read is as it was."""

import base64
import builtins
import importlib
import json
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from tests.unit.compiler.sharing.fixtures import Memory

from prejit.compiler.pipeline.workspace import find_code
from prejit.compiler.sharing.layered import LayeredStore
from prejit.compiler.sharing.shared_result import Tier
from prejit.compiler.store.directory_store import DirectoryStore
from prejit.runtime.base.files import digest_of
from prejit.runtime.errors import BuildError, ManifestError

from .projects import SAME, SCALED, THREE, TWO, Project, numbers, project, tensors, times

HERE = "import os\nimport pathlib\n\nimport numpy as np\n\nHERE = pathlib.Path(__file__).parent"
PARAMETERS = "def f(params, x):\n    return x * params['w']\n"
READ_IF_ANY = f"""{HERE}
def f(x):
    try:
        return x * int((HERE / "factor").read_text())
    except FileNotFoundError:
        return x * 5
"""
READ_BY_A_THREAD = times(
    "asyncio.run(asyncio.to_thread(np.load, HERE / 'factor.npy'))", f"import asyncio\n{HERE}"
)
MORE = {SAME: 'reads = ["data/*.json"]', PARAMETERS: 'params = "p.safetensors"'}
"""More lines of the section of a model, which declare what it reads: its program stays the same."""


def without(module):
    """A model that scales by the FACTOR of a module, or by 2 without it."""
    head = f"try:\n    from {module} import FACTOR\nexcept ImportError:\n    FACTOR = 2"
    return times("FACTOR", head)


ONE, P = "data/one.json", "p.safetensors"
DEEP = {"helper.py": "from deep import FACTOR\n", "deep.py": TWO}
NOTICED = {  # a model, what is beside it before and after a change, and a part of the reason
    "import of an import": (SCALED, DEEP, {"deep.py": THREE}, "module deep: sha256:"),
    "a package": (SCALED, {"helper.py": TWO}, {"helper/__init__.py": THREE}, ""),
    "a new module": (without("new"), {}, {"new.py": THREE}, "module new: absent -> sha256:"),
    "a submodule": (without("p.new"), {"p/__init__.py": ""}, {"p/new.py": THREE}, ""),
    "a declared file": (SAME, {ONE: "1"}, {ONE: "2"}, f"reads {ONE}: sha256:"),
    "no declared file": (SAME, {ONE: "1"}, {ONE: None}, f"reads {ONE}: sha256:"),
    "parameters": (PARAMETERS, {P: tensors(1)}, {P: tensors(2)}, f"params {P}: sha256:"),
    "a deleted file": (READ_IF_ANY, {"factor": "2"}, {"factor": None}, "file factor: sha256:"),
    "a thread": (
        *(READ_BY_A_THREAD, {"factor.npy": numbers(2)}, {"factor.npy": numbers(3)}),
        "file factor.npy: sha256:",
    ),
}


@pytest.mark.parametrize(("model", "before", "after", "why"), NOTICED.values(), ids=NOTICED.keys())
def test_what_a_trace_read_and_changes_is_noticed(tmp_path, model, before, after, why):
    more = MORE.get(model, "")
    made = Project(tmp_path / "p", {"p": f"model:f\n{more}"}, {"model.py": model, **before})
    assert [made.trace(), made.trace()] == [{"p"}, set()]
    program = made.lowered["p"].portable
    for name, content in after.items():
        made.write(name, content)
    assert why in made.why()
    assert made.trace() == {"p"}
    assert (made.lowered["p"].portable == program) == bool(more)
    # Both are in the store now, whatever the directory.
    for name in after:
        made.write(name, before.get(name))
    made.directory = made.directory.rename(tmp_path / "moved")
    assert made.trace() == set()
    # What is kept holds no path of the machine, so that others can use it.
    kept = [path.read_text() for path in tmp_path.glob("cache/v1/actions/*/*.json")]
    assert not [text for text in kept if str(tmp_path) in text or os.path.expanduser("~/") in text]


@pytest.mark.parametrize("key", ["params", "reads"])
def test_parameters_and_declared_directories_have_any_name_and_may_hold_links(tmp_path, key):
    model, name = (PARAMETERS, "w[1].safetensors") if key == "params" else (SAME, "data")
    value = f'"{name}"' if key == "params" else f'["{name}"]'
    files = {"w[1].safetensors": tensors(1), "../linked/w.safetensors": tensors(1), "data/a": ""}
    made = Project(tmp_path / "p", {"p": f"model:f\n{key} = {value}"}, files, model=model)
    (made.directory / "data" / "linked").symlink_to(tmp_path / "linked")
    (tmp_path / "linked" / "loop").symlink_to(made.directory / "data")
    assert [made.trace(), made.trace()] == [{"p"}, set()]
    for file in ("w[1].safetensors", "../linked/w.safetensors"):
        made.write(file, tensors(2))
    assert made.trace() == {"p"}


def test_an_earlier_import_is_no_input(tmp_path, monkeypatch):
    """It may be older than its file, and what it read is not known."""
    (tmp_path / "helper.py").write_text(TWO)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("helper")
    made = Project(tmp_path / "project", {"p": "model:f"}, model=SCALED)
    assert [made.trace(), made.trace()] == [{"p"}, {"p"}]
    del sys.modules["helper"]
    assert [made.trace(), made.trace()] == [{"p"}, set()]


def test_a_namespace_package_that_becomes_another_is_noticed(tmp_path):
    inner = {"space/inner/helper": TWO, "space/other/inner/helper": THREE}
    found = project(tmp_path, times("FACTOR", "from space.inner.helper import FACTOR"), **inner)
    found.write("space/__init__.py", "__path__ = [__path__[0] + '/other']\n")
    assert found.changed()


def test_a_declared_file_that_is_none_is_a_mistake(tmp_path):
    fifo = "data/fifo: expected a regular file.*found a FIFO"
    for pattern, said in (("vocab.txt", "reads.*vocab.txt"), ("data", fifo), ("**", fifo)):
        section = f'model:f\nreads = ["{pattern}"]'
        made = Project(tmp_path / pattern / "p", {"p": section}, model=SAME)
        (made.directory / "data").mkdir()
        os.mkfifo(made.directory / "data" / "fifo")
        with pytest.raises(ManifestError, match=said):
            made.trace()


def test_a_file_that_a_thread_reads_after_the_import_is_noticed(tmp_path):
    """A thread may begin in an import, and read while no code of the user runs in the build's own thread."""
    late = "builtins.late = LATE = ThreadPoolExecutor().submit(load)\n"
    head = f"{HERE}\nimport builtins, threading\nfrom concurrent.futures import *\n"
    load = "def load():\n    builtins.go.wait(60)\n    return np.load(HERE / 'factor.npy')\n"
    model = times("LATE.result()", f"{head}builtins.go = threading.Event()\n{load}{late}")
    made = Project(tmp_path / "p", {"p": "model:f"}, {"factor.npy": numbers(2)}, model=model)

    def then_read(*args, **options):
        found = find_code(*args, **options)
        builtins.go.set()
        builtins.late.result()
        del builtins.go, builtins.late  # or the next import would replace them, and lose its own
        return found

    made.find_code = then_read
    assert [made.trace(), made.trace()] == [{"p"}, set()]
    made.write("factor.npy", numbers(3))
    assert made.changed()


def test_what_the_store_and_jax_read_is_not_the_users(tmp_path):
    """Threads of the store read while code of the user runs, and jax lists each directory of sys.path."""
    traced, store = threading.Event(), DirectoryStore.open(tmp_path / "other")

    def write():
        while not traced.is_set():
            store.put_blob(b"content")

    discovers = "from jax._src.xla_bridge import discover_pjrt_plugins\n\ndiscover_pjrt_plugins()\n"
    with ThreadPoolExecutor() as pool:
        pool.submit(write)
        try:
            project(tmp_path, SCALED, helper=f"import time\n{discovers}\ntime.sleep(0.05)\n{TWO}")
        finally:
            traced.set()
    kept = [path.read_text() for path in tmp_path.glob("cache/v1/actions/inputs/*.json")]
    assert kept
    kinds = ('["file"', '["directory"', '["existence of"')
    assert not [text for text in kept if any(kind in text for kind in kinds)]


TENSORSTORE = """
import os
import tensorstore
PLACE = os.path.join(os.path.dirname(__file__), "array")
SPEC = {"driver": "zarr", "kvstore": {"driver": "file", "path": PLACE}}
def f(x):
    return x * tensorstore.open(SPEC).result().read().result()
"""


@pytest.mark.parametrize("declares", [False, True])
def test_files_that_nobody_sees_are_declared_or_read_again(tmp_path, declares):
    import tensorstore

    more = 'reads = ["array"]' if declares else ""
    made = Project(tmp_path / "p", {"p": f"model:f\n{more}"}, model=TENSORSTORE)
    place = {"driver": "file", "path": str(made.directory / "array")}
    options = {"dtype": tensorstore.float32, "shape": [3], "create": True, "delete_existing": True}

    def write(value):
        array = tensorstore.open({"driver": "zarr", "kvstore": place}, **options).result()
        array[:] = np.full(3, value, np.float32)

    write(2)
    assert made.trace() == {"p"}
    assert made.trace() == (set() if declares else {"p"})
    trouble = "model reads files by tensorstore.open, which prejit cannot see: name them in `reads`"
    if not declares:
        assert made.why() == f"it is traced at every build: {trouble}"
    assert made.notes == ([] if declares else [f"p is traced at every build: {trouble}"] * 2)
    write(3)
    assert made.changed()


def test_settings_of_jax_and_the_number_of_devices_are_noticed(tmp_path, monkeypatch, request):
    flag = "--xla_force_host_platform_device_count"
    monkeypatch.setenv("XLA_FLAGS", f"{flag}=2")
    found = project(tmp_path, times("len(jax.devices()) * jax.numpy.arange(3)", "import jax"))
    monkeypatch.setenv("XLA_FLAGS", f"--xla_cpu_use_thunk_runtime=true {flag}=2")
    assert found.trace() == set()
    for others in (f"{flag}=2 {flag}=3", ""):
        monkeypatch.setenv("XLA_FLAGS", others)
        assert found.why().startswith(f"{flag}: ")
        assert found.trace() == {"p"}
    request.addfinalizer(lambda: jax.config.update("jax_enable_x64", False))
    jax.config.update("jax_enable_x64", True)
    assert found.why() == "jax configuration: '' -> jax_enable_x64=True"
    assert found.changed()


def test_no_shared_store_learns_a_variable(tmp_path, monkeypatch):
    """A password has few values to try: not even its digest may leave this machine."""
    monkeypatch.setenv("MY_PIN", "1234")
    monkeypatch.setenv("JAX_MY_SETTING", "2")
    names = {"pin": "MY_PIN", "setting": "JAX_MY_SETTING", "unset": "MY_UNSET_SETTING"}
    manifests = {}
    for name, variable in names.items():
        code = times(f"len(os.environ.get({variable!r}, '2'))", "import os")
        manifests[name] = Project(tmp_path / name, {name: f"{name}_m:f"}, **{f"{name}_m": code})
    place = Memory()
    local, notes = manifests["pin"].store, list[str]()
    store = LayeredStore(local, [Tier(place)], notes.append)
    for name, found in manifests.items():
        found.store = store
        assert found.trace() == {name}
    store.finish()
    results = [each for path, each in place.files.items() if path.startswith("ac/")]
    sent = [base64.b64decode(json.loads(each)["stdoutRaw"]) for each in results]
    shared = {name for name in names if any(f'"m/{name}"'.encode() in each for each in sent)}
    assert shared >= {"setting", "unset"}
    traces = [each for each in sent if b'"kind":"trace"' in each.replace(b" ", b"")]
    subjects = [each["name"] for trace in traces for each in json.loads(trace)["subject"]]
    assert sorted(subjects) == ["m/setting", "m/unset"]
    digest = digest_of(b"1234")
    kept = [path.read_text() for path in tmp_path.glob("cache/v1/*/*/*.json")]
    assert any("variable MY_PIN" in each for each in kept)
    assert not [each for each in (*kept, *map(bytes.decode, sent)) if digest in each]
    for found in manifests.values():
        found.store = local
        assert found.trace() == set()
    monkeypatch.setenv("MY_PIN", "12345")
    assert "variable MY_PIN: sealed:" in manifests["pin"].why()
    assert {name for name, found in manifests.items() if found.trace()} == {"pin"}


def test_an_unfinished_entry_is_not_used(tmp_path):
    """A build that is killed leaves the names of inputs without the trace, or a file that is cut off."""
    found = project(tmp_path, SCALED, helper=TWO)
    [trace] = tmp_path.glob("cache/v1/actions/trace/*.json")
    [inputs] = tmp_path.glob("cache/v1/actions/inputs/*.json")
    trace.unlink()
    assert found.trace() == {"p"}
    inputs.write_bytes(inputs.read_bytes()[:-9])
    assert found.trace() == {"p"}
    assert found.trace() == set()
    found.store.blob_path(found.lowered["p"].portable.raw_digest).unlink()
    assert found.trace() == {"p"}


def test_a_file_that_changes_while_it_is_traced_is_not_remembered(tmp_path):
    """The trace is of what was loaded, not of what is there afterwards."""
    write = "(HERE / 'helper.py').write_text('FACTOR = 3\\n')"
    model = times(f"{write} * helper.FACTOR", f"{HERE}\nimport helper")
    found = Project(tmp_path / "p", {"p": "model:f"}, model=model, helper=TWO)
    assert found.trace() == {"p"}
    assert found.changed()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning", "ignore:os.fork:RuntimeWarning")
def test_code_that_starts_a_process_is_traced_at_every_build(tmp_path):
    head = "import multiprocessing, subprocess\nfrom concurrent.futures import ProcessPoolExecutor"
    fork = "ProcessPoolExecutor(1, multiprocessing.get_context('fork')).submit(abs, -3).result()"
    runs = "len(subprocess.run(['echo', 'ab'], capture_output=True).stdout)"
    for number, run in enumerate((runs, fork)):
        found = Project(tmp_path / str(number) / "p", {"p": "model:f"}, model=times(run, head))
        assert [found.trace(), found.trace()] == [{"p"}, {"p"}]
        assert found.why() == "it is traced at every build: model starts a process"
        found.write("model.py", times("3"))
        assert [found.trace(), found.trace()] == [{"p"}, set()]


REGISTRY = f"""{HERE}
known = {{}}
def once():
    if "once" not in known:
        known["once"] = float((HERE / "factor.txt").read_text())
    return known["once"]
"""


def test_what_a_section_leaves_is_noticed(tmp_path):
    """A value that the first section reads and keeps decides the program of the second, too."""
    one, two = (times(f"{n} * once()", "from registry import once") for n in (1, 2))
    sections = {"one": "one:f", "two": "two:f"}
    found = Project(tmp_path / "p", sections, registry=REGISTRY, one=one, two=two)
    found.write("factor.txt", "2")
    assert found.trace() == {"one", "two"}
    before = found.lowered["two"]
    assert found.trace() == set()
    found.write("factor.txt", "3")
    assert found.trace() == {"one", "two"}
    assert found.lowered["two"].portable != before.portable


def test_a_section_that_changes_is_traced_again(tmp_path):
    model = "def f(x, n=2):\n    return x * (1.5 if n is True else n)\n"
    sizes = 'args = { x = "float32[{n}]" }\nbuckets = { n = [2] }'
    for turn, (before, after) in {
        "donate": ("", 'donate = ["x"]'),
        "args": ("", 'args = { x = "float32[4]" }'),
        "static": ("static = { n = [1] }", "static = { n = [true] }"),
        "pad": (sizes, f'{sizes}\npad = ["n"]'),
    }.items():
        made = Project(tmp_path / turn / "p", {"p": f"model:f\n{before}"}, model=model)
        assert len(made.trace()) == 1
        made.write_manifest({"p": f"model:f\n{after}"})
        assert [len(made.trace()), len(made.trace())] == [1, 0]


def test_an_impure_function_is_refused_with_its_operation(tmp_path):
    for jit in ("", "@jax.jit\n"):
        module = f"import jax\nn = [0]\n\n{jit}def g(x):\n    n[0] += 1\n    return x * n[0]\n"
        module += "\ndef f(x):\n    return g(x)\n"
        made = Project(tmp_path / f"p{jit}".strip(), {"p": "model:f\nimpure = true"}, model=module)
        line = next(n for n, text in enumerate(module.splitlines(), 1) if "*" in text)
        for _ in range(2):  # it is in no cache
            with pytest.raises(BuildError) as caught:
                made.trace()
            assert str(caught.value) == (
                f"{made.directory / 'm.toml'}: program p: expected model:f to give the same program "
                "each time that it is traced, found two that differ in mul at "
                f"{made.directory / 'model.py'}:{line}"
            )


def test_retracing_finds_more(tmp_path, monkeypatch):
    """As the order of a set, which differs between processes."""
    monkeypatch.setattr(builtins, "hidden_factor", 2, raising=False)
    found = project(tmp_path, times("builtins.hidden_factor", "import builtins"))
    assert found.trace(retrace=True) == {"p"}
    monkeypatch.setattr(builtins, "hidden_factor", 3)
    with pytest.raises(BuildError, match=r".*stablehlo.constant.*2.*, then .*3") as caught:
        found.trace(retrace=True)
    assert "the program that an earlier build traced from the same inputs" in str(caught.value)
    assert str(caught.value.hint).startswith("a file that it reads by other means than open() may")
