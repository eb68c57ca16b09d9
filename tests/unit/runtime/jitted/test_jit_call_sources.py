"""Sources of a function are found again, and differ after each edit that counts."""

import sys
import types

import pytest

from prejit.runtime.base.files import digest_of
from prejit.runtime.format.constants import encode
from prejit.runtime.jitted import jit_call
from prejit.runtime.jitted.jit_call import function_state

CELLS = """
from functools import wraps
RATE = 0.5
unread = 1
def logged(function):
    @wraps(function)
    def call(x):
        return function(x) + 1
    return call
class Layer:
    bias = 1.0
    def __call__(self, x):
        return x + self.bias
    @property
    def twice(self):
        return 2
    @staticmethod
    def half(x):
        return x / 2
layer = Layer()
@logged
def helper(x):
    return layer(x) * Layer().twice * Layer.half(3)
def step(x, by=3):
    return [helper(each) * RATE for each in (x, by)]
"""
EDITS = {
    "RATE = 0.5": "RATE = 0.6",
    "function(x) + 1": "function(x) + 2",
    "x + self.bias": "x - self.bias",
    "return 2": "return 3",
    "x / 2": "x / 3",
    "* Layer().twice": "",
    "by=3": "by=4",
    "(x, by)": "(by, x)",
}


def state(source, file="<cell>", function="step", **more):
    variables = {"__name__": "cells", **more}
    exec(compile(source, file, "exec"), variables)
    return function_state(eval(function, variables), ())


@pytest.mark.parametrize("edited", EDITS)
def test_a_function_without_a_file_is_compared_by_its_code_and_nothing_else(edited):
    assert CELLS.count(edited) == 1
    assert state(CELLS.replace(edited, EDITS[edited])) != state(CELLS)
    assert state(f"# a comment\n{CELLS}".replace("unread = 1", "unread = 2")) == state(CELLS)
    line = CELLS[: CELLS.index("def step")].count("\n") + 1
    own = {"default by": 3, "function": "cells:step", "place in its file": encode((line,))}
    assert state(CELLS, "cells.py", __file__="cells.py") == own  # its file is compared


ALIKE = """
def chosen(first):
    if first:
        def step(x): return x + 1
    else:
        def step(x): return x + 2
    return step
steps = {True: lambda x: x + 1, False: lambda x: x + 2}
def generated(first):
    variables = {**globals()}
    exec(f"def step(x): return x + {2 - first}", variables)
    return variables["step"]
"""


@pytest.mark.parametrize("of", ["chosen({})", "steps[{}]", "generated({})"])
def test_functions_of_one_name_in_one_file_differ(of):
    one, other = (
        state(ALIKE, "alike.py", of.format(first), __file__="alike.py") for first in (True, False)
    )
    assert one["function"] == other["function"]
    assert one != other


def test_a_module_that_is_not_imported_is_found_and_no_missing_one(tmp_path, monkeypatch):
    places = ("module no_such", "module sys", "package no-such", "package pytest", "self")
    assert jit_call.sources(places) == {"package pytest": pytest.__version__}
    monkeypatch.syspath_prepend(tmp_path)
    found = []
    for text in ("1", "2", "1"):
        (tmp_path / "not_imported_yet.py").write_text(text)
        found.append(jit_call.sources(["module not_imported_yet"]))
    assert found[0] == found[2] != found[1]
    assert "not_imported_yet" not in sys.modules


@pytest.mark.parametrize(
    ("spec", "file", "name"),
    [
        (None, "/srv/app/train.py", "train"),
        ("app.train", "train.py", "app.train"),
        ("app.__main__", None, "app.__main__"),
        ("__main__", "/srv/train.v2.py", "train.v2"),  # a directory, a zip file or cProfile
        (None, None, "__main__"),
    ],
)
def test_a_script_has_the_name_of_its_file(monkeypatch, spec, file, name):
    script = types.ModuleType("__main__")
    script.__spec__ = spec and types.SimpleNamespace(name=spec)
    if file is not None:
        script.__file__ = file
    monkeypatch.setitem(sys.modules, "__main__", script)
    assert jit_call.module_name("__main__") == name
    assert jit_call.module_name("app.layers") == "app.layers"


def test_a_module_is_found_in_a_namespace_package_inside_of_one_that_is_not_imported(
    tmp_path, monkeypatch
):
    inner = tmp_path / "prejit_outer" / "without_init" / "deeper"
    inner.mkdir(parents=True)
    (tmp_path / "prejit_outer" / "__init__.py").write_text("raise ImportError")
    (inner / "module.py").write_text("k = 1")
    monkeypatch.syspath_prepend(tmp_path)
    place = "module prejit_outer.without_init.deeper.module"
    assert jit_call.sources([place]) == {place: digest_of(b"k = 1")}
