"""User code: whatever it raises is an error with its line, and each manifest has modules of its own."""

import json
import os
import re
import sys
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.manifests import functions_manifest

from prejit.compiler.lowering.user.source_modules import imports_of
from prejit.compiler.manifest.reading import read_manifest
from prejit.compiler.pipeline.lower import program_lowering
from prejit.compiler.pipeline.lower.model_checks import check_planned
from prejit.compiler.pipeline.plan import Plan, plan_build
from prejit.compiler.pipeline.workspace import Workspace, find_code, values_of
from prejit.compiler.progress import Quiet
from prejit.compiler.store.directory_store import DirectoryStore
from prejit.runtime.errors import BuildError, CheckpointError, ManifestError

KEYS = 'function = "mymodel:f"; args = { x = "float32[3]" }'


@dataclass(frozen=True)
class Project:
    """A manifest with a module beside it, and what was imported for it."""

    plan: Plan
    store: DirectoryStore

    @cached_property
    def code(self):
        return find_code(self.plan.manifest)


def project(directory, module, keys=KEYS, **others):
    """A manifest of a program with these keys, a module beside it, and other files by name."""
    for name, content in {"mymodel": module, **others}.items():
        path = directory / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    manifest = read_manifest(functions_manifest(directory / "m.toml", {"p": keys}))
    store = DirectoryStore.open(directory / "cache")
    return Project(plan_build(manifest, store), store)


def lower(found):
    [program] = found.plan.programs
    # It has no model.
    space = Workspace(found.plan, None, lambda: found.code, found.store, Quiet(), None)
    return program_lowering.lower(space, program)


PANIC = """
class PanicException(BaseException):  # as pyo3's
    pass
"""


def test_a_module_or_a_trace_that_fails_has_its_line(tmp_path):
    for line, message in (
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("raise PanicException('a panic')", "PanicException: a panic"),
        ("def g(): g()\ng()", "RecursionError: maximum recursion depth exceeded"),
        ("f = (", "SyntaxError: "),
        ("raise KeyboardInterrupt", ""),
        ("def f(x): sys.exit(3)", "SystemExit: 3"),
        ("def f(x): return f(x)", "RecursionError: "),
        ("def f(x): return x + jax.numpy.ones(4)", "TypeError: "),
        ("def f(x): raise KeyboardInterrupt", ""),
    ):
        kind, said = ManifestError, "program 'p': function: cannot import 'mymodel': "
        if "def f" in line:
            kind, said = BuildError, "program p: cannot lower mymodel:f: "
        with pytest.raises(kind if message else KeyboardInterrupt) as caught:
            lower(project(tmp_path, f"import jax, sys{PANIC}\n{line}\n"))
        if message:
            assert f"m.toml: {said}{message}" in str(caught.value)
            assert f"({tmp_path / 'mymodel.py'}, line 5)" in str(caught.value)


def test_what_is_not_found_as_meant_is_an_error_with_its_place(tmp_path):
    with pytest.raises(ManifestError, match=r"ZeroDivisionError.*helper.py, line 2\)"):
        lower(project(tmp_path, "import helper\n", helper="\n1 / 0\n"))
    module = "def __getattr__(name):\n    raise SystemExit(4)\n"
    with pytest.raises(ManifestError, match=r"'f' of 'mymodel': SystemExit: 4 .*line 2\)"):
        lower(project(tmp_path, module))
    for name in ("glob", "time"):
        keys, other = KEYS.replace("mymodel", name), {name: "def f(x):\n    return x\n"}
        expected = rf"expected '{name}' to be {tmp_path}/{name}.py"
        with pytest.raises(ManifestError, match=expected) as caught:
            _ = project(tmp_path, "", keys, **other).code
        assert caught.value.hint == f"rename {tmp_path}/{name}.py"


def test_unreadable_parameters_are_named_with_the_program(tmp_path):
    (tmp_path / "p.safetensors").touch()
    (tmp_path / "directory").mkdir()
    for params in ("p.safetensors", "directory"):
        keys = f'{KEYS}\nparams = "{params}"'
        said = rf"{tmp_path}/m.toml: program 'p': params: .*{params}: "
        with pytest.raises(CheckpointError, match=said) as caught:
            _ = project(tmp_path, "def f(params, x):\n    return x\n", keys).code
        assert "write" in str(caught.value.hint) or "save" in str(caught.value.hint)


