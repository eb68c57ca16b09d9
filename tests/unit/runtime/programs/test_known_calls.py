"""A call is answered as jax.jit answers it, or refused, at first and at a look later, and nothing is kept."""

import copy
import dataclasses
import enum
import gc
import random
import weakref
from collections import OrderedDict, namedtuple
from fractions import Fraction
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import DictKey, GetAttrKey
from tests.extent import one_in

from prejit.compiler import Program
from prejit.runtime import Bundle, UsageError, jit, load
from prejit.runtime.device.transfer import aligned_zeros
from prejit.runtime.programs import known_calls
from prejit.server.engine.engine import Engine

Named, Turned = namedtuple("Named", "a b"), namedtuple("Turned", "b a")


def mixed(given):
    """The type of each leaf decides the dtype of a product with it, and whether a result is weak."""
    narrow = jnp.ones(2, jnp.bfloat16)
    return {
        "products": jax.tree.map(lambda leaf: leaf * narrow, given),
        "doubles": jax.tree.map(lambda leaf: leaf + leaf, given),
        "number": 3.0,
    }


def counted(state, x):
    return {"step": state["step"] + 1, "total": state["total"] + x}, x * state["step"]


def same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(theirs))


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Level(enum.IntEnum):
    LOW = 1


def tripled(x):
    return x * 3


@partial(jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=["k"])
@dataclasses.dataclass
class Record:
    w: Any
    k: Any = "default"


class Plain:
    """A class that is no dataclass."""

    def __init__(self, w, k):
        self.w, self.k = w, k


class Attributes(Plain):
    """Its part has the name of an attribute."""


class Mapped(Plain):
    """Its part has a key, as one of a dict."""

    def keys(self):
        return ["w"]

    def __getitem__(self, key):
        return {"w": self.w}[key]


def rebuilt(kind):
    return lambda k, parts: kind(parts[0], k)


jax.tree_util.register_pytree_node(Plain, lambda v: ((v.w,), v.k), rebuilt(Plain))
for kind, key in ((Attributes, GetAttrKey("w")), (Mapped, DictKey("w"))):
    parts = lambda v, key=key: (((key, v.w),), v.k)  # noqa: E731
    jax.tree_util.register_pytree_with_keys(kind, parts, rebuilt(kind))


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
    TaggedTuple, lambda v: ((v.w,), v.k), lambda k, parts: TaggedTuple.of(parts[0], k)
)


def step(state, x):
    return {"state": state + x, "double": x * 2}


def busy(x):
    turned = jax.lax.fori_loop(0, 1_000_000, lambda _, v: jnp.sin(v) + 1, jnp.float32(1))
    return x + jnp.where(turned > 9, 1, 0)


TWO = np.arange(2, dtype="f")


def weighted(v):
    return v.w * (v.k["n"] if isinstance(v.k, dict) else v.k)


