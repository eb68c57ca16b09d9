"""Arguments of another structure than the build's, for which jax.jit traces anew, are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prejit.compiler import Program, build
from prejit.runtime import Bundle, UsageError, load

X = np.ones(2, np.float32)


def counted(t: Any) -> Any:
    return t["a"] * (2 if "b" in t else 3)


def scaled(*, x: Any, scale: Any = 2.0) -> Any:
    return x if scale is None else x * scale


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
}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory, build_cache: Path) -> Bundle:
    programs = [Program(name, fn=each.function, args=_made(each)) for name, each in CALLS.items()]
    output = tmp_path_factory.mktemp("trees")
    path = build(programs, output, name="trees", cache=build_cache, quiet=True).path
    return load(path, on_mismatch="error")


def _made(call: Call) -> Any:
    return lambda: call.example


def called(way: Callable[..., Any], *name: str, given: Any) -> Any:
    return way(*name, **given) if isinstance(given, dict) else way(*name, *given)


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
        jax.tree.map(np.testing.assert_array_equal, called(bundle.call, name, given=example), wanted)
