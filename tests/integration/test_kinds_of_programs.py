"""`program` and `jit` with the values that people's code has: results of jax.jit, or a refusal by name."""

import enum
import functools
import json
import sys
import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from prejit.compiler import build, program
from prejit.runtime import jit, load
from prejit.runtime.errors import FallbackWarning

X = jnp.arange(4.0)


class Color(enum.Enum):
    RED = 2
    BLUE = 3


class Level(enum.IntEnum):
    LOW = 1


@dataclass(frozen=True)
class Config:
    width: int = 2
    color: Color = Color.RED
    activation: Any = jnp.tanh


class Pair(NamedTuple):
    first: int
    second: float


class ByIdentity:
    def __init__(self, k):
        self.k = k

    def scaled(self, x):
        return x * self.k


class Slotted:
    __slots__ = ("k",)

    def __init__(self, k):
        self.k = k

    def __hash__(self):
        return hash(self.k)

    def __eq__(self, other):
        return type(other) is Slotted and other.k == self.k


class Net(nnx.Module):
    def __init__(self, width):
        self.linear = nnx.Linear(4, width, rngs=nnx.Rngs(0))
        self.width = width


def twice(v):
    return v * 2


def thrice(v):
    return v * 3


def number(c):
    """Return a number that tells values of all kinds apart."""
    match c:
        case Config():
            return c.activation(c.width / 4.0) * number(c.color)
        case nnx.GraphDef():
            return float(np.log2(len(str(c))))
        case None:
            return 7
        case enum.Enum():
            return c.value
        case tuple() | frozenset():
            return sum(map(number, c))
        case str():
            return len(c)
        case np.dtype():
            return c.itemsize
        case type():
            return np.dtype(c).itemsize
        case ByIdentity() | Slotted():
            return c.k
    return c(0.5) if callable(c) else c


def use(x, c):
    return x * number(c)


STATIC = {
    "none": (None, 7),
    "float": (0.5, 0.25),
    "zero": (0.0, 1.0),
    "integer": (1, 2),
    "bool": (True, False),
    "complex": (1 + 2j, 2 + 1j),
    "tuple": ((1, 2.5, None), (1, 2.5, 3)),
    "frozenset": (frozenset({1, 2}), frozenset({1, 3})),
    "enum": (Color.RED, Color.BLUE),
    "integer-enum": (Level.LOW, 2),
    "dataclass": (Config(), Config(color=Color.BLUE)),
    "dataclass-function": (Config(activation=twice), Config(activation=thrice)),
    "named-tuple": (Pair(1, 2.0), Pair(2, 2.0)),
    "slots": (Slotted(2), Slotted(3)),
    "identity": (ByIdentity(2), ByIdentity(3)),
    "function": (twice, thrice),
    "lambda": (lambda v: v * 2, lambda v: v * 3),
    "partial": (functools.partial(pow, 2), functools.partial(pow, 3)),
    "jitted": (jnp.tanh, jnp.sin),
    "dtype": (np.dtype("float32"), np.dtype("float16")),
    "scalar-type": (jnp.float32, jnp.float16),
    "numpy-scalar": (np.float32(2), np.float32(3)),
    "graphdef": tuple(nnx.split(Net(width))[0] for width in (2, 3000)),
}
"""Values of a static argument: what the bundle is built with, and another one."""


@pytest.fixture(scope="module")
def static_bundle(tmp_path_factory, build_cache):
    programs = [
        program(jit(use, bundle="none", name=name, static_argnames="c"), X, c)
        for name, (c, _) in STATIC.items()
    ]
    output = tmp_path_factory.mktemp("static")
    return build(programs, output, name="static", cache=build_cache, quiet=True).path


@pytest.fixture(scope="module")
def loaded(static_bundle):
    return load(static_bundle, on_mismatch="error")


@pytest.mark.parametrize("name", STATIC)
def test_a_static_value_of_any_kind_chooses_its_program(loaded, name):
    built, other = STATIC[name]
    function = jit(use, bundle=loaded, name=name, static_argnames="c")
    plain = jax.jit(use, static_argnames="c")
    np.testing.assert_array_equal(function(X, built), plain(X, built))
    np.testing.assert_array_equal(loaded.call(name, X, c=built), plain(X, built))
    (found,) = function.stats().loaded
    assert found.startswith(f"{name}/c=")
    with pytest.warns(FallbackWarning, match=f"{name}/c=.*: c: expected .*, found "):
        np.testing.assert_array_equal(function(X, other), plain(X, other))
    assert function.stats().loaded == (found,)


def test_another_process_finds_equal_static_values(static_bundle, run_python, tmp_path):
    code = f"""
import json, sys
sys.path[:0] = {sys.path!r}
from {__name__} import STATIC, X, jit, load, use

bundle = load(sys.argv[1], on_mismatch="error")
results = {{}}
for name, (c, _) in STATIC.items():
    function = jit(use, bundle=bundle, name=name, static_argnames="c", on_miss="error")
    results[name] = [str(each) for each in function(X, c)]
print(json.dumps(results))
"""
    done = run_python(code, static_bundle, env={"PYTHONHASHSEED": "7"})
    for name, found in json.loads(done.stdout).items():
        assert found == [str(each) for each in use(X, STATIC[name][0])], name


def test_a_method_whose_object_is_static(tmp_path, build_cache):
    def bundled(k):
        function = jit(ByIdentity.scaled, bundle=path, static_argnums=0, name="scaled")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            return function(ByIdentity(k), X).tolist(), len(function.stats().loaded)

    example = jax.jit(ByIdentity.scaled, static_argnums=0)
    path = build(program(example, ByIdentity(3), X), tmp_path, cache=build_cache, quiet=True).path
    assert bundled(3) == ((X * 3).tolist(), 1)
    assert bundled(4) == ((X * 4).tolist(), 0)
