"""Calls like one before find their bucket at a look: they are checked as the first, and keep nothing."""

import gc
import weakref
from collections import OrderedDict, namedtuple
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.extent import one_in

from prejit.compiler import Program
from prejit.runtime import Bundle, UsageError, load
from prejit.runtime.device.transfer import aligned_zeros
from prejit.runtime.programs import known_calls
from prejit.server.engine.engine import Engine

Named, Turned = namedtuple("Named", "a b"), namedtuple("Turned", "b a")


class Tagged:
    """A class with auxiliary data."""

    def __init__(self, w, k):
        self.w, self.k = w, k


class TaggedTuple(namedtuple("TaggedTuple", "w")):
    """A named tuple that is registered with jax as another class, with auxiliary data."""

    k: Any = 2

    @classmethod
    def of(cls, w, k):
        made = cls(w)
        made.k = k
        return made


class Backwards(list[Any]):
    """A list that is registered with its parts in the other order."""


jax.tree_util.register_pytree_node(
    Backwards, lambda v: (v[::-1], None), lambda _, parts: Backwards([*parts][::-1])
)
jax.tree_util.register_pytree_node(
    Tagged, lambda v: ((v.w,), v.k), lambda k, parts: Tagged(parts[0], k)
)
jax.tree_util.register_pytree_node(
    TaggedTuple, lambda v: ((v.w,), v.k), lambda k, parts: TaggedTuple.of(parts[0], k)
)


FUNCTIONS = {
    "joined": lambda p: p["a"] * 10 + p["b"],
    "weakly": lambda x, r: x * r,
    "scaled": lambda x, factor: x * factor,
    "tagged": lambda v: v.w * (v.k["n"] if isinstance(v.k, dict) else v.k),
    "noise": lambda key, x: jax.random.normal(key, x.shape) + x,
    "step": lambda state, x: {"state": state + x, "double": x * 2},
    "backwards": lambda v: v[0] * 10 + v[1],
}


def busy(x):
    turned = jax.lax.fori_loop(0, 1_000_000, lambda _, v: jnp.sin(v) + 1, jnp.float32(1))
    return x + jnp.where(turned > 9, 1, 0)


TWO = np.arange(2, dtype="f")


@pytest.fixture(scope="module")
def path(build_programs):
    def program(name, args, fn="", **options):
        return Program(name, fn=FUNCTIONS[fn or name], args=args, **options)

    pair = {"a": "float32[2]", "b": "float32[2]"}
    sizes = {"static": {"factor": (1, 2)}, "buckets": {"n": (2, 3)}}
    programs = [
        program("joined", [pair]),
        program("weakly", ["bfloat16[2]", "weak float32[]"]),
        program("strongly", ["bfloat16[2]", "float32[]"], "weakly"),
        program("scaled", ["float32[{n}]"], **sizes),
        program("tagged", [Tagged(TWO, {"n": 2})]),
        program("tuple", [TaggedTuple.of(TWO, 2)], "tagged"),
        program("backwards", [Backwards([TWO, TWO])]),
        program("noise", ["key[]", "float32[2]"]),
        program("step", {"state": "float32[2]", "x": "float32[2]"}),
        Program("wide", fn=lambda x: x + 1, args=["int32[{n}]"], buckets={"n": (2, 30)}, pad=["n"]),
        Program("busy", fn=busy, args=["float32[1024]"]),
    ]
    return build_programs(programs)


@pytest.fixture
def bundle(path):
    return load(path, on_mismatch="error")


WAYS = {
    "call": Bundle.call,
    "call_async": lambda *args, **kwargs: Bundle.call_async(*args, **kwargs).result(),
    "call_on_device": lambda *args, **kwargs: jax.tree.map(
        np.asarray, Bundle.call_on_device(*args, **kwargs)
    ),
}


@pytest.fixture(scope="module", params=[*WAYS, "engine"])
def way(request, path):
    bundle = load(path, on_mismatch="error")
    if request.param != "engine":
        yield lambda *args, **kwargs: WAYS[request.param](bundle, *args, **kwargs)
        return
    engine = Engine(bundle)
    yield lambda *args, **kwargs: engine.submit_call(*args, **kwargs).result()
    engine.close()


def deleted():
    gone = jnp.ones(2)
    gone.delete()
    return gone


