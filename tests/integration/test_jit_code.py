"""A program of `jit` is for the code and the globals of its build: jax compiles what changed, and says so."""

import importlib
import json
import re
import sys
from dataclasses import replace

import pytest
from tests.processes import ran

from prejit.compiler import build
from prejit.runtime import load
from prejit.runtime.jitted.jit_call import state_misfit

from .conftest import functions_manifest

STEPS = """
import threading
from dataclasses import dataclass, field
from functools import cached_property, partial, wraps

import jax
import jax.numpy as jnp
import settings_of_step as settings
from parts_of_step import Part, helper, twice

@dataclass(frozen=True)
class Config:
    rate: float = 0.5

class Layer:
    bias = 1.0
    def __init__(self, config):
        self.config = config
    @property
    def rate(self):
        return self.config.rate
    def __call__(self, x):
        return x * self.rate + self.bias

def logged(function):
    @wraps(function)
    def call(*args):
        return function(*args) + SHIFT
    return call

SHIFT, TABLE, LOCK = 0.0, jnp.arange(4.0), threading.Lock()
layer, activation = Layer(Config()), jnp.tanh
inner = jax.jit(lambda x: x + 1)

@logged
def shifted(x):
    return x * 2

def step(x):
    with LOCK:
        x = jax.vmap(lambda row: row * settings.SCALE)(layer(x)) + TABLE
    return activation(inner(helper(shifted(x)))) + Part(2).value(x) + twice(x)
"""
SETTINGS = "SCALE = 3.0\nOTHER = 1\n"
PARTS = """
class Part:
    def __init__(self, power):
        self.power = power
    def value(self, x):
        return x ** self.power

def doubled(x):
    return x + x

helper, twice = (lambda x: x - 0.5), doubled
"""
CHANGED = {
    "a literal": ("steps", "self.rate + self", "self.rate - self"),
    "a default": ("steps", "rate: float = 0.5", "rate: float = 0.25"),
    "an attribute of a class": ("steps", "bias = 1.0", "bias = 2.0"),
    "a property": ("steps", "return self.config.rate", "return self.config.rate + 1"),
    "a decorator": ("steps", "function(*args) + SHIFT", "function(*args) * 2"),
    "a global of a decorator": ("steps", "LOCK = 0.0", "LOCK = 1.0"),
    "an array": ("steps", "jnp.arange(4.0)", "jnp.ones(4)"),
    "a library's function": ("steps", "jnp.tanh", "jnp.sin"),
    "a jitted function": ("steps", "lambda x: x + 1", "lambda x: x + 2"),
    "a module's value": ("settings", "SCALE = 3.0", "SCALE = 4.0"),
    "another module's lambda": ("parts", "x - 0.5", "x - 1.5"),
    "another module's method": ("parts", "x ** self", "x * self"),
    "another module's function": ("parts", "return x + x", "return x * x"),
    "another function": (
        "parts",
        "twice = (lambda x: x - 0.5), doubled",
        "twice = doubled, doubled",
    ),
}
SAME = {
    "nothing": ("steps", "", ""),
    "lines and comments": ("steps", "SHIFT, TABLE", "# a comment\n\nSHIFT, TABLE"),
    "what no code reads": ("settings", "OTHER = 1", "OTHER = 2"),
    "a lock": ("steps", "threading.Lock()", "threading.RLock()"),
}
RUN = """
import importlib, json, sys, warnings
import jax, numpy as np
from prejit.runtime import jit

x = np.arange(4, dtype=np.float32)
def run(step, bundle):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function = jit(step, bundle=bundle, name="step")
        same = np.array_equal(function(x), jax.jit(step)(x))
    return [same, function.stats().loaded, [str(each.message) for each in caught]]
"""
EACH = """
found = []
for directory in sys.argv[2:]:
    sys.path[0] = directory
    for name in ("steps", "parts_of_step", "settings_of_step"):
        sys.modules.pop(name, None)
    importlib.invalidate_caches()
    found.append(run(importlib.import_module("steps").step, sys.argv[1]))
print(json.dumps(found))
"""
ITSELF = """
if __name__ == "__main__":
    print(json.dumps(run(step, sys.argv[1])))
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory, build_cache):
    at = tmp_path_factory.mktemp("code")
    write(at)
    text = 'function = "steps:step"\nargs = ["float32[4]"]'
    manifest = functions_manifest(at / "m.toml", {"step": text})
    return build(manifest, at, cache=build_cache, quiet=True).path


def write(at, changed="", old="", new=""):
    """Write the program's modules, one of them with a change."""
    at.mkdir(exist_ok=True)
    for name, text in (("steps", STEPS), ("settings", SETTINGS), ("parts", PARTS)):
        assert name != changed or old in text
        changed_text = text.replace(old, new, 1) if name == changed and old else text
        (at / (name if name == "steps" else f"{name}_of_step")).with_suffix(".py").write_text(
            changed_text
        )
    return at


def test_code_and_globals_are_those_of_the_build(bundle, tmp_path, run_python):
    changes = {**SAME, **CHANGED}
    places = [write(tmp_path / str(n), *change) for n, change in enumerate(changes.values())]
    done = run_python(RUN + EACH, bundle, *places)
    for what, (is_right, loaded, warned) in zip(changes, json.loads(done.stdout), strict=True):
        assert is_right, what
        assert loaded == ["step"] * (what in SAME), (what, warned)
        said = r"step: (the code of \w+ has changed since the build|global .*: expected)"
        assert len(warned) == (what in CHANGED), what
        assert all(re.search(said, each) for each in warned), warned


def test_a_script_is_the_module_that_the_manifest_names(bundle, tmp_path):
    write(tmp_path)
    script = tmp_path / "steps.py"
    script.write_text(STEPS + RUN + ITSELF)
    assert json.loads(ran(sys.executable, script, bundle).stdout) == [True, ["step"], []]


def test_what_another_python_compiled_is_not_compared(bundle, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(write(tmp_path, *CHANGED["a literal"]))
    step = importlib.import_module("steps").step
    built = load(bundle).config.programs[0]
    assert "the code of steps has changed" in state_misfit(built, step, ())
    tag = sys.implementation.cache_tag
    for state in (
        {place.replace(tag, "cpython-399"): each for place, each in built.state.items()},
        {},
    ):
        assert state_misfit(replace(built, state=state), step, ()) == ""
