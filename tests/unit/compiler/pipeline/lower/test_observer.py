"""What code of the user asks while it is traced: each way to ask is noticed."""

import _posixshmem
import builtins
import contextlib
import importlib.machinery
import json
import mmap
import os
import py_compile
import shutil
import sqlite3
import sys
import tempfile
import threading
import zipfile
from types import SimpleNamespace

import pytest
from tests.extent import one_in

from prejit.compiler.lowering.user import observer as observer_module
from prejit.compiler.lowering.user.observer import Observer
from prejit.compiler.lowering.user.observing import NativeReaders, observing
from prejit.compiler.lowering.user.trace_inputs import local_path
from prejit.runtime.errors import ManifestError

from .projects import SAME, TWO, Project, project, tensors, times


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
    "a module of a namespace package": "importlib.import_module('space.inner.helper').FACTOR",
    "a module in a directory that the code adds": "__import__('added').FACTOR",
    "a file that pathlib opens": "int((HERE / 'factor.txt').read_text())",
    "a file that jax reads for its caller": (
        "float(jax.tree.map(pathlib.Path.read_text, [HERE / 'factor.txt'])[0])"
    ),
    "a file below a descriptor": (
        "float(pathlib.Path(f'/proc/self/fd/{os.open(HERE, os.O_RDONLY)}/factor.txt').read_text())"
    ),
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
    "a database whose change is in its log": "value_in(f'file:{HERE}/log.db')",
    "a tokenizer": "Tokenizer.from_file(str(HERE / 't.json')).get_vocab_size()",
    "a vocabulary": "len(WordLevel.read_file(str(HERE / 'vocabulary.json')))",
    "variables, one by one": "2 + sum(name.startswith('TOY_') for name in os.environ)",
    "whether there is a module": "2 + (importlib.util.find_spec('appears') is not None)",
    "a version": "float(metadata.version('toyversion'))",
    "whether there is a distribution": "2 + has('toynew')",
    "time of a file": "os.stat(HERE / 'empty').st_mtime % 1000",
    "time of an open file": "os.fstat(os.open(HERE / 'empty', os.O_RDONLY)).st_mtime % 1000",
    "mode of a file": "float(os.stat(HERE / 'empty').st_mode & 7)",
    "size of an entry": "max(entry.stat().st_size for entry in os.scandir(HERE / 'sizes'))",
    "which entries are directories": "2 + sum(len(names) for _, names, _ in os.walk(HERE / 'kind'))",
    "a file beside the working directory": "float(pathlib.Path('factor.txt').read_text())",
    "the working directory": "float(os.getcwd()[-1])",
    "a variable": "int(os.environ['CI_TOY'])",
    "a variable that a library reads at its import": "__import__('toysettings').FACTOR",
    "a directory for temporary files": "float(tempfile.gettempdir()[-1])",
    "a module that another one shadows": "getattr(__import__('colorsys'), 'FACTOR', 2)",
    "a module in a zip file that reads a file": "__import__('zipped').FACTOR",
    "a module without its source": "__import__('compiled').FACTOR",
    "a file with the name of a cache": "float((HERE / 'my__pycache__.txt').read_text())",
}
ASKING = """
import contextlib, importlib.util, os, pathlib, sqlite3, sys, tempfile
from importlib import metadata
import jax
import numpy as np
from safetensors.numpy import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
HERE = pathlib.Path(__file__).parent
sys.path += [str(HERE / 'zipped.zip'), str(HERE / 'compiled'), str(HERE / 'lib')]
def of_file(path):
    spec = importlib.util.spec_from_file_location("any_name", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
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


@pytest.mark.parametrize("name", one_in(6, ASKED))
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
        made.write("vocabulary.json", json.dumps({str(each): each for each in range(value)}))
        logged.execute("delete from t")
        logged.execute("insert into t values (?)", (value,))
        describe("toyversion", value)
        describe("toysettings", 1)
        (made.directory / "empty").chmod(0o600 + value)
        os.utime(made.directory / "empty", (1000 + value, 1000 + value))
        elsewhere.mkdir()
        (elsewhere / "factor.txt").write_text(str(value))
        monkeypatch.chdir(elsewhere)
        for variable in ("CI_TOY", "TOY_FACTOR"):
            monkeypatch.setenv(variable, str(value))
        monkeypatch.setattr(tempfile, "tempdir", None)  # as in a new process
        monkeypatch.setenv("TMPDIR", str(elsewhere))

    library = "import os\nEVERY = [*os.environ]\nFACTOR = int(os.environ.get('TOY_FACTOR'))\n"
    (packages / "toysettings.py").write_text(library)
    file = str(made.directory / "factor.txt")
    module = f"import pathlib\nFACTOR = int(pathlib.Path({file!r}).read_text())\n"
    with zipfile.ZipFile(made.directory / "zipped.zip", "w") as archive:
        archive.writestr("zipped.py", module)
    made.write("source.txt", module)
    (made.directory / "compiled").mkdir()
    compiled = str(made.directory / "compiled" / "compiled.pyc")
    py_compile.compile(str(made.directory / "source.txt"), compiled, "c.py")
    made.write("kind/entry", "")
    logged = sqlite3.connect(made.directory / "log.db", isolation_level=None)
    logged.executescript("pragma journal_mode = wal; create table t (v)")
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
    for module in ("colorsys", "toysettings"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    importlib.invalidate_caches()
    assert made.changed()
    logged.close()


def test_the_order_in_which_the_system_lists_names_is_noticed(tmp_path, monkeypatch):
    listing = ASKING.format("float(os.listdir(HERE / 'kind')[0])")
    made = Project(tmp_path, {"p": "model:f"}, model=listing)
    for name in "23":
        made.write(f"kind/{name}", "")
    assert made.trace() == {"p"}
    assert made.trace() == set()
    scan = os.scandir

    @contextlib.contextmanager
    def reversed_scan(path):
        with scan(path) as entries:
            yield reversed([*entries])

    monkeypatch.setattr(os, "scandir", reversed_scan)
    assert made.trace() == {"p"}


RECORD = """\
../../../bin/toy,sha256={other},10
__editable___toy_finder.py,sha256={other},10
toylib-1.dist-info/direct_url.json,sha256={other},4
toylib.py,sha256={content},11
__pycache__/toylib.cpython-311.pyc,,
"""


def test_another_version_or_the_same_installed_again_is_noticed(tmp_path, monkeypatch):
    """A distribution that provides `toylib` requires one that provides `toydeep`."""
    installed = tmp_path / "site-packages"
    for name, requires in (("toylib", "Requires-Dist: toydeep\n"), ("toydeep", "")):
        described = installed / f"{name}-1.dist-info"
        described.mkdir(parents=True)
        (installed / f"{name}.py").write_text(TWO)
        (described / "METADATA").write_text(f"Name: {name}\nVersion: 1\n{requires}")
        (described / "top_level.txt").write_text(f"{name}\n")
    monkeypatch.syspath_prepend(str(installed))
    found = project(tmp_path, times("FACTOR", "from toylib import FACTOR"))
    unread = Project(tmp_path / "unread", {"q": "other:f"}, other=SAME)
    assert unread.trace() == {"q"}
    for name in ("toylib", "toydeep"):
        metadata = installed / f"{name}-1.dist-info" / "METADATA"
        metadata.write_text(metadata.read_text().replace("Version: 1", "Version: 2"))
        assert found.why() == f"version of {name}: 1 -> 2"
        assert found.trace() == {"p"}
        assert unread.trace() == set()
    record = installed / "toylib-1.dist-info" / "RECORD"
    record.write_text(RECORD.format(content="abc", other="a machine"))
    assert found.trace() == {"p"}
    lines = RECORD.format(content="abc", other="another machine").splitlines()
    record.write_text("\n".join(reversed(lines)))
    assert found.trace() == set(), "the same wheel on another machine, installed by another program"
    record.write_text(RECORD.format(content="def", other="a machine"))
    assert found.why().startswith("version of toylib: 2 sha256:")
    assert found.trace() == {"p"}


@pytest.mark.filterwarnings("ignore:Implicit None:DeprecationWarning")
def test_code_copied_beside_packages_has_no_version_and_is_always_traced(tmp_path, monkeypatch):
    packages = tmp_path / "site-packages"
    (packages / "damaged-1.dist-info").mkdir(parents=True)
    (packages / "damaged-1.dist-info" / "top_level.txt").write_text("toycopied\n")
    (packages / "toycopied.py").write_text(TWO)
    monkeypatch.syspath_prepend(str(packages))
    code = times("FACTOR", "from toycopied import FACTOR")
    found = Project(tmp_path / "p", {"p": "model:f"}, model=code)
    assert found.trace() == found.trace() == {"p"}
    assert "no package has toycopied" in found.notes[-1]


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


def test_hooks_are_gone_after_a_trace(tmp_path):
    import safetensors.numpy
    import tensorstore

    def hooks():
        of_python = builtins.__import__, os.stat, type(os.environ).__getitem__
        loader = importlib.machinery.SourceFileLoader
        of_imports = loader.get_code, sys.modules["_frozen_importlib"]._gcd_import
        starts = threading.Thread.start, sys.modules["_posixsubprocess"].fork_exec
        of_libraries = safetensors.numpy.safe_open, tensorstore.open, tensorstore.KvStore.open
        return (*of_python, *of_imports, *starts, *of_libraries)

    with observing(Observer(str(tmp_path))):  # the first one watches variables for good
        pass
    before = hooks()
    project(tmp_path, SAME)
    assert hooks() == before
    broken = Project(tmp_path / "broken", {"p": "model:f"}, model="raise ValueError\n")
    with pytest.raises(ManifestError):
        broken.trace()
    assert hooks() == before


def test_what_an_observer_itself_imports_is_not_noted(tmp_path, monkeypatch):
    """Python 3.12.3 imports `ntpath` whenever a Path is made: noting an import must not note its own."""
    asked = observer_module.is_installed

    def is_installed(file):
        import ntpath  # noqa: F401

        return asked(file)

    monkeypatch.setattr(observer_module, "is_installed", is_installed)
    (tmp_path / "helper.py").write_text("FACTOR = 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    with observing(Observer(tmp_path)):
        assert importlib.import_module("helper").FACTOR == 2
        exec("import helper", {"__name__": "user"})
    del sys.modules["helper"]


@pytest.mark.parametrize(
    ("call", "given", "noted"),
    [
        ("MjModel.from_xml_path", ("plain.xml",), ["plain.xml"]),
        ("MjModel.from_xml_path", ("parts.xml",), ["parts.xml", None]),
        ("MjModel.from_xml_path", (b"parts.xml",), [b"parts.xml", None]),
        ("MjModel.from_xml_path", ("PARTS.XML",), ["PARTS.XML", None]),
        ("MjModel.from_xml_path", ("parts.urdf",), ["parts.urdf", None]),
        ("MjModel.from_xml_path", ("parts.xml", {"arm.stl": b""}), ["parts.xml"]),
        ("MjModel.from_xml_path", ("parts.xml", {"leg.stl": b""}), ["parts.xml", None]),
        ("MjModel.from_xml_path", ("parts.xml", {"meshes/arm.stl": b""}), ["parts.xml"]),
        ("MjModel.from_xml_path", ("absent.xml",), ["absent.xml"]),
        ("MjModel.from_xml_string", ("<mujoco/>",), []),
        ("MjModel.from_xml_string", ('<include file="arm.xml"/>',), [None]),
        ("MjModel.from_xml_string", (b"<include file='arm.xml'/>",), [None]),
        ("MjModel.from_xml_string", ('<include file="in/arm.xml"/>', {"arm.xml": b""}), []),
        ("MjModel.from_binary_path", ("parts.mjb",), ["parts.mjb"]),
        ("MjSpec.from_file", ("parts.xml",), ["parts.xml", None]),
        ("MjSpec.from_file", ("parts.xml", {}, {"arm.stl": b""}), ["parts.xml"]),
        ("MjSpec.from_string", ('<include file="arm.xml"/>', {}), [None]),
    ],
)
def test_models_of_mujoco_are_files_that_may_name_others(call, given, noted, tmp_path, monkeypatch):
    """Its own code, in C++, opens them without an event of Python."""

    class Stand:
        @staticmethod
        def load(*given):
            return given

    kind, method = call.split(".")
    setattr(Stand, method, staticmethod(Stand.load))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain.xml").write_text("<mujoco/>")
    for name in ("parts.xml", "PARTS.XML", "parts.mjb"):
        (tmp_path / name).write_text('<mujoco><mesh file = "meshes/arm.stl"/></mujoco>')
    (tmp_path / "parts.urdf").write_text('<robot><mesh filename="package://arm.stl"/></robot>')
    monkeypatch.setitem(sys.modules, "mujoco", SimpleNamespace(**{kind: Stand}))
    found = []
    readers = NativeReaders(lambda label, path: found.append((label, path)))
    readers.wrap()
    assert getattr(Stand, method)(*given) == given
    readers.unwrap()
    assert found == [(f"mujoco.{call}", each) for each in noted]
    assert getattr(Stand, method)(*given) == given
    assert len(found) == len(noted)


def test_pictures_that_opencv_reads_are_files(monkeypatch):
    """Its own code, in C++, opens them without an event of Python."""
    monkeypatch.setitem(sys.modules, "cv2", SimpleNamespace(imread=lambda path, *_: path))
    found = []
    readers = NativeReaders(lambda label, path: found.append((label, path)))
    readers.wrap()
    assert sys.modules["cv2"].imread("cat.png", 1) == "cat.png"
    readers.unwrap()
    assert found == [("cv2.imread", "cat.png")]


def test_files_of_shared_memory_are_noticed_however_they_are_opened(tmp_path):
    with (
        tempfile.NamedTemporaryFile(dir="/dev/shm") as read,
        tempfile.NamedTemporaryFile(dir="/dev/shm") as mapped,
    ):
        mapped.write(b"shared")
        mapped.flush()
        observer = Observer(str(tmp_path))
        with observing(observer):
            open(read.name).close()
            opened = _posixshmem.shm_open(os.path.basename(mapped.name), os.O_RDONLY, 0o600)
            mmap.mmap(opened, 0, access=mmap.ACCESS_READ).close()
            os.close(opened)
        noticed = {local_path(each.name, str(tmp_path)) for each in observer.seen().inputs}
        assert noticed == {read.name, mapped.name}