@pytest.fixture(scope="module")
def path(build_programs):
    pair, two = {"a": "float32[2]", "b": "float32[2]"}, "float32[2]"
    sizes = {"static": {"factor": (1, 2)}, "buckets": {"n": (2, 3)}}
    programs = [
        Program("joined", lambda p: p["a"] * 10 + p["b"], [pair]),
        Program("weakly", lambda x, r: x * r, ["bfloat16[2]", "weak float32[]"]),
        Program("strongly", lambda x, r: x * r, ["bfloat16[2]", "float32[]"]),
        Program("scaled", lambda x, factor: x * factor, ["float32[{n}]"], **sizes),
        Program("tagged", weighted, [Plain(TWO, {"n": 2})]),
        Program("tuple", weighted, [TaggedTuple.of(TWO, 2)]),
        Program("backwards", lambda v: v[0] * 10 + v[1], [Backwards([TWO, TWO])]),
        Program("noise", lambda key, x: jax.random.normal(key, x.shape) + x, ["key[]", two]),
        Program("step", step, {"state": two, "x": two}),
        Program("wide", lambda x: x + 1, ["int32[{n}]"], buckets={"n": (2, 30)}, pad=["n"]),
        Program("mixed", mixed, [{"a": np.float64(2), "b": [0.5, np.int64(3)]}]),
        Program("counted", counted, {"state": {"step": 0, "total": jnp.zeros(2)}, "x": two}),
        Program("busy", busy, ["float32[1024]"]),
    ]
    for number, (kind, k) in enumerate(built_constants()):
        programs.append(Program(f"p{number}", fn=fresh(), args=[kind(jnp.ones(2), k)]))
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
    "shape": ("joined", OF_NUMPY, lambda: ({"a": TWO, "b": TWO[:1]},), r"found float32\[1\]"),
    "shape jax": (
        "joined",
        OF_JAX,
        lambda: ({"a": ONES, "b": jnp.ones(3)},),
        r"found float32\[3\]",
    ),
    "dtype": ("joined", OF_NUMPY, lambda: ({"a": TWO, "b": TWO.astype("f2")},), "found float16"),
    "integers": (
        "joined",
        OF_NUMPY,
        lambda: ({"a": TWO, "b": np.arange(2)},),
        r"expected float32.*found int64",
    ),
    "text": ("joined", OF_NUMPY, lambda: ("text",), "no bucket of 'joined' takes"),
    "nothing": ("joined", OF_NUMPY, tuple, "missing"),
    "too many": ("joined", OF_NUMPY, lambda: (*OF_NUMPY, TWO), "unexpected 1"),
    "deleted": ("joined", OF_JAX, lambda: ({"a": ONES, "b": deleted()},), "deleted or donated"),
    "mask": ("joined", OF_NUMPY, lambda: ({"a": TWO, "b": np.ma.masked_array(TWO)},), "a mask"),
    "bytes": ("joined", OF_NUMPY, lambda: ({"a": TWO, "b": TWO.astype(">f4")},), "found >f4"),
    "none": ("joined", OF_NUMPY, lambda: ({"a": TWO, "b": None},), "missing"),
    "ref": ("joined", OF_JAX, lambda: ({"a": ONES, "b": jax.new_ref(ONES)},), "Ref"),
    "strong": ("weakly", (HALF, jnp.asarray(0.5)), lambda: (HALF, jnp.float32(0.5)), "weak"),
    "weak": ("strongly", (HALF, jnp.float32(0.5)), lambda: (HALF, jnp.asarray(0.5)), "found weak"),
    "key": ("noise", (jax.random.key(0), TWO), lambda: (jax.random.key(0, impl="rbg"), TWO), "key"),
    "range": ("wide", (np.zeros(2, "i8"),), lambda: (np.full(2, 2**40),), "range of int32"),
    "tagged": ("tagged", (Plain(TWO, {"n": 2}),), lambda: (Plain(TWO, {"n": 9}),), "expected"),
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


def test_scalars_of_numpy_and_results_on_the_device_keep_their_types(bundle):
    """The class of np.float64 is a subclass of float's."""
    name, given = "mixed", {"a": np.float32(2), "b": [0.5, np.int32(3)]}
    same(bundle.call(name, given), jax.jit(mixed)(given))
    with pytest.raises(UsageError, match=r"expected float32\[\], found weak float32\[\]"):
        bundle.call(name, {**given, "a": 2.0})
    with pytest.raises(UsageError, match=r"expected weak float32\[\], found float32\[\]") as error:
        bundle.call(name, {**given, "b": [np.float32(0.5), np.int32(3)]})
    assert "Python numbers are weak" in str(error.value.hint)
    given = {(0, "a"): np.float32(2), (0, "b", 0): np.asarray(0.5, "f"), (0, "b", 1): np.int32(3)}
    for _ in range(2):
        found = bundle.call_by_path("mixed", given)[1]
        assert found["products", "b", 0].dtype == jnp.bfloat16
        with pytest.raises(UsageError, match="weak"):  # it leaves nothing that later calls find
            bundle.call("mixed", {"a": np.float32(2), "b": [np.float32(0.5), np.int32(3)]})
    held = bundle.call_on_device("mixed", {"a": np.float32(2), "b": [0.5, np.int32(3)]})
    again = {"a": held["doubles"]["a"], "b": held["doubles"]["b"]}
    found = bundle.call("mixed", again)
    assert found["doubles"]["b"][0] == 2
    with pytest.raises(UsageError, match=r"expected float32\[\], found weak float32\[\]"):
        bundle.call("mixed", {**again, "a": held["number"]})


