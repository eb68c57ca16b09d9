"""Traces of the user's code: used again only while everything that they read is as it was."""

from __future__ import annotations

import base64
import builtins
import importlib
import io
import json
import os
import py_compile
import shutil
import sqlite3
import sys
import tempfile
import threading
import zipfile
from collections.abc import Mapping
from functools import cache, partial
from typing import NamedTuple

import jax
import numpy as np
import pytest
from safetensors.numpy import save
from tests.unit.compiler.sharing.fixtures import Memory

from prejit.compiler.lowering.user.observer import Observer
from prejit.compiler.lowering.user.observing import observing
from prejit.compiler.manifest.reading import read_manifest
from prejit.compiler.pipeline.lower.program_lowering import lower
from prejit.compiler.pipeline.lower.trace_keeping import remember
from prejit.compiler.pipeline.plan import plan_build
from prejit.compiler.pipeline.reuse import planned_executables
from prejit.compiler.pipeline.workspace import Workspace, find_code
from prejit.compiler.progress import Quiet
from prejit.compiler.sharing.layered import LayeredStore
from prejit.compiler.sharing.shared_result import Tier
from prejit.compiler.store.directory_store import DirectoryStore
from prejit.runtime.base.files import digest_of
from prejit.runtime.errors import BuildError, ManifestError

Files = Mapping[str, str | bytes | None]
"""Contents by name below the manifest's directory."""


def no_model():
    raise AssertionError("the manifest has no model")


class Project:
    """A manifest with modules beside it, and a store."""

    def __init__(self, directory, functions, files=None, **modules):
        """Write it. A function's value is `module:attribute`, and more lines of its section."""
        self.directory = directory
        self.write_manifest(functions)
        sources = {f"{name}.py": content for name, content in modules.items()}
        for name, content in {**(files or {}), **sources}.items():
            self.write(name, content)
        self.notes = []
        self.find_code = find_code
        self.store = DirectoryStore.open(directory.parent / "cache")
        self.lowered = {}

    def write_manifest(self, functions):
        sections = []
        for name, text in functions.items():
            at, _, more = text.partition("\n")
            args = "" if "args" in more else 'args = { x = "float32[3]" }\n'
            sections.append(f'[[program]]\nname = "{name}"\nfunction = "{at}"\n{args}{more}\n')
        self.write(
            "m.toml", f'[bundle]\nname = "m"\n{"".join(sections)}[[target]]\nname = "cpu-host"\n'
        )

    def write(self, name, content):
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content.encode() if isinstance(content, str) else content)

    def trace(self, *, retrace=False):
        """Do what a build does before it compiles, and return the names of programs that were traced."""
        plan = plan_build(read_manifest(self.directory / "m.toml"), self.store, retrace=retrace)
        code = cache(partial(self.find_code, plan.manifest))
        progress = Quiet()
        progress.note = self.notes.append
        space = Workspace(plan, no_model, code, self.store, progress)
        self.lowered = {each.spec.name: lower(space, each) for each in plan.programs}
        remember(space, self.lowered, space.parameters(), None)
        return {each.spec.name for each in plan.programs if each.lowered is None}

    def why(self):
        """Return why the only program is not cached."""
        plan = plan_build(read_manifest(self.directory / "m.toml"), self.store)
        [planned] = planned_executables(plan, self.store)
        return planned.why

    def changed(self):
        """Return whether the only program is traced, and gives another program."""
        [before] = self.lowered.values()
        traced = self.trace()
        [after] = self.lowered.values()
        assert (before.portable == after.portable) == (not traced)
        return bool(traced)


@pytest.fixture(autouse=True)
def modules():
    """Forget modules that a test leaves in the process, because they are beside no manifest."""
    before = set(sys.modules)
    yield
    for name in ("helper", "toylib", "toydeep"):
        if name not in before:
            sys.modules.pop(name, None)


