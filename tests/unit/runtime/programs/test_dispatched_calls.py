"""`Bundle.call` dispatched by jaxlib's C++: on NumPy arrays without jax, on jax's arrays on its client."""

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prejit.compiler import Program
from prejit.runtime import UsageError, load
from prejit.runtime.device import _jit_dispatch

FUNCTIONS = {
    "nested": lambda z, a: {"z": [z["one"] * 2, None], "a": (a + 1, z["two"].astype(jnp.bfloat16))},
    "ordered": lambda p: OrderedDict(w=p["w"] * 10 + p["b"], b=p["b"] * 2),
    "stepped": lambda state, x: {"state": state + 1, "y": x * 2},
}


@pytest.fixture(scope="module")
def path(build_programs):
    z = {"one": "float32[{n}]", "two": "int32[3]"}
    two, four, rows = np.ones(2, "f"), "float32[4]", "float32[{n}]"
    padded = {"buckets": {"n": (4,)}, "pad": ["n"]}
    nested, ordered, stepped = FUNCTIONS.values()
    programs = [
        Program("named", fn=nested, args={"z": z, "a": "float32[2]"}, buckets={"n": (2, 4)}),
        Program("placed", fn=nested, args=[z, "float32[2]"], buckets={"n": (2,)}),
        Program("weighted", lambda p, x: x @ p, ["float32[2,8]"], params=np.eye(8, dtype="f") * 3),
        Program("ordered", fn=ordered, args=[OrderedDict(w=two, b=two)]),
        Program("returned", fn=ordered, args=[{"w": "float32[2]", "b": "float32[2]"}]),
        Program("cut", fn=lambda x: x + 0 / x, args=[rows], **padded),
        Program("divided", fn=lambda x: x / 2, args=[four]),
        Program("mixed", fn=lambda x, y: x / y, args=[four, "float32[]"]),
        Program("stepped", fn=stepped, args={"state": four, "x": four}),
        Program("donated", fn=lambda x: x + 1, args=[four], donate=[0]),
        Program("scaled", lambda x, factor: x * factor, [four], static={"factor": (2, 3)}),
        Program("padded", fn=lambda x: x + 1, args=[rows], **padded),
    ]
    return build_programs(programs)


@pytest.fixture
def bundle(path):
    return load(path, on_mismatch="error")


def z_of(size):
    return {"two": np.arange(3, dtype=np.int32), "one": np.arange(size, dtype=np.float32)}


def same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (type(mine), mine.dtype) == (type(theirs), theirs.dtype)
        assert isinstance(mine, np.ndarray) or mine.devices() == theirs.devices()
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("of", [np.asarray, jnp.asarray])
@pytest.mark.parametrize(("name", "size"), [("named", 2), ("named", 4), ("placed", 2)])
def test_results_are_those_of_the_first_call_on_its_client(bundle, called, name, size, of):
    """Python sees the first call with arrays of NumPy, and copies none of jax."""
    is_jax = of is jnp.asarray
    seen = called("call" if is_jax else "call_in_bucket")
    z, a = jax.tree.map(of, (z_of(size), np.ones(2, np.float32)))
    expected = jax.tree.map(of, FUNCTIONS["nested"](*jax.tree.map(jnp.asarray, (z, a))))
    for _ in range(4):
        found = bundle.call(name, a=a, z=z) if name == "named" else bundle.call(name, z, a)
        assert list(found) == ["a", "z"]
        same(found, expected)
    assert seen == [name] * (not is_jax)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    w: Any
    b: Any