KINDS = (Record, Plain, Attributes, Mapped)
CONSTANTS = [
    *(None, 2, 50, True, 1, 1.0, 0.0, -0.0, 2.5, float("inf"), "a", b"a", 1j),
    *((1, 2), (1, 2.0), (), frozenset({1}), Color.RED, Color.BLUE, Level.LOW),
    *(tripled, len, Color, Fraction(1, 3), partial(tripled, 2)),
]


def spelled(constant):
    return f"{type(constant).__name__} {constant!r}"


def by_constant(given):
    """Return another value for each constant, and an object that has the constant."""
    factor = [spelled(each) for each in CONSTANTS].index(spelled(given.k))
    return given.w * factor, Record(given.w, given.k)


def fresh():
    """Return a function that jax has not traced: it takes 1 for True once it has traced one of them."""
    return lambda given: by_constant(given)


def in_turn(k):
    """Return all constants, that of the build behind its equals: jax.jit takes True for a 1 it has traced."""
    return sorted(CONSTANTS, key=lambda each: (hash(each) != hash(k), spelled(each) == spelled(k)))


def built_constants():
    rng = random.Random(11)
    return [(kind, k) for kind in KINDS for k in rng.sample(CONSTANTS, 4)] + [(Plain, None)]


@pytest.mark.parametrize("of", one_in(2, [np.asarray, jnp.asarray]))
def test_auxiliary_data_is_part_of_the_signature(path, of):
    """Every class with every constant: as jax.jit, or a refusal where jax.jit traces again."""
    w, bundle = of(np.arange(2, dtype="f")), load(path, types=[Record])
    for number, (kind, k) in enumerate(built_constants()):
        name = f"p{number}"
        options = {"bundle": bundle, "name": name, "on_miss": "error"}
        jitted, calling = jit(fresh(), **options), partial(bundle.call, name)
        for constant in in_turn(k):
            given = kind(w, copy.deepcopy(constant))
            if spelled(constant) != spelled(k):
                for call in (calling, jit(fresh(), **options)):
                    with pytest.raises(UsageError, match=r"expected .*, found"):
                        call(given)
                continue
            expected, kept = jax.jit(fresh())(given)
            is_json = type(k) not in (partial, Fraction)  # JSON holds no value of such a class
            for call in (jitted, jitted, *[calling] * is_json):
                found, record = call(given)
                np.testing.assert_array_equal(found, expected)
                assert (type(record), spelled(record.k)) == (Record, spelled(kept.k))
            if not is_json:
                with pytest.raises(UsageError, match="does not hold the value of k"):
                    calling(given)


def test_a_bound_state_keeps_its_types(bundle):
    x, state = np.ones(2, "f"), {"step": 0, "total": np.zeros(2, "f")}
    bound = bundle.bind("counted", state=state)
    for number in range(3):
        np.testing.assert_array_equal(bound(x=x), x * number)
    assert bound.read()["state"]["step"] == 3
    for step in (np.int32(0), 0.0):
        wrong = {**state, "step": step}
        for use in (lambda **given: bundle.bind("counted", **given), bound.write):
            with pytest.raises(UsageError, match=r"expected weak int32\[\], found"):
                use(state=wrong)