def project(tmp_path, model, more="", **modules):
    """A project of one function that was traced, and that nothing traces again."""
    made = Project(tmp_path / "project", {"p": f"model:f\n{more}"}, model=model, **modules)
    assert made.trace() == {"p"}
    assert made.trace() == set()
    return made


def times(factor, head=""):
    return f"{head}\n\n\ndef f(x):\n    return x * {factor}\n"


SCALED = times("helper.FACTOR", "import helper")
SAME = "def f(x):\n    return x\n"
TWO, THREE = "FACTOR = 2\n", "FACTOR = 3\n"


class Noticed(NamedTuple):
    """Code whose trace reads what changes: files before and after, a part of the reason, more lines."""

    model: str
    before: Files
    after: Files
    why: str = ""
    more: str = ""


def numbers(value):
    np.save(written := io.BytesIO(), np.float32(value))
    return written.getvalue()


def tensors(value):
    return save({"w": np.full(3, value, np.float32)})


HERE = "import os\nimport pathlib\n\nimport numpy as np\n\nHERE = pathlib.Path(__file__).parent"
THREADS = f"""{HERE}
import asyncio, threading
from concurrent.futures import ThreadPoolExecutor
PATH = os.path.join(HERE, "factor.npy")
READY = threading.Event()
LATE = ThreadPoolExecutor().submit(lambda: READY.wait(60) and np.load(PATH))
"""
PARAMETERS = "def f(params, x):\n    return x * params['w']\n"
ABSENT = "try:\n    {}\nexcept ImportError:\n    FACTOR = 2"


def threads(factor):
    model, why = times("FACTOR", f"{THREADS}FACTOR = {factor}"), "file factor.npy: sha256:"
    return Noticed(model, {"factor.npy": numbers(2)}, {"factor.npy": numbers(3)}, why)


def declared(name, content, why):
    return Noticed(SAME, {"data/one.json": "1"}, {name: content}, why, 'reads = ["data/*.json"]')


NOTICED = {
    "a helper two imports away": Noticed(
        SCALED,
        {"helper.py": "from deep import FACTOR\n", "deep.py": TWO},
        {"deep.py": THREE},
        "module deep: sha256:",
    ),
    "a package for a module": Noticed(SCALED, {"helper.py": TWO}, {"helper/__init__.py": THREE}),
    "a module appears": Noticed(
        times("FACTOR", ABSENT.format("from fast_helper import FACTOR")),
        {},
        {"fast_helper.py": THREE},
        "module fast_helper: absent -> sha256:",
    ),
    "a submodule appears": Noticed(
        times("FACTOR", ABSENT.format("from package.fast import FACTOR")),
        {"package/__init__.py": ""},
        {"package/fast.py": THREE},
    ),
    "a declared file": declared("data/one.json", "2", "reads data/one.json: sha256:"),
    "no declared file": declared("data/one.json", None, "reads data/one.json: sha256:"),
    "parameters": Noticed(
        PARAMETERS,
        {"p.safetensors": tensors(1)},
        {"p.safetensors": tensors(2)},
        "params p.safetensors: sha256:",
        'params = "p.safetensors"',
    ),
    "a file is deleted": Noticed(
        "import pathlib\n\n\ndef f(x):\n    try:\n        return x * int(pathlib.Path(__file__)"
        ".with_name('factor').read_text())\n    except FileNotFoundError:\n        return x * 5\n",
        {"factor": "2"},
        {"factor": None},
        "file factor: sha256:",
    ),
    "asyncio": threads("asyncio.run(asyncio.to_thread(np.load, PATH))"),
    "a thread that reads later": threads("LATE.result() if READY.set() is None else 0"),
}


