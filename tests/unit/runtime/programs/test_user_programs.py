"""Arguments are those of jax.jit: 64 bits where jax takes them as 32, and the structure of the build."""

import ctypes
import math
from array import array
from collections import OrderedDict, deque

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prejit.compiler import Program, build
from prejit.runtime import UsageError, jit, load

X = np.random.default_rng(0).standard_normal((4, 3))
LABELS = X.argmax(1)


def loss(x, labels):
    return jnp.take_along_axis(x, labels[:, None], 1).sum(), labels + 1


def step(state, x):
    return state + x.sum()


def examples(batch):
    return {"x": np.ones((batch, 3)), "labels": np.zeros(batch, np.int64)}


GIVEN, ROWS = {"x": X, "labels": LABELS}, {"x": "float32[{batch}, 3]", "labels": "int32[{batch}]"}
SHAPES = {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in GIVEN.items()}
KINDS = [np.zeros(1, kind) for kind in ("i8", "u8", "f8", "c16")]
PROGRAMS = [
    Program("loss", loss, GIVEN),
    Program("made", loss, examples, buckets={"batch": (2, 4)}),
    Program("shaped", loss, SHAPES),
    Program("padded", loss, ROWS, buckets={"batch": (8,)}, pad=["batch"]),
    Program("step", step, {"state": np.zeros(2), "x": X[0]}),
    Program("same", lambda *each: each, KINDS),
]
NOTE = "is built with ['labels'] as int32 and not int64, ['x'] as float32 and not float64: jax_enable_x64"


@pytest.fixture(scope="module")
def bundle(build_programs):
    return load(build_programs(PROGRAMS), on_mismatch="error")


def test_the_build_says_what_is_narrower_and_its_state_is_kept_so(tmp_path, capfd, bundle):
    build(PROGRAMS[1:3], tmp_path, name="said", cache=tmp_path / "cache")
    said = capfd.readouterr().err
    assert said.count(NOTE) == 2
    for name in ("made", "shaped"):
        assert said.count(f"{name} {NOTE}") == 1
    bound = bundle.bind("step", state=np.zeros(2))
    for _ in range(2):
        bound(x=X[0])
    bound.write(state=bound.read()["state"].astype(np.float64))
    expected = np.full(2, 2 * X[0].astype("f").sum())
    np.testing.assert_allclose(bound.read()["state"], expected, rtol=1e-6)


@pytest.mark.parametrize("name", ["loss", "made", "shaped", "padded"])
def test_arrays_of_64_bits_give_what_jax_gives(bundle, name):
    """Again and again, and by all ways: no way remembers that a program takes them as they are."""
    count = 3 if name == "padded" else 4
    wide = X[:count], LABELS[:count]
    narrow = wide[0].astype("f"), wide[1].astype(np.int32)
    ways = [
        lambda **given: bundle.call(name, **given),
        lambda **given: bundle.call_async(name, **given).result(),
    ]
    if name != "padded":
        ways.append(jit(loss, bundle=bundle, name=name, on_miss="error"))
    expected = jax.jit(loss)(*wide)
    for x, labels in (wide, narrow, (wide[0], narrow[1]), (narrow[0], wide[1]), wide):
        for call in ways:
            found = call(x=x, labels=labels)
            if name != "padded":  # the sum is one over padding too
                np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
            np.testing.assert_array_equal(found[1], expected[1])
            assert [str(each.dtype) for each in found] == ["float32", "int32"]


SAME = [np.array([x], dtype) for x, dtype in ((-5, "i8"), (7, "u8"), (0.1, "f8"), (1j, "c16"))]


@pytest.mark.parametrize(
    ("place", "value"), [(0, 2**31), (0, -(2**31) - 1), (1, 2**32), (2, 1e300), (3, 1e300j)]
)
def test_values_beyond_32_bits_are_refused(bundle, place, value):
    """jax wraps integers and makes numbers infinite, without an error."""
    given = list(SAME)
    for _ in range(2):
        found = bundle.call("same", *given)
        for mine, theirs in zip(found, jax.jit(lambda *x: x)(*given), strict=True):
            assert mine.dtype == theirs.dtype
            np.testing.assert_array_equal(mine, theirs)
    given[place] = np.array([value], given[place].dtype)
    with pytest.raises(UsageError, match=f"{place}: expected .* whose values are in the range"):
        bundle.call("same", *given)
    given[place] = np.full(1, np.nan, "f8") if place == 2 else SAME[place]
    bundle.call("same", *given)


def test_with_64_bits_no_array_becomes_narrower(build_programs):
    with jax.enable_x64(True):
        given = {"wide": X, "narrow": "float32[4, 3]"}
        bundle = load(build_programs([Program(n, jnp.sum, [x]) for n, x in given.items()]))
        found, expected = bundle.call("wide", X), jax.jit(jnp.sum)(X)
        assert found.dtype == expected.dtype == "float64"
        np.testing.assert_allclose(found, expected, rtol=1e-12)
        for name, x in (("narrow", X), ("wide", X.astype("f"))):
            with pytest.raises(UsageError, match=r"expected float.*, found float"):
                bundle.call(name, x)


ONES = np.ones(2, np.float32)


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