@pytest.fixture
def built(warm, tmp_path):
    """Builds a project of a module in a process of its own, which the user's code may break."""

    def built(module, status=0):
        project(tmp_path, module)
        places = ("--cache", tmp_path / "cache", "-o", tmp_path / "artifacts", "--json")
        done = warm.prejit("build", tmp_path / "m.toml", *places, timeout=120, quick=True)
        assert done.returncode == status, done.stderr
        if status == 0:  # one process has written the bundle, and said so
            [found] = json.loads(done.stdout)
            assert (found["compiled"], found["written"]) == (1, True)
        return done.stderr

    return built


def test_code_cannot_end_prejit_without_an_error(tmp_path, built):
    said = rf"'?p'?: .*SystemExit: os._exit\(0\) \({tmp_path}/mymodel.py"
    for code, status in (("os._exit(0)", 2), ("def f(x):\n    os._exit(0)", 1)):
        assert re.search(said, built(f"import os\n{code}\n", status))


def test_a_fork_ends_where_it_leaves_a_function(built):
    module = """
import os
def f(x):
    for code in (1, 3):
        child = os.fork()
        if child == 0 and code == 3:
            os._exit(3)  # by itself, before it leaves
        if child == 0:
            return x * 3
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code
    return x * 2
"""
    # Once in each of its two traces: not where it ends by itself.
    assert built(module).count("prejit ends that process") == 2


def test_what_code_replaces_is_put_back_and_what_it_prints_does_not_come_between_json(built):
    module = """
import builtins, os, subprocess, sys
print("printed on import")
os.write(1, b"written on import\\n")
subprocess.run(["echo", "of a child"], check=True)
builtins.__dict__.pop("open"); sys.modules.pop("hashlib"); os.replace = print
def f(x):
    print("printed while traced")
    builtins.open = sys.modules["hashlib"] = None
    return x * 2
"""
    said = built(module)
    for text in ("printed on", "written on", "of a child", "printed while"):
        assert text in said


NAMED = """
import jax, jax.numpy as jnp
import numpy as np
from flax import nnx
def f(state, x, kind="a"):
    return state + x
def by_place(x, kind, /):
    return x
def args():
    return {"state": jnp.ones(3), "x": jnp.ones(3)}
class Head(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(jnp.ones((4, 8)))
    def __call__(self, x):
        return x @ self.kernel[...]
head = Head()
"""


def test_names_are_checked_before_a_trace(tmp_path):
    save_file({"kernel": np.ones((8, 4), np.float32)}, tmp_path / "w.safetensors")
    both = 'args = { state = "float32[3]", x = "float32[3]" }'
    of_function, wide = 'args = "mymodel:args"', both.replace("float32", "float64", 1)
    for section, message, hint in (
        (f'{of_function}\ndonate = ["sate"]', r"donate: .*\(did you mean \"state\"\?\)", ""),
        (f"{of_function}\ndonate = [9]", r"donate: .* one of \"state\", \"x\"; found 9", ""),
        (f'{of_function}\nmask = "xx"\npad = "unchecked"', r"mask: .*mean \"x\"\?", ""),
        (f'{of_function}\nmask = "x"\npad = "unchecked"', "mask: expected bool, found float32", ""),
        (f'{both}\nstatic = {{ knd = ["a"] }}', r"static: .* x, kind; found knd \(.*\"kind\"", ""),
        (
            'args = ["float32[3]"]\nstatic = { kind = ["a"] }',
            "static: .* given by name, found kind, which stands before the / of mymodel:by_place",
            "a program gets its static values by name",
        ),
        (wide, r"args\['state'\]: .* 32 bits", "write float32, as jax computes; calls may still"),
        ('args = ["float32[4]"]\nparams = "w.safetensors"', r"params: kernel: .*\[4, 8\]", ""),
    ):
        text = KEYS.replace('args = { x = "float32[3]" }', section)
        name = ":head" if "params" in section else ":by_place" if "kind =" in section else ":f"
        found = project(tmp_path, NAMED, text.replace(":f", name))
        with pytest.raises(ManifestError, match=rf"m.toml: program 'p': {message}") as raised:
            check_planned(found.plan, found.store)
        assert str(raised.value.hint).startswith(hint)


WRAPPED = """
import functools, jax
def g(x):
    return x / x.sum(axis=0)
def by_rows(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*(each[::-1] for each in args), **kwargs)
    return wrapper
f = """


