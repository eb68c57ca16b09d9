"""Arguments of another structure than the build's, for which jax.jit traces anew, are refused."""

from __future__ import annotations

import ctypes
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prejit.compiler import Program
from prejit.runtime import Bundle, UsageError, load

from ..conftest import BuildPrograms

X = np.ones(2, np.float32)


def counted(t: Any) -> Any:
    return t["a"] * (2 if "b" in t else 3)


def scaled(*, x: Any, scale: Any = 2.0) -> Any:
    return x if scale is None else x * scale


def layers(x: Any, d: Any) -> Any:
    for value in d.values():
        x = x * value + 1
    return {"x": x, "d": d}


def size(x: Any) -> Any:
    return x.sum() if hasattr(x, "shape") else jnp.float32(len(x))


class Call(NamedTuple):
    """A call that fits a program, and one that does not.

    Attributes:
        function: of the program.
        example: arguments that fit, by position or name.
        other: arguments that do not.
        problem: the text of the error.
    """

    function: Callable[..., Any]
    example: Any
    other: Any
    problem: str


CALLS = {
    "none_more": Call(counted, [{"a": X}], [{"a": X, "b": None}], r"unexpected 0\['b'\]"),
    "none_less": Call(
        counted, [{"a": X, "b": None}], [{"a": X}], r"0\['b'\] is missing: expected None"
    ),
    "none_named": Call(scaled, {"x": X}, {"x": X, "scale": None}, "unexpected scale"),
    "none_default": Call(
        scaled, {"x": X, "scale": None}, {"x": X}, "scale is missing: expected None"
    ),
    "turned": Call(
        layers,
        [X, OrderedDict(z=X, b=X * 5)],
        [X, OrderedDict(b=X * 5, z=X)],
        "order 'z', 'b', found",
    ),
    "unordered": Call(
        layers,
        [X, OrderedDict(z=X, b=X * 5)],
        [X, {"z": X, "b": X * 5}],
        "order 'z', 'b', found 'b'",
    ),
    "ordered": Call(
        layers,
        [X, {"z": X, "b": X * 5}],
        [X, OrderedDict(z=X, b=X * 5)],
        "order 'b', 'z', found 'z'",
    ),
}


@pytest.fixture(scope="module")
def bundle(build_programs: BuildPrograms) -> Bundle:
    programs = [Program(name, fn=each.function, args=_made(each)) for name, each in CALLS.items()]
    shapes = {"row": (2,), "rows": (2, 2), "number": ()}
    programs += [
        Program(name, fn=size, args=[np.ones(shape, np.float32)]) for name, shape in shapes.items()
    ]
    programs += [Program("kept", fn=lambda x: x + 1, args={"x": X})]
    programs += [Program("state", fn=layers, args=lambda: {"x": X, "d": OrderedDict(z=X, b=X * 5)})]
    return load(build_programs(programs), on_mismatch="error")


def _made(call: Call) -> Any:
    return lambda: call.example


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("row", each) for each in ([1.0, 2.0], (1.0, 2.0), range(2), deque([1.0, 2.0]))),
        *(("row", each) for each in (array("f", [1, 2]), memoryview(X), (ctypes.c_float * 2)())),
    ],
)
def test_a_container_is_no_array(bundle: Bundle, name: str, value: Any) -> None:
    """NumPy would make an array of it; jax takes its parts, or refuses it."""
    right = np.asarray(value, np.float32)
    for _ in range(2):
        with pytest.raises(UsageError, match="expected 0 as an array, found") as caught:
            bundle.call(name, value)
        assert "numpy.asarray makes an array of a list" in str(caught.value.hint)
        with pytest.raises(UsageError, match="expected 0 as an array, found"):
            bundle.call_by_path(name, {(0,): value})
        np.testing.assert_array_equal(bundle.call(name, right), right.sum())
    with pytest.raises(UsageError, match=r"expected x as an array, found"):
        bundle.bind("kept", x=value)


class Readable:
    """An array of another library."""

    def __len__(self) -> int:
        return 2

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return X.astype(dtype or X.dtype)


def test_arrays_of_other_libraries_are_taken(bundle: Bundle) -> None:
    for value in (Readable(), X[:], jnp.asarray(X)):
        np.testing.assert_array_equal(bundle.call("row", value), 2)
    np.testing.assert_array_equal(bundle.call("number", np.float32(2)), 2)


def called(way: Callable[..., Any], *name: str, given: Any) -> Any:
    return way(*name, **given) if isinstance(given, dict) else way(*name, *given)


def same(found: Any, wanted: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.parametrize("of", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("name", CALLS)
def test_another_structure_is_refused(bundle: Bundle, name: str, of: Any) -> None:
    """At the first call, and after calls that fit."""
    call = CALLS[name]
    example, other = (jax.tree.map(of, given) for given in (call.example, call.other))
    ways = [bundle.call, bundle.call_async, bundle.call_on_device]
    for _ in range(3):
        for way in ways:
            with pytest.raises(UsageError, match=call.problem):
                called(way, name, given=other)
        wanted = called(jax.jit(call.function), given=example)
        same(called(bundle.call, name, given=example), wanted)


@pytest.mark.parametrize("of", [np.asarray, jnp.asarray])
def test_dicts_in_the_order_of_jax_are_taken(bundle: Bundle, of: Any) -> None:
    """Whatever their class, and a result may be the next argument."""
    z, b, x = of(X), of(X * 5), of(X)
    wanted = jax.jit(layers)(x, {"z": z, "b": b})
    mappings: list[Any] = [
        defaultdict(list, z=z, b=b),
        {"b": b, "z": z},
        OrderedDict(b=b, z=z),
        MappingProxyType({"z": z, "b": b}),
    ]
    for _ in range(2):
        for mapping in mappings:
            same(bundle.call("ordered", x, mapping), wanted)
    given = expected = OrderedDict(z=z, b=b)
    for _ in range(3):
        given = bundle.call("turned", x, given)["d"]
        expected = jax.jit(layers)(x, expected)["d"]
        same(given, expected)
    bound = bundle.bind("state", d=expected)
    bound.write(d=bound.read()["d"])
    same(bound.read()["d"], expected)