ZB, BZ = OrderedDict(z=ONES, b=ONES * 5), OrderedDict(b=ONES * 5, z=ONES)
NONE = {"a": ONES, "b": None}
CALLS = {
    "none_more": (counted, [{"a": ONES}], [NONE], r"unexpected 0\['b'\]"),
    "none_less": (counted, [NONE], [{"a": ONES}], r"0\['b'\] is missing: expected"),
    "none_named": (scaled, {"x": ONES}, {"x": ONES, "scale": None}, "unexpected scale"),
    "none_default": (scaled, {"x": ONES, "scale": None}, {"x": ONES}, "scale is missing: expected"),
    "turned": (layers, [ONES, ZB], [ONES, BZ], "order 'z', 'b', found"),
    "unordered": (layers, [ONES, ZB], [ONES, dict(ZB)], "order 'z', 'b', found 'b'"),
    "ordered": (layers, [ONES, dict(ZB)], [ONES, ZB], "order 'b', 'z', found 'z'"),
}
"""Functions, arguments that fit their programs, others that do not, and the errors."""


@pytest.fixture(scope="module")
def others(build_programs):
    examples = {name: call[:2] for name, call in CALLS.items()}
    examples |= {name: (size, [np.ones(n, "f")]) for name, n in (("row", 2), ("number", ()))}
    programs = [
        Program(name, fn=function, args=lambda example=example: example)
        for name, (function, example) in examples.items()
    ]
    programs += [
        Program("kept", fn=lambda x: x + 1, args={"x": ONES}),
        Program("halved", fn=lambda x: x / 2, args=[0.5]),
        Program("doubled", fn=lambda x: x * 2, args=[3]),
        Program("turned_number", fn=lambda x: x * 1j, args=[1j]),
        Program("split", fn=jax.random.split, args=lambda: [jax.random.key(0)]),
        Program("summed", fn=jnp.sum, args=["float32[2]"]),
    ]
    return load(build_programs(programs), on_mismatch="error")


@pytest.mark.parametrize(
    ("name", "value", "dtype"),
    [
        *(("halved", each, "") for each in (math.inf, -math.inf, math.nan, 3.4e38, 1e-50)),
        *(("halved", each, "float32") for each in (1e39, -1e300)),
        *(("doubled", each, "int32") for each in (2**31, -(2**40), 2**70)),
        ("turned_number", 1e300j, "complex64"),
    ],
)
def test_numbers_that_their_dtype_does_not_hold_are_refused(others, name, value, dtype):
    if not dtype:
        expected = jax.jit(lambda x: x / 2)(value)
        np.testing.assert_array_equal(others.call(name, value), expected)
        return
    with pytest.raises(UsageError, match=f"0: expected a number in the range of {dtype}, found"):
        others.call(name, value)


def test_the_data_of_a_key_is_no_key(others):
    """An array of jax has a type; NumPy has no keys, so their data stands for them."""
    key = jax.random.key(3)
    wanted = jax.random.key_data(jax.jit(jax.random.split)(key))
    for _ in range(3):
        for raw in (jax.random.PRNGKey(3), jax.device_put(jax.random.key_data(key))):
            for way in (others.call, others.call_async, others.call_on_device):
                with pytest.raises(UsageError, match="0: expected a random key of") as caught:
                    way("split", raw)
                assert "jax.random.wrap_key_data" in str(caught.value.hint)
        found = others.call("split", key)
        np.testing.assert_array_equal(jax.random.key_data(found), wanted)
        np.testing.assert_array_equal(others.call("split", np.asarray(raw)), wanted)


@pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.vmap])
def test_a_tracer_is_refused_in_one_sentence(others, transform):
    x = np.ones((2, 2), "f") if transform is jax.vmap else np.ones(2, "f")
    others.call("summed", np.ones(2, "f"))
    with pytest.raises(UsageError, match="0: expected an array, found a tracer") as caught:
        transform(lambda x: others.call("summed", x))(x)
    assert "prejit.runtime.jit" in str(caught.value.hint)
    assert "\n" not in caught.value.args[0]


CONTAINERS = [1.0, 2.0], (1.0, 2.0), range(2), deque([1.0, 2.0]), array("f", [1, 2])


@pytest.mark.parametrize("value", [*CONTAINERS, memoryview(ONES), (ctypes.c_float * 2)()])
def test_a_container_is_no_array(others, value):
    """NumPy would make an array of it; jax takes its parts, or refuses it."""
    right = np.asarray(value, np.float32)
    for _ in range(2):
        with pytest.raises(UsageError, match="expected 0 as an array, found") as caught:
            others.call("row", value)
        assert "numpy.asarray makes an array of a list" in str(caught.value.hint)
        with pytest.raises(UsageError, match="expected 0 as an array, found"):
            others.call_by_path("row", {(0,): value})
        np.testing.assert_array_equal(others.call("row", right), right.sum())
    with pytest.raises(UsageError, match=r"expected x as an array, found"):
        others.bind("kept", x=value)


class Readable:
    """An array of another library."""

    def __len__(self):
        return 2

    def __array__(self, dtype=None, copy=None):
        return ONES.astype(dtype or ONES.dtype)


def test_arrays_of_other_libraries_are_taken(others):
    for value in (Readable(), ONES[:], jnp.asarray(ONES)):
        np.testing.assert_array_equal(others.call("row", value), 2)
    np.testing.assert_array_equal(others.call("number", np.float32(2)), 2)


def called(way, *name, given):
    return way(*name, **given) if isinstance(given, dict) else way(*name, *given)


@pytest.mark.parametrize("of", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("name", CALLS)
def test_another_structure_is_refused(others, name, of):
    """At the first call, and after calls that fit."""
    function, *given, problem = CALLS[name]
    example, other = (jax.tree.map(of, each) for each in given)
    for _ in range(3):
        for way in (others.call, others.call_async, others.call_on_device):
            with pytest.raises(UsageError, match=problem):
                called(way, name, given=other)
        wanted = called(jax.jit(function), given=example)
        found = called(others.call, name, given=example)
        assert jax.tree.structure(found) == jax.tree.structure(wanted)
        jax.tree.map(np.testing.assert_array_equal, found, wanted)