def test_a_wrapper_may_treat_names_otherwise_than_places(tmp_path):
    expected = r"'p': args: expected a list, .* x by position"
    keys = KEYS.replace("[3]", "[3, 3]")
    for made in ("jax.jit(jax.vmap(g, in_axes=1))", "jax.grad(lambda x: x.sum())", "by_rows(g)"):
        with pytest.raises(ManifestError, match=expected) as caught:
            lower(project(tmp_path, WRAPPED + made, keys))
        assert caught.value.hint == "list the arguments in their order, as in args = [...]"
    for alike in ("jax.checkpoint(g)", "functools.partial(g)"):
        assert len(lower(project(tmp_path / alike, WRAPPED + alike)).results) == 1


def test_a_modules_own_arrays_of_64_bits_become_those_of_32(tmp_path):
    module = """
import jax, numpy as np
@jax.tree_util.register_dataclass
@__import__("dataclasses").dataclass
class Scale:
    by: object
    def __call__(self, x):
        return x * self.by
f = Scale(np.linspace(0, 1, 3))
"""
    found = project(tmp_path, module)
    lower(found)
    assert [str(each.dtype) for each in values_of(found.code, "p").values()] == ["float32"]


HELD = """
import jax.numpy as jnp
from flax import nnx
class Scale(nnx.Module):
    def __init__(self, by):
        self.by = nnx.Param(by)
    def __call__(self, x):
        return x * self.by.get_value()
f = Scale(WEAK)
"""


@pytest.mark.parametrize("weak", ["2.5", "jnp.asarray(2.5)"])
def test_a_weak_parameter_of_a_module_leaves_the_dtype_of_its_arguments(tmp_path, weak):
    keys = KEYS.replace("float32[3]", "bfloat16[3]")
    (result,) = lower(project(tmp_path, HELD.replace("WEAK", weak), keys)).results
    assert result == "[] bfloat16[3]"


STATEFUL = """
import jax, jax.numpy as jnp
from flax import nnx
class Counter(nnx.Module):
    def __init__(self, new):
        self.count, self.new = nnx.Variable(jnp.zeros(())), new
        self.layers = nnx.List([nnx.Linear(3, 3, rngs=nnx.Rngs(0))])
    def __call__(self, x):
        self.count.set_value(self.new(self.count.get_value()))
        @nnx.scan(in_axes=(None, nnx.Carry, 0), out_axes=nnx.Carry)
        def run(layers, x, _):
            return layers[0](x)
        return run(self.layers, x, jnp.arange(2)) * self.count.get_value()
f = Counter(NEW)
"""


@pytest.mark.parametrize("new", ["lambda n: n + 1", "jax.jit(lambda n: n + 1)", "lambda n: n"])
def test_a_module_that_changes_itself_is_refused(tmp_path, new):
    """nnx.jit keeps what it sets, jax.jit refuses it; a bundle would repeat its first call for ever."""
    found = project(tmp_path, STATEFUL.replace("NEW", new))
    if new == "lambda n: n":
        lower(found)
        return
    said = r"leaves its variables as they are, .* count\n"
    with pytest.raises(ManifestError, match=said) as caught:
        lower(found)
    assert ".eval()" in str(caught.value.hint)


LAYERS = """
import dataclasses, jax
import numpy as np
@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layers:
    parts: object
    def __call__(self, x):
        return x * self.parts[0]["by"] - self.parts[1]
f = Layers([{"by": np.ones(3)}, np.ones(3)])
twice = Layers([{"by": {"a": np.ones(3)}, "by.a": np.ones(3)}])
"""


def test_arrays_of_a_module_have_the_names_of_params(tmp_path):
    """A pytree and an orbax checkpoint name an array by the keys that lead to it, joined by dots."""
    save_file(dict.fromkeys(("parts.0.by", "parts.1"), np.ones(3)), tmp_path / "w.safetensors")
    found = project(tmp_path, LAYERS, f'{KEYS}\nparams = "w.safetensors"')
    lower(found)
    assert [*values_of(found.code, "p")] == ["parts.0.by", "parts.1"]
    said = r"different names of arrays, found 'parts\.0\.by\.a' twice"
    with pytest.raises(ManifestError, match=said):
        lower(project(tmp_path, LAYERS, KEYS.replace(":f", ":twice")))


