"""Arguments of another structure than the build's, for which jax.jit traces anew, are refused."""

import ctypes
from array import array
from collections import OrderedDict, deque

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prejit.compiler import Program
from prejit.runtime import UsageError, load

X = np.ones(2, np.float32)


def counted(t):
    return t["a"] * (2 if "b" in t else 3)


def scaled(*, x, scale=2.0):
    return x if scale is None else x * scale


def layers(x, d):
    for value in d.values():
        x = x * value + 1
    return {"x": x, "d": d}


def size(x):
    return x.sum() if hasattr(x, "shape") else jnp.float32(len(x))


ZB, BZ = OrderedDict(z=X, b=X * 5), OrderedDict(b=X * 5, z=X)
CALLS = {
    "none_more": (counted, [{"a": X}], [{"a": X, "b": None}], r"unexpected 0\['b'\]"),
    "none_less": (counted, [{"a": X, "b": None}], [{"a": X}], r"0\['b'\] is missing: expected"),
    "none_named": (scaled, {"x": X}, {"x": X, "scale": None}, "unexpected scale"),
    "none_default": (scaled, {"x": X, "scale": None}, {"x": X}, "scale is missing: expected"),
    "turned": (layers, [X, ZB], [X, BZ], "order 'z', 'b', found"),
    "unordered": (layers, [X, ZB], [X, dict(ZB)], "order 'z', 'b', found 'b'"),
    "ordered": (layers, [X, dict(ZB)], [X, ZB], "order 'b', 'z', found 'z'"),
}
"""Functions, arguments that fit their programs, others that do not, and the errors."""


@pytest.fixture(scope="module")
def bundle(build_programs):
    examples = {name: call[:2] for name, call in CALLS.items()}
    examples |= {name: (size, [np.ones(n, "f")]) for name, n in (("row", 2), ("number", ()))}
    examples |= {"kept": (lambda x: x + 1, {"x": X})}
    programs = [
        Program(name, fn=function, args=lambda example=example: example)
        for name, (function, example) in examples.items()
    ]
    return load(build_programs(programs), on_mismatch="error")


CONTAINERS = [1.0, 2.0], (1.0, 2.0), range(2), deque([1.0, 2.0]), array("f", [1, 2])


@pytest.mark.parametrize("value", [*CONTAINERS, memoryview(X), (ctypes.c_float * 2)()])
def test_a_container_is_no_array(bundle, value):
    """NumPy would make an array of it; jax takes its parts, or refuses it."""
    right = np.asarray(value, np.float32)
    for _ in range(2):
        with pytest.raises(UsageError, match="expected 0 as an array, found") as caught:
            bundle.call("row", value)
        assert "numpy.asarray makes an array of a list" in str(caught.value.hint)
        with pytest.raises(UsageError, match="expected 0 as an array, found"):
            bundle.call_by_path("row", {(0,): value})
        np.testing.assert_array_equal(bundle.call("row", right), right.sum())
    with pytest.raises(UsageError, match=r"expected x as an array, found"):
        bundle.bind("kept", x=value)


class Readable:
    """An array of another library."""

    def __len__(self):
        return 2

    def __array__(self, dtype=None, copy=None):
        return X.astype(dtype or X.dtype)


def test_arrays_of_other_libraries_are_taken(bundle):
    for value in (Readable(), X[:], jnp.asarray(X)):
        np.testing.assert_array_equal(bundle.call("row", value), 2)
    np.testing.assert_array_equal(bundle.call("number", np.float32(2)), 2)


def called(way, *name, given):
    return way(*name, **given) if isinstance(given, dict) else way(*name, *given)


def same(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.parametrize("of", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("name", CALLS)
def test_another_structure_is_refused(bundle, name, of):
    """At the first call, and after calls that fit."""
    function, *given, problem = CALLS[name]
    example, other = (jax.tree.map(of, each) for each in given)
    ways = [bundle.call, bundle.call_async, bundle.call_on_device]
    for _ in range(3):
        for way in ways:
            with pytest.raises(UsageError, match=problem):
                called(way, name, given=other)
        wanted = called(jax.jit(function), given=example)
        same(called(bundle.call, name, given=example), wanted)
