"""`Bundle.call` dispatched by jaxlib's C++: on NumPy arrays without jax, on jax's arrays on its client."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prejit.compiler import Program
from prejit.runtime import Bundle, UsageError, load
from prejit.runtime.device import _jit_dispatch

from ..conftest import BuildPrograms, Called


def nested(z: Any, a: Any) -> Any:
    return {"z": [z["one"] * 2, None], "a": (a + 1, z["two"].astype(jnp.bfloat16))}


def weighted(params: Any, x: Any) -> Any:
    return x @ params


def ordered(p: Any) -> Any:
    return OrderedDict(w=p["w"] * 10 + p["b"], b=p["b"] * 2)


def scaled(x: Any, factor: int) -> Any:
    return x * factor


def stepped(state: Any, x: Any) -> Any:
    return {"state": state + 1, "y": x * 2}


@pytest.fixture(scope="module")
def path(build_programs: BuildPrograms) -> Path:
    z = {"one": "float32[{n}]", "two": "int32[3]"}
    programs = [
        Program("named", fn=nested, args={"z": z, "a": "float32[2]"}, buckets={"n": (2, 4)}),
        Program("placed", fn=nested, args=[z, "float32[2]"], buckets={"n": (2,)}),
        Program("weighted", fn=weighted, args=["float32[2,8]"], params=np.eye(8, dtype="f") * 3),
        Program("ordered", fn=ordered, args=[OrderedDict(w=np.ones(2, "f"), b=np.ones(2, "f"))]),
        Program("returned", fn=ordered, args=[{"w": "float32[2]", "b": "float32[2]"}]),
        Program(
            "cut", fn=lambda x: x + 0 / x, args=["float32[{n}]"], buckets={"n": (4,)}, pad=["n"]
        ),
        Program("divided", fn=lambda x: x / 2, args=["float32[4]"]),
        Program("mixed", fn=lambda x, y: x / y, args=["float32[4]", "float32[]"]),
        Program("stepped", fn=stepped, args={"state": "float32[4]", "x": "float32[4]"}),
        Program("donated", fn=lambda x: x + 1, args=["float32[4]"], donate=[0]),
        Program("scaled", fn=scaled, args=["float32[4]"], static={"factor": (2, 3)}),
        Program(
            "padded", fn=lambda x: x + 1, args=["float32[{n}]"], buckets={"n": (4,)}, pad=["n"]
        ),
    ]
    return build_programs(programs)


@pytest.fixture
def bundle(path: Path) -> Bundle:
    return load(path, on_mismatch="error")


@pytest.fixture
def entered(called: Called) -> list[str]:
    """Names of the programs that Python called."""
    return called("call_in_bucket")


def z_of(size: int) -> dict[str, Any]:
    return {"two": np.arange(3, dtype=np.int32), "one": np.arange(size, dtype=np.float32)}


@pytest.mark.parametrize("size", [2, 4])
def test_results_are_those_of_the_first_call(bundle: Bundle, entered: list[str], size: int) -> None:
    z, a = z_of(size), np.ones(2, np.float32)
    first, *others = (bundle.call("named", a=a, z=z) for _ in range(4))
    assert entered == ["named"]
    for found in others:
        assert list(found) == list(first)
        assert found["z"][1] is None
        assert type(found["a"]) is tuple
        for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(first), strict=True):
            assert type(mine) is np.ndarray
            assert mine.dtype == theirs.dtype
            np.testing.assert_array_equal(mine, theirs)
    np.testing.assert_array_equal(first["z"][0], np.arange(size) * 2)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    w: Any
    b: Any


@pytest.mark.parametrize("name", ["ordered", "returned"])
@pytest.mark.parametrize("of", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("kind", [None, Layer, lambda w, b: namedtuple("Layer", "b w")(b, w)])
def test_parts_keep_their_names(bundle: Bundle, of: Any, kind: Any, name: str) -> None:
    """Also after a call that had one array in two places, which tells no order."""
    kind = kind or (OrderedDict if name == "ordered" else dict)
    once = of(np.ones(2, np.float32))
    for w, b in ((once, once), (once * 2, once), (once, once * 2), (once, once)):
        for _ in range(2):
            found = bundle.call(name, kind(w=w, b=b))
            assert list(found) == ["w", "b"]
            np.testing.assert_array_equal(found["w"], w * 10 + b)
            np.testing.assert_array_equal(found["b"], b * 2)


def test_what_python_must_see_is_called_in_python(bundle: Bundle, entered: list[str]) -> None:
    x = np.ones(4, np.float32)
    for _ in range(2):
        np.testing.assert_array_equal(bundle.call("donated", x), x + 1)
        np.testing.assert_array_equal(bundle.call("scaled", x, factor=3), x * 3)
        np.testing.assert_array_equal(bundle.call("padded", x[:2]), x[:2] + 1)
        z = {**z_of(2), "one": jnp.ones(2)}  # of two kinds
        np.testing.assert_array_equal(bundle.call("placed", z, x[:2])["a"][0], [2, 2])
    assert len(entered) == 8
    np.testing.assert_array_equal(x, np.ones(4))


def test_mistakes_are_found_after_calls_that_fit(bundle: Bundle) -> None:
    x = np.ones((2, 8), np.float32)
    bundle.call("weighted", x)
    halves, ints, swapped = x.astype("f2"), x.astype("i8"), x.astype(">f4")
    for wrong in ((x[:1],), (x, x), (halves,), (ints,), (swapped,), ("text",), ()):
        for _ in range(2):
            with pytest.raises(UsageError, match="no bucket of 'weighted' takes these arguments"):
                bundle.call("weighted", *wrong)
    for name in ("nothing", ["weighted"], 3):
        with pytest.raises(UsageError):
            bundle.call(name, x)  # type: ignore[arg-type]
    np.testing.assert_array_equal(bundle.call("weighted", x), x * 3)


def test_settings_of_jax_that_change_no_trace_do_not_matter(bundle: Bundle) -> None:
    x = np.ones((2, 8), np.float32)
    for _ in range(2):
        for switch in (jax.disable_jit, jax.debug_nans):
            with switch(True):
                np.testing.assert_array_equal(bundle.call("weighted", x), x * 3)
        for setting in (
            jax.default_device(jax.devices()[0]),
            jax.set_mesh(jax.make_mesh((1,), ("x",))),
        ):
            with setting:
                np.testing.assert_array_equal(bundle.call("weighted", x), x * 3)
        jax.clear_caches()


@pytest.mark.parametrize("of", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("name", ["divided", "donated", "mixed", "cut", "stepped"])
def test_what_jax_is_set_to_look_for(bundle: Bundle, name: str, of: Any) -> None:
    """At the first call, after others, and in each way; in all that is no padding."""
    ways: list[Any] = [bundle.call, bundle.call_async]
    if name == "stepped":
        ways = [lambda _, x: bundle.bind("stepped", state=np.zeros(4, "f"))(x=x)]
    elif name != "cut":
        ways.append(bundle.call_on_device)

    def given(value: float) -> tuple[Any, ...]:
        x = of(np.full(3 if name == "cut" else 4, value, np.float32))
        return (x, (jnp if of is np.asarray else np).float32(2)) if name == "mixed" else (x,)

    for way in ways:
        for setting, value in ((jax.debug_nans, np.nan), (jax.debug_infs, np.inf)):
            with setting(True):
                way(name, *given(1))
                with pytest.raises(FloatingPointError, match=rf"invalid value \({value}\)"):
                    way(name, *given(value))
            way(name, *given(value))


def test_the_first_call_of_a_process_may_be_one_without_jit(path: Path) -> None:
    _jit_dispatch._has_jit_state.cache_clear()
    x = np.ones((2, 8), np.float32)
    with jax.disable_jit():
        np.testing.assert_array_equal(load(path).call("weighted", x), x * 3)


def test_it_needs_no_jax_and_leaves_jax_as_it_is(path: Path, run_python: Any) -> None:
    run_python(
        "import sys, numpy as np\n"
        "from prejit.runtime import UsageError, load\n"
        "bundle, x = load(sys.argv[1], on_mismatch='error'), np.ones((2, 8), 'f')\n"
        "def check():\n"
        "    for _ in range(3): assert (bundle.call('weighted', x) == 3).all()\n"
        "    try: bundle.call('weighted', x.astype('f2'))\n"
        "    except UsageError: return\n"
        "    assert False\n"
        "check()\n"
        "assert 'jax' not in sys.modules\n"
        "import jax, jax.numpy as jnp\n"
        "assert jnp.asarray(np.ones(3)).dtype == 'float32'\n"
        "assert jax.jit(lambda x: x + 1)(1.0) == 2\n"
        "with jax.enable_x64(True): assert jax.jit(lambda x: x + 1)(np.ones(3)).dtype == 'float64'\n"
        "check()\n"
        "assert not jax.config.jax_enable_x64\n",
        path,
    )


def test_another_jaxlib(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, entered: list[str]
) -> None:
    monkeypatch.setattr(_jit_dispatch, "cpu_function", lambda *_: None)
    x = np.ones((2, 8), np.float32)
    for _ in range(2):
        np.testing.assert_array_equal(bundle.call("weighted", x), x * 3)
    assert len(entered) == 2


@pytest.fixture
def copied(called: Called) -> list[str]:
    """Names of the programs that Python called, or whose arrays were copied to another client."""
    return called("call")


@pytest.mark.parametrize("name", ["named", "placed"])
def test_arrays_of_jax_stay_on_its_client(bundle: Bundle, copied: list[str], name: str) -> None:
    z, a = jax.tree.map(jnp.asarray, (z_of(2), np.ones(2, np.float32)))
    expected = nested(z, a)
    for _ in range(3):
        found = bundle.call(name, a=a, z=z) if name == "named" else bundle.call(name, z, a)
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert isinstance(mine, jax.Array)
            assert mine.dtype == theirs.dtype
            assert mine.devices() == theirs.devices()
            np.testing.assert_array_equal(mine, theirs)
    assert copied == []


def test_arrays_of_jax_that_no_program_takes_as_they_are(bundle: Bundle, copied: list[str]) -> None:
    x = jnp.ones(4)
    for _ in range(2):
        np.testing.assert_array_equal(bundle.call("donated", x), x + 1)
        np.testing.assert_array_equal(bundle.call("scaled", x, factor=3), x * 3)
        np.testing.assert_array_equal(bundle.call("padded", x[:3]), x[:3] + 1)
        np.testing.assert_array_equal(bundle.call("weighted", jnp.ones((2, 8))), np.full((2, 8), 3))
    assert copied == ["donated", "scaled", "padded", "weighted"] * 2
    with pytest.raises(UsageError, match=r"expected float32\[2, 8\], found float32\[3\]"):
        bundle.call("weighted", jnp.ones(3))


def test_a_call_with_arrays_of_jax_and_others(bundle: Bundle) -> None:
    """The first leaf is an array of jax, the others are not, before and after a call that all of jax made."""
    one = jnp.arange(2, dtype=jnp.float32)
    expected = np.arange(2) * 2.0
    mixed = {"one": one, "two": np.arange(3, dtype=np.int32)}
    for _ in range(2):
        found = bundle.call("placed", mixed, np.ones(2, np.float32))
        assert isinstance(found["z"][0], jax.Array)
        np.testing.assert_array_equal(found["z"][0], expected)
        whole = {"one": one, "two": jnp.arange(3, dtype=jnp.int32)}
        again = bundle.call("placed", whole, jnp.ones(2, jnp.float32))
        np.testing.assert_array_equal(again["a"][0], [2, 2])
    wrong = {"one": one, "two": np.arange(4, dtype=np.int32)}
    with pytest.raises(UsageError, match="two"):
        bundle.call("placed", wrong, np.ones(2, np.float32))