SETTING = """
import os
import jax
import jax.numpy as jnp
assert os.environ.get("SET_BY_A_MODULE") is None
assert not jax.config.jax_enable_x64
os.environ["SET_BY_A_MODULE"] = "1"
del os.environ["PREJIT_TEST_VARIABLE"]
jax.config.update("jax_enable_x64", {x64})
os.chdir(os.path.dirname(__file__))
def f(x):
    assert os.environ["SET_BY_A_MODULE"] == "1"
    assert "PREJIT_TEST_VARIABLE" not in os.environ
    assert os.getcwd() == os.path.dirname(__file__)
    return x + jnp.arange(3, dtype=float)
"""


def test_settings_of_modules_stay_apart(tmp_path, monkeypatch):
    monkeypatch.setenv("PREJIT_TEST_VARIABLE", "1")
    environ, directory = dict(os.environ), os.getcwd()
    both = [project(tmp_path / x64, SETTING.replace("{x64}", x64)) for x64 in ("True", "False")]
    for _ in range(2):
        results = [lower(each).results for each in both]
        assert results == [("[] float64[3]",), ("[] float32[3]",)]
        assert (dict(os.environ), os.getcwd()) == (environ, directory)


BY_NAME = """
import dataclasses
import pickle
import sys
import jax
from lib import scales
sys.path.append(__file__.rpartition("/")[0] + "/more")
import added
@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Pair:
    a: jax.Array
    b: jax.Array
def f(x):
    from lib.late import LATE  # while it is traced
    assert sys.modules["mymodel"].Pair is Pair
    assert pickle.loads(pickle.dumps(Pair)) is Pair
    assert pickle.loads(pickle.dumps(scales.Scale(2))) == scales.Scale(2)
    return Pair(x * scales.Scale(2).factor, x + LATE + added.ADDED)
"""
SCALES = """
import dataclasses
from . import late  # relative
@dataclasses.dataclass(frozen=True)
class Scale:
    factor: "int"
"""


def test_manifests_with_modules_of_one_name_each_have_their_own(tmp_path):
    path, modules = list(sys.path), set(sys.modules)
    files = {"lib__scales": SCALES, "lib__late": "LATE = 1\n", "more__added": "ADDED = {}\n"}
    projects = []
    for n in (1, 2, 2):
        others = {name: content.format(n) for name, content in files.items()}
        projects.append(project(tmp_path / f"{n}", BY_NAME, **others))
    first, second, again = map(lower, projects)
    assert first.results == second.results
    assert first.portable.raw_digest != second.portable.raw_digest == again.portable.raw_digest
    used_again = lower(projects[0])
    assert used_again.portable.raw_digest == first.portable.raw_digest
    assert sys.path == path
    assert not {"mymodel", "lib", "lib.scales", "added"} & (set(sys.modules) - modules)


@pytest.mark.parametrize(
    ("source", "names", "are_computed"),
    [
        ("import a.b, c as d", {"a.b", "c"}, False),
        ("from ..a import b", {"top.a", "top.a.b"}, False),
        ("importlib.import_module(name='a')", {"a"}, False),
        ("import_module('..a', 'top.other')", {"top.a"}, False),
        ("import_module('.a', package=__package__)", {"top.inner.a"}, False),
        ("from importlib import import_module as load\nload('a')", {"a"}, False),
        ("__import__('a', globals(), None, ['b'], 1)", {"top.inner.a", "top.inner.a.b"}, False),
        ("pkgutil.resolve_name('a.b:C')", {"a.b"}, False),
        ("if find_spec('a') or find_spec(b): pass", {"a"}, False),
        ("__all__ = ['a']", {"top.inner.a"}, False),
        ("import_module(f'a.{b}')", set(), True),
        ("import_module('.a', b)", set(), True),
        ("[*map(importlib.import_module, b)]", set(), True),
        ("spec.loader.exec_module(a)", set(), True),
        ("exec('from a import b')", set(), True),
        ("eval(a)", set(), True),
        ("model.eval(), cell.exec(a)", set(), False),
    ],
)
def test_each_form_of_an_import_is_found_or_said_to_be_computed(source, names, are_computed):
    found = imports_of(source.encode(), "top.inner", is_package=True)
    others = {"importlib", "importlib.import_module"}
    assert ((found.names | found.attributes) - others, found.are_computed) == (names, are_computed)