@pytest.mark.parametrize("case", NOTICED.values(), ids=NOTICED.keys())
def test_what_a_trace_read_and_changes_is_noticed(tmp_path, case):
    made = Project(
        tmp_path / "p", {"p": f"model:f\n{case.more}"}, {"model.py": case.model, **case.before}
    )
    assert [made.trace(), made.trace()] == [{"p"}, set()]
    before = made.lowered["p"].portable
    for name, content in case.after.items():
        made.write(name, content)
    assert case.why in made.why()
    assert made.trace() == {"p"}
    assert (made.lowered["p"].portable == before) == bool(case.more)
    # Both are in the store now, whatever the directory.
    for name in case.after:
        made.write(name, case.before.get(name))
    made.directory = made.directory.rename(tmp_path / "moved")
    assert made.trace() == set()
    # What is kept holds no path of the machine, so that others can use it.
    kept = [path.read_text() for path in tmp_path.glob("cache/v1/actions/*/*.json")]
    assert not [text for text in kept if str(tmp_path) in text or os.path.expanduser("~/") in text]


def test_an_earlier_import_is_no_input(tmp_path, monkeypatch):
    """It may be older than its file, and what it read is not known."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "helper.py").write_text(TWO)
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))
    importlib.import_module("helper")
    made = Project(tmp_path / "project", {"p": "model:f"}, model=SCALED)
    assert made.trace() == {"p"}
    assert made.trace() == {"p"}
    del sys.modules["helper"]
    assert made.trace() == {"p"}
    assert made.trace() == set()


def test_a_namespace_package_that_becomes_another_is_noticed(tmp_path):
    inner = {"space/inner/helper": TWO, "space/other/inner/helper": THREE}
    found = project(tmp_path, times("FACTOR", "from space.inner.helper import FACTOR"), **inner)
    found.write("space/__init__.py", "__path__ = [__path__[0] + '/other']\n")
    assert found.changed()


def test_a_declared_file_that_is_none_is_a_mistake(tmp_path):
    fifo = "data/fifo: expected a regular file.*found a FIFO"
    for pattern, said in (("vocab.txt", "reads.*vocab.txt"), ("data", fifo), ("**", fifo)):
        made = Project(tmp_path / "p", {"p": f'model:f\nreads = ["{pattern}"]'}, model=SAME)
        (made.directory / "data").mkdir(exist_ok=True)
        if not (made.directory / "data" / "fifo").exists():
            os.mkfifo(made.directory / "data" / "fifo")
        with pytest.raises(ManifestError, match=said):
            made.trace()


def test_a_file_that_a_thread_reads_after_the_import_is_noticed(tmp_path):
    """A thread may begin in an import, and read while no code of the user runs in the build's own thread."""
    late = "builtins.late = LATE = ThreadPoolExecutor().submit(load)\n"
    head = (
        f"{HERE}\nimport builtins, threading\nfrom concurrent.futures import ThreadPoolExecutor\n"
    )
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
    assert made.trace() == {"p"}
    assert made.trace() == set()
    made.write("factor.npy", numbers(3))
    assert made.changed()


def test_what_the_store_and_jax_read_is_not_the_users(tmp_path):
    """Threads of the store read while code of the user runs, and jax lists each directory of sys.path."""
    stop, store = threading.Event(), DirectoryStore.open(tmp_path / "other")

    def write():
        while not stop.is_set():
            store.put_blob(b"content")

    other = threading.Thread(target=write)
    other.start()
    discovers = "from jax._src.xla_bridge import discover_pjrt_plugins\n\ndiscover_pjrt_plugins()\n"
    try:
        project(tmp_path, SCALED, helper=f"import time\n{discovers}\ntime.sleep(0.05)\n{TWO}")
    finally:
        stop.set()
        other.join()
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


def write_tokens(path, count):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    Tokenizer(WordLevel({str(each): each for each in range(count)}, "0")).save(str(path))


def write_database(path, value):
    with sqlite3.connect(path) as database:
        database.execute("create table if not exists t (v)")
        database.execute("delete from t")
        database.execute("insert into t values (?)", (value,))
    database.close()


