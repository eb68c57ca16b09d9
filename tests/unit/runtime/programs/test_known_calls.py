"""Types of arguments are part of the signature: a call is answered as jax.jit answers it, or refused."""

import copy
import dataclasses
import enum
import random
from fractions import Fraction
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.extent import one_in

from prejit.compiler import Program
from prejit.runtime import UsageError, jit, load


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


SEED = 11


@pytest.fixture(scope="module")
def bundle(build_programs):
    """Random arguments with weak and strong types: tests/campaigns/differential.py."""
    example = {"a": np.float64(2), "b": [0.5, np.int64(3)]}
    given = {"state": {"step": 0, "total": jnp.zeros(2)}, "x": "float32[2]"}
    programs = [Program("mixed", mixed, [example]), Program("counted", counted, given)]
    return load(build_programs(programs))


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
for kind, key in (
    (Attributes, jax.tree_util.GetAttrKey("w")),
    (Mapped, jax.tree_util.DictKey("w")),
):
    jax.tree_util.register_pytree_with_keys(
        kind, lambda v, key=key: (((key, v.w),), v.k), rebuilt(kind)
    )

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
    """Return all constants: that of the build before others, but after those that equal it, as 1 equals True.

    Once jax.jit has traced one of these it takes it for the other, and so does a call that fitted.
    """
    return sorted(CONSTANTS, key=lambda each: (hash(each) != hash(k), spelled(each) == spelled(k)))


def built_constants():
    rng = random.Random(SEED)
    return [(kind, k) for kind in KINDS for k in rng.sample(CONSTANTS, 4)] + [(Plain, None)]


@pytest.fixture(scope="module")
def constants_path(build_programs):
    programs = [
        Program(f"p{number}", fn=fresh(), args=[kind(jnp.ones(2), k)])
        for number, (kind, k) in enumerate(built_constants())
    ]
    return build_programs(programs)


@pytest.mark.parametrize("of", one_in(2, [np.asarray, jnp.asarray]))
def test_auxiliary_data_is_part_of_the_signature(constants_path, of):
    """Every class with every constant: as jax.jit, or a refusal where jax.jit traces again."""
    w, bundle = of(np.arange(2, dtype="f")), load(constants_path, types=[Record])
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