ONES, HALF = jnp.ones(2), jnp.ones(2, jnp.bfloat16)
OF_NUMPY, OF_JAX = ({"a": TWO, "b": TWO},), ({"a": ONES, "b": ONES},)
WRONG = {
    "deleted": ("joined", OF_JAX, lambda: ({"a": ONES, "b": deleted()},), "deleted or donated"),
    "mask": ("joined", OF_NUMPY, lambda: ({"a": TWO, "b": np.ma.masked_array(TWO)},), "a mask"),
    "bytes": ("joined", OF_NUMPY, lambda: ({"a": TWO, "b": TWO.astype(">f4")},), "found >f4"),
    "none": ("joined", OF_NUMPY, lambda: ({"a": TWO, "b": None},), "missing"),
    "ref": ("joined", OF_JAX, lambda: ({"a": ONES, "b": jax.new_ref(ONES)},), "Ref"),
    "strong": ("weakly", (HALF, jnp.asarray(0.5)), lambda: (HALF, jnp.float32(0.5)), "weak"),
    "weak": ("strongly", (HALF, jnp.float32(0.5)), lambda: (HALF, jnp.asarray(0.5)), "found weak"),
    "key": ("noise", (jax.random.key(0), TWO), lambda: (jax.random.key(0, impl="rbg"), TWO), "key"),
    "range": ("wide", (np.zeros(2, "i8"),), lambda: (np.full(2, 2**40),), "range of int32"),
    "tagged": ("tagged", (Tagged(TWO, {"n": 2}),), lambda: (Tagged(TWO, {"n": 9}),), "expected"),
    "tuple": ("tuple", (TaggedTuple.of(TWO, 2),), lambda: (TaggedTuple.of(TWO, 9),), "expected"),
    "tuple jax": ("tuple", (TaggedTuple.of(ONES, 2),), lambda: (TaggedTuple.of(ONES, 9),), "found"),
}
"""A program with arguments that it takes, with others that look alike, and what the error says."""


@pytest.mark.parametrize("kind", [*WRONG])
def test_what_the_first_call_refuses_later_ones_refuse(way, kind):
    name, right, wrong, match = WRONG[kind]
    for _ in range(2):
        for _ in range(3):
            way(name, *right)
        with pytest.raises(UsageError, match=match):
            way(name, *wrong())


@pytest.mark.parametrize("wrong", [True, 1.0, "1", 3, np.int64(1), (1,), None])
def test_equal_static_values_of_other_types(way, wrong):
    for _ in range(2):
        for x in (TWO, jnp.asarray(TWO)):
            np.testing.assert_array_equal(way("scaled", x, factor=1), TWO)
            with pytest.raises(UsageError, match="factor"):
                way("scaled", x, factor=wrong)


def test_containers_of_equal_content_and_lists_of_other_parts(way):
    for of in (np.asarray, jnp.asarray):
        a, b = of(TWO), of(TWO + 5)
        kinds = [{"a": a, "b": b}, {"b": b, "a": a}, OrderedDict(a=a, b=b)]
        kinds += [Named(a, b), Turned(b, a)]
        for given in [*kinds, *reversed(kinds)]:
            np.testing.assert_array_equal(way("joined", given), np.asarray(a * 10 + b))
        for other in (OrderedDict(b=b, a=a), {"b": b, "a": a, "c": None}):
            with pytest.raises(UsageError):
                way("joined", other)
        for _ in range(2):
            np.testing.assert_array_equal(way("backwards", Backwards([a, b])), TWO * 11 + 5)
        with pytest.raises(UsageError, match="unexpected"):
            way("backwards", Backwards([a, b, a]))


def test_the_newest_signatures_are_remembered_and_arguments_may_change(bundle, called, monkeypatch):
    """Also after many that never come again, such as those of padded sizes or of new classes."""
    chosen = called("choose")
    monkeypatch.setattr(known_calls, "_MOST", 8)
    for size in range(3, 30):
        bundle.call_async("wide", np.zeros(size, np.int32)).result()
        bundle.call_async("joined", namedtuple("Own", "a b")(TWO, TWO)).result()
        assert len(bundle.user_programs._known_calls._known) <= 8
    bundle.call_async("joined", {"a": TWO, "b": TWO}).result()
    chosen.clear()
    bundle.call_async("joined", {"a": TWO, "b": TWO}).result()
    assert chosen == []
    given = aligned_zeros((1024,), np.dtype("f"))
    for call in (
        lambda: partial(np.asarray, bundle.call_on_device("busy", given)),
        lambda: bundle.call_async("busy", given).result,
    ) * 2:
        given[:] = 1
        result = call()
        given[:] = 5
        np.testing.assert_array_equal(result(), np.ones(1024))


@pytest.mark.parametrize("of", one_in(2, [np.asarray, jnp.asarray]))
def test_no_argument_is_kept(bundle, of):
    """Not by what is remembered, nor by results that a caller keeps."""
    steps = bundle.bind("step", state=of(TWO))
    kept, given = [], []
    for call in (
        lambda x: bundle.call("joined", {"a": x, "b": x}),
        lambda x: bundle.call_async("joined", {"a": x, "b": x}),
        lambda x: bundle.call_on_device("joined", {"a": x, "b": x}),
        lambda x: steps(x=x),
        lambda x: steps.call_async(x=x),
    ) * 2:
        x = of(TWO + 1)
        given.append(weakref.ref(x))
        kept.append(call(x))
        if hasattr(kept[-1], "result"):
            kept[-1].result()
        del x
    gc.collect()
    assert [each() for each in given] == [None] * 10