ASKED = {
    "a module with a computed name": "importlib.import_module('hel' + 'per').FACTOR",
    "a module that is imported while it is traced": "__import__('helper').FACTOR",
    "a module of a file": "of_file(HERE / 'helper.py').FACTOR",
    "a file that is executed": "executed((HERE / 'helper.py').read_text())['FACTOR']",
    "a module of a namespace package": "importlib.import_module('space.inner.helper').FACTOR",
    "a module in a directory that the code adds": "__import__('added').FACTOR",
    "a file that pathlib opens": "int((HERE / 'factor.txt').read_text())",
    "a file that C opens": "int(np.fromfile(HERE / 'factor.txt', dtype=np.uint8)[0])",
    "safetensors, imported before": "load_file(HERE / 'w.safetensors')['w']",
    "whether there is a file": "2 + (HERE / 'sub' / 'new').exists()",
    "names": "len(os.listdir(HERE / 'sub'))",
    "size": "os.path.getsize(HERE / 'sub' / 'a')",
    "size, not of what a link names": "os.lstat(HERE / 'sub' / 'a').st_size",
    "access": "2 + os.access(HERE / 'sub' / 'new', os.R_OK)",
    "a link": "float(os.readlink(HERE / 'link'))",
    "a path without links": "float((HERE / 'link').resolve().name)",
    "names by a descriptor": "len(os.listdir(os.open(HERE / 'sub', os.O_RDONLY)))",
    "open beside a descriptor": (
        "len(os.read(os.open('a', os.O_RDONLY, dir_fd=os.open(HERE / 'sub', os.O_RDONLY)), 9))"
    ),
    "a database by its URI": ("value_in(f'file:{HERE}/t.db?mode=ro')"),
    "a tokenizer": "Tokenizer.from_file(str(HERE / 't.json')).get_vocab_size()",
    "variables, one by one": "2 + sum(name.startswith('TOY_') for name in os.environ)",
    "whether there is a module": "2 + (importlib.util.find_spec('appears') is not None)",
    "a version": "float(metadata.version('toyversion'))",
    "whether there is a distribution": "2 + has('toynew')",
    "time of a file": "os.stat(HERE / 'empty').st_mtime % 1000",
    "mode of a file": "float(os.stat(HERE / 'empty').st_mode & 7)",
    "size of an entry": "max(entry.stat().st_size for entry in os.scandir(HERE / 'sizes'))",
    "which entries are directories": "2 + sum(len(names) for _, names, _ in os.walk(HERE / 'kind'))",
    "a file beside the working directory": "float(pathlib.Path('factor.txt').read_text())",
    "the working directory": "float(os.getcwd()[-1])",
    "a variable": "int(os.environ['CI_TOY'])",
    "a directory for temporary files": "float(tempfile.gettempdir()[-1])",
    "a module that another one shadows": "getattr(__import__('colorsys'), 'FACTOR', 2)",
    "a module in a zip file that reads a file": "__import__('zipped').FACTOR",
    "a module without its source": "__import__('compiled').FACTOR",
    "a file with the name of a cache": "float((HERE / 'my__pycache__.txt').read_text())",
}
ASKING = """
import contextlib, importlib.util, os, pathlib, sqlite3, sys, tempfile
from importlib import metadata
import numpy as np
from safetensors.numpy import load_file
from tokenizers import Tokenizer
HERE = pathlib.Path(__file__).parent
sys.path += [str(HERE / 'zipped.zip'), str(HERE / 'compiled'), str(HERE / 'lib')]
def of_file(path):
    spec = importlib.util.spec_from_file_location("any_name", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
def executed(text):
    names = {{}}
    exec(text, names)
    return names
def value_in(database):
    with contextlib.closing(sqlite3.connect(database, uri=True)) as opened:
        return opened.execute('select v from t').fetchone()[0]
def has(name):
    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False
def f(x):
    return x * {}
"""


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """One directory of distributions for all tests: the first look at each takes half a second."""
    return tmp_path_factory.mktemp("site-packages")