@pytest.mark.parametrize("name", ["ordered", "returned"])
@pytest.mark.parametrize("of", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("kind", [None, Layer, lambda w, b: namedtuple("Layer", "b w")(b, w)])
def test_parts_keep_their_names(bundle, of, kind, name):
    """Also after a call that had one array in two places, which tells no order."""
    kind = kind or (OrderedDict if name == "ordered" else dict)
    once = of(np.ones(2, np.float32))
    for w, b in ((once, once), (once * 2, once), (once, once * 2), (once, once)):
        for _ in range(2):
            found = bundle.call(name, kind(w=w, b=b))
            assert list(found) == ["w", "b"]
            np.testing.assert_array_equal(found["w"], w * 10 + b)
            np.testing.assert_array_equal(found["b"], b * 2)


@pytest.mark.parametrize(
    ("of", "method"), [(np.asarray, "call_in_bucket"), (jnp.asarray, "call")], ids=["numpy", "jax"]
)
def test_what_python_must_see_is_called_in_python(bundle, called, of, method):
    seen, x, is_jax = called(method), of(np.ones(4, np.float32)), of is jnp.asarray
    for _ in range(2):
        np.testing.assert_array_equal(bundle.call("donated", x), x + 1)
        np.testing.assert_array_equal(bundle.call("scaled", x, factor=3), x * 3)
        np.testing.assert_array_equal(bundle.call("padded", x[:2]), x[:2] + 1)
        if is_jax:  # its program has weights
            np.testing.assert_array_equal(bundle.call("weighted", jnp.ones((2, 8))), [[3] * 8] * 2)
        else:
            z = {**z_of(2), "one": jnp.ones(2)}  # of two kinds
            np.testing.assert_array_equal(bundle.call("placed", z, x[:2])["a"][0], [2, 2])
    assert seen == ["donated", "scaled", "padded", "weighted" if is_jax else "placed"] * 2
    np.testing.assert_array_equal(x, np.ones(4))


def test_settings_of_jax_that_change_no_trace_do_not_matter(bundle):
    """Not for the first call of a process, either."""
    _jit_dispatch._has_jit_state.cache_clear()
    x = np.ones((2, 8), np.float32)
    for _ in range(2):
        for setting in (
            lambda: jax.disable_jit(True),
            lambda: jax.debug_nans(True),
            lambda: jax.default_device(jax.devices()[0]),
            lambda: jax.set_mesh(jax.make_mesh((1,), ("x",))),
        ):
            with setting():
                np.testing.assert_array_equal(bundle.call("weighted", x), x * 3)
        jax.clear_caches()


@pytest.mark.parametrize("of", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("name", ["divided", "donated", "mixed", "cut", "stepped"])
def test_what_jax_is_set_to_look_for(bundle, name, of):
    """At the first call, after others, and in each way; in all that is no padding."""
    ways = [bundle.call, bundle.call_async]
    if name == "stepped":
        ways = [lambda _, x: bundle.bind("stepped", state=np.zeros(4, "f"))(x=x)]
    elif name != "cut":
        ways.append(bundle.call_on_device)

    def given(value):
        x = of(np.full(3 if name == "cut" else 4, value, np.float32))
        return (x, (jnp if of is np.asarray else np).float32(2)) if name == "mixed" else (x,)

    for way in ways:
        for setting, value in ((jax.debug_nans, np.nan), (jax.debug_infs, np.inf)):
            with setting(True):
                way(name, *given(1))
                with pytest.raises(FloatingPointError, match=rf"invalid value \({value}\)"):
                    way(name, *given(value))
            way(name, *given(value))


def test_a_program_that_is_not_there_is_refused_after_one_that_is(bundle):
    """Also a name that is no text, which the table of ready calls cannot look up."""
    x = np.ones((2, 8), np.float32)
    np.testing.assert_array_equal(bundle.call("weighted", x), x * 3)
    for name in ("nothing", ["weighted"], 3):
        with pytest.raises(UsageError, match=r"no program|expected text"):
            bundle.call(name, x)


NO_JAX = """
import sys, numpy as np
from prejit.runtime import UsageError, load
bundle, x = load(sys.argv[1], on_mismatch='error'), np.ones((2, 8), 'f')
def check():
    for _ in range(3): assert (bundle.call('weighted', x) == 3).all()
    try: bundle.call('weighted', x.astype('f2'))
    except UsageError: return
    assert False
check()
assert 'jax' not in sys.modules
import jax, jax.numpy as jnp
assert jnp.asarray(np.ones(3)).dtype == 'float32'
assert jax.jit(lambda x: x + 1)(1.0) == 2
with jax.enable_x64(True): assert jax.jit(lambda x: x + 1)(np.ones(3)).dtype == 'float64'
check()
assert not jax.config.jax_enable_x64
jax.config.update('jax_enable_x64', True)
try: bundle.call('weighted', x)
except UsageError: sys.exit()
raise SystemExit('called under other settings than those of its trace')
"""


def test_it_needs_no_jax_and_leaves_jax_as_it_is(path, run_python):
    run_python(NO_JAX, path)


def test_other_jaxlibs(bundle, monkeypatch, called):
    entered = called("call_in_bucket")
    monkeypatch.setattr(_jit_dispatch, "cpu_function", lambda *_: None)
    x = np.ones((2, 8), np.float32)
    for _ in range(2):
        np.testing.assert_array_equal(bundle.call("weighted", x), x * 3)
    assert len(entered) == 2