@pytest.mark.parametrize("name", ASKED)
def test_what_code_asks_without_opening_a_file_is_noticed(tmp_path, packages, monkeypatch, name):
    made = Project(tmp_path / "p", {"p": "model:f"}, model=ASKING.format(ASKED[name]))
    monkeypatch.syspath_prepend(str(packages))
    shutil.rmtree(packages / "toynew.dist-info", ignore_errors=True)

    def describe(name, version):
        described = packages / f"{name}.dist-info" / "METADATA"
        described.parent.mkdir(parents=True, exist_ok=True)
        described.write_text(f"Name: {name}\nVersion: {version}\n")

    def write(value):
        elsewhere, some, factor = tmp_path / f"from{value}", "x" * value, f"FACTOR = {value}\n"
        modules = ("helper.py", "space/inner/helper.py", "lib/added.py")
        texts = dict.fromkeys(("factor.txt", "my__pycache__.txt"), str(value))
        of_sizes = {"sub/a": some, "sizes/a": some, "empty": "", "w.safetensors": tensors(value)}
        for file, content in {**dict.fromkeys(modules, factor), **texts, **of_sizes}.items():
            made.write(file, content)
        (made.directory / "link").unlink(missing_ok=True)
        (made.directory / "link").symlink_to(str(value))
        write_tokens(made.directory / "t.json", value)
        write_database(made.directory / "t.db", value)
        describe("toyversion", value)
        (made.directory / "empty").chmod(0o600 + value)
        os.utime(made.directory / "empty", (1000 + value, 1000 + value))
        elsewhere.mkdir()
        (elsewhere / "factor.txt").write_text(str(value))
        monkeypatch.chdir(elsewhere)
        monkeypatch.setenv("CI_TOY", str(value))
        monkeypatch.setattr(tempfile, "tempdir", None)  # as in a new process
        monkeypatch.setenv("TMPDIR", str(elsewhere))

    file = str(made.directory / "factor.txt")
    module = f"import pathlib\nFACTOR = int(pathlib.Path({file!r}).read_text())\n"
    with zipfile.ZipFile(made.directory / "zipped.zip", "w") as archive:
        archive.writestr("zipped.py", module)
    made.write("source.txt", module)
    (made.directory / "compiled").mkdir()
    compiled = str(made.directory / "compiled" / "compiled.pyc")
    py_compile.compile(str(made.directory / "source.txt"), compiled, "c.py")
    made.write("kind/entry", "")
    write(2)
    assert made.trace() == {"p"}
    assert made.trace() == set()
    write(3)
    for name in ("sub/new", "appears.py"):
        made.write(name, "")
    describe("toynew", 1)
    (made.directory / "kind" / "entry").unlink()
    (made.directory / "kind" / "entry").mkdir()
    made.write("colorsys.py", "FACTOR = 3\n")
    monkeypatch.setenv("TOY_A", "3")
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    importlib.invalidate_caches()
    assert made.changed()


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A distribution that provides `toylib`, and requires one that provides `toydeep`."""
    packages = tmp_path / "site-packages"
    for name, requires in (("toylib", "Requires-Dist: toydeep\n"), ("toydeep", "")):
        described = packages / f"{name}-1.dist-info"
        described.mkdir(parents=True)
        (packages / f"{name}.py").write_text(TWO)
        (described / "METADATA").write_text(f"Name: {name}\nVersion: 1\n{requires}")
        (described / "top_level.txt").write_text(f"{name}\n")
    monkeypatch.syspath_prepend(str(packages))
    return packages


def test_another_version_is_noticed(tmp_path, installed):
    found = project(tmp_path, times("FACTOR", "from toylib import FACTOR"))
    unread = Project(tmp_path / "unread", {"q": "other:f"}, other=times("len(os.sep)", "import os"))
    assert unread.trace() == {"q"}
    for name in ("toylib", "toydeep"):
        metadata = installed / f"{name}-1.dist-info" / "METADATA"
        metadata.write_text(metadata.read_text().replace("Version: 1", "Version: 2"))
        assert found.why() == f"version of {name}: 1 -> 2"
        assert found.trace() == {"p"}
        assert unread.trace() == set()


RECORD = """\
../../../bin/toy,sha256={other},10
__editable___toy_finder.py,sha256={other},10
toylib-1.dist-info/direct_url.json,sha256={other},4
toylib.py,sha256={content},11
__pycache__/toylib.cpython-311.pyc,,
"""


def test_the_same_version_installed_again_is_noticed(tmp_path, installed):
    record = installed / "toylib-1.dist-info" / "RECORD"
    record.write_text(RECORD.format(content="abc", other="a machine"))
    found = project(tmp_path, times("FACTOR", "from toylib import FACTOR"))
    lines = RECORD.format(content="abc", other="another machine").splitlines()
    record.write_text("\n".join(reversed(lines)))
    assert found.trace() == set(), "the same wheel on another machine, installed by another program"
    record.write_text(RECORD.format(content="def", other="a machine"))
    assert found.why().startswith("version of toylib: 1 sha256:")
    assert found.trace() == {"p"}


@pytest.fixture
def x64():
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.mark.usefixtures("x64")
def test_a_setting_of_jax_that_changes_is_noticed(tmp_path):
    found = project(tmp_path, times("jnp.arange(3)", "import jax.numpy as jnp"))
    jax.config.update("jax_enable_x64", True)
    assert found.why() == "jax configuration: '' -> jax_enable_x64=True"
    assert found.changed()


def test_the_number_of_devices_is_noticed(tmp_path, monkeypatch):
    flag = "--xla_force_host_platform_device_count"
    monkeypatch.setenv("XLA_FLAGS", f"{flag}=2")
    found = project(tmp_path, times("len(jax.devices())", "import jax"))
    monkeypatch.setenv("XLA_FLAGS", f"--xla_cpu_use_thunk_runtime=true {flag}=2")
    assert found.trace() == set()
    for others in (f"{flag}=2 {flag}=3", ""):
        monkeypatch.setenv("XLA_FLAGS", others)
        assert found.why().startswith(f"{flag}: ")
        assert found.trace() == {"p"}


def test_no_shared_store_learns_a_variable(tmp_path, monkeypatch):
    """A password has few values to try: not even its digest may leave this machine."""
    monkeypatch.setenv("MY_PIN", "1234")
    monkeypatch.setenv("JAX_MY_SETTING", "2")
    read = "import os\n\n\ndef f(x):\n    return x * len(os.environ.get({!r}, '2'))\n"
    names = {"pin": "MY_PIN", "setting": "JAX_MY_SETTING", "unset": "MY_UNSET_SETTING"}
    manifests = {
        name: Project(
            tmp_path / name, {name: f"{name}_module:f"}, **{f"{name}_module": read.format(variable)}
        )
        for name, variable in names.items()
    }
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


def test_a_variable_is_always_noticed(tmp_path, monkeypatch):
    """Python 3.13 counts the changes of a class, and notices no more than a thousand."""
    noted = list[str]()
    observer = Observer(str(tmp_path))
    monkeypatch.setattr(observer, "note_variable", noted.append)
    for _ in range(600):
        with observing(observer):
            os.environ.get("MY_FACTOR")
        for _ in range(20):  # so that the interpreter keeps what it calls
            os.environ.get("MY_FACTOR")
    assert noted.count("MY_FACTOR") == 600


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
    model = (
        "import pathlib\n\nimport helper\n\n\ndef f(x):\n"
        "    pathlib.Path(__file__).with_name('helper.py').write_text('FACTOR = 3\\n')\n"
        "    return x * helper.FACTOR\n"
    )
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
        assert found.trace() == {"p"}
        assert found.trace() == {"p"}
        assert found.why() == "it is traced at every build: model starts a process"
        found.write("model.py", times("3"))
        assert found.trace() == {"p"}
        assert found.trace() == set()


SHARED = {  # the module of each of two sections
    "a registry": (
        times("1", "import registry\n\nregistry.known['factor'] = {}"),
        times("registry.known['factor']", "import registry"),
    ),
    "a setting of jax": (
        times(
            "1",
            "import jax\n\n"
            "jax.config.update('jax_default_matmul_precision', [None, 'highest'][{} - 2])",
        ),
        times("len(str(jax.config.jax_default_matmul_precision))", "import jax"),
    ),
    "a module that the other reads": (
        times("FACTOR", "FACTOR = {}"),
        "import pathlib\n\nPATH = pathlib.Path(__file__).with_name('one.py')\n\n\n"
        "def f(x):\n    names = {}\n    exec(PATH.read_text(), names)\n    return x * names['FACTOR']\n",
    ),
    "a value that is kept": (
        times("once(lambda: float(PATH.read_text()))", "from registry import PATH, once"),
        times("2 * once(lambda: float(PATH.read_text()))", "from registry import PATH, once"),
    ),
}
REGISTRY = """
import pathlib
PATH = pathlib.Path(__file__).with_name("factor.txt")
known = {}
def once(make):
    if "once" not in known:
        known["once"] = make()
    return known["once"]
"""


@pytest.mark.parametrize("modules", SHARED.values(), ids=SHARED.keys())
def test_what_a_section_leaves_is_noticed(tmp_path, modules):
    one, b = modules
    found = Project(tmp_path / "p", {"one": "one:f", "two": "two:f"}, registry=REGISTRY, two=b)

    def write(value):
        found.write("one.py", one.replace("{}", str(value), 1))
        found.write("factor.txt", str(value))

    write(2)
    assert found.trace() == {"one", "two"}
    before = found.lowered["two"]
    assert found.trace() == set()
    write(3)
    assert found.trace() == {"one", "two"}
    assert found.lowered["two"].portable != before.portable


def test_a_section_that_changes_is_traced_again(tmp_path):
    model = "def f(x, n=2):\n    return x * (1.5 if n is True else n)\n"
    sizes = 'args = { x = "float32[{n}]" }\nbuckets = { n = [2] }'
    for turn, (before, after) in enumerate(
        (
            ("", 'donate = ["x"]'),
            ("", 'args = { x = "float32[4]" }'),
            ("static = { n = [1] }", "static = { n = [true] }"),
            (sizes, f'{sizes}\npad = ["n"]'),
        )
    ):
        made = Project(tmp_path / str(turn) / "p", {"p": f"model:f\n{before}"}, model=model)
        assert len(made.trace()) == 1
        made.write_manifest({"p": f"model:f\n{after}"})
        assert len(made.trace()) == 1
        assert made.trace() == set()


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


def test_hooks_are_gone_after_a_trace(tmp_path):
    from importlib.machinery import SourceFileLoader

    import safetensors.numpy
    import tensorstore

    def hooks():
        of_python = builtins.__import__, os.stat, type(os.environ).__getitem__
        of_imports = SourceFileLoader.get_code, sys.modules["_frozen_importlib"]._gcd_import
        starts = threading.Thread.start, sys.modules["_posixsubprocess"].fork_exec
        of_libraries = safetensors.numpy.safe_open, tensorstore.open, tensorstore.KvStore.open
        return (*of_python, *of_imports, *starts, *of_libraries)

    before = hooks()
    project(tmp_path, SAME)
    assert hooks() == before
    broken = Project(tmp_path / "broken", {"p": "model:f"}, model="raise ValueError\n")
    with pytest.raises(ManifestError):
        broken.trace()
    assert hooks() == before
