"""Trees of arguments and results: their text, and values to flat lists and back."""

import dataclasses
import functools
import sys
import threading
from collections import namedtuple
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.extent import examples

from prejit.runtime import UsageError
from prejit.runtime.format import constants, trees
from prejit.runtime.format.trees import Leaf, Node
from prejit.runtime.programs import pytree
from prejit.runtime.programs.pytree import MisfitError

plain = st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3)
inner = (
    plain | st.floats(allow_nan=False) | st.complex_numbers(allow_nan=False) | st.binary(max_size=3)
)
kept = st.recursive(
    inner,
    lambda parts: (
        st.lists(parts, max_size=3)
        | st.lists(parts, max_size=3).map(tuple)
        | st.frozensets(inner, max_size=3)
        | st.dictionaries(inner, parts, max_size=3)
    ),
    max_leaves=6,
)


def shown(value):
    """Return repr, with the members of sets in one order: those of equal hashes stand as they came."""
    if isinstance(value, frozenset):
        return f"frozenset{sorted(map(shown, value))}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}{[*map(shown, value)]}"
    if isinstance(value, dict):
        return f"dict{[(shown(key), shown(part)) for key, part in value.items()]}"
    return repr(value)


@settings(max_examples=examples(100, 1000), deadline=None)
@given(one=kept, other=kept)
@example(one=frozenset([False, ""]), other=frozenset(["", False]))
def test_constants_are_equal_if_their_values_and_types_are(one, other):
    """repr tells True from 1, 0.0 from -0.0, and lists from tuples."""
    encoded = constants.encode(one)
    assert shown(constants.decode(encoded)) == shown(one)
    assert constants.parse(constants.plain(encoded)) == encoded
    assert constants.same(encoded, encoded)
    assert constants.same(encoded, constants.encode(other)) == (shown(one) == shown(other))


@pytest.mark.parametrize(
    "text",
    [
        *('["dict",[[1,"*"],["1","*"]]]', '["dict",[[true,"*"]]]', '["node","m:N",["*"],2.5]'),
        *('["record","no type",[],[]]', '["record","m:N.<lambda>",[],[]]', '["list", ["*"]]'),
        '["namedtuple","m:N",[["class","*"]]]',
        '["record","m:N",[["__dict__","*"]],[]]',
        '["namedtuple","m:N",[["a","*"],["_0","*"]]]',
        '["record","m:N",[["a","*"]],[["a",1]]]',
        '["record","m:N",[],[["a",["float","1.5"]]]]',
        '["record","m:N",[],[["a",["dict",[[1]]]]]]',
        '["record","m:N",[],[["a",["enum","Color","RED"]]]]',
        *('["record","m:N",[],[["a",NaN]]]', '"key:"'),
        "[" * 100_000,
        '["list",[' * 300 + '"*"' + "]]" * 300,
    ],
)
def test_a_tree_that_no_build_writes_is_refused(text):
    with pytest.raises(ValueError, match="expected"):
        trees.parse(text)


class Point(NamedTuple):
    x: Any
    y: Any = None


@dataclasses.dataclass
class Circle:
    centre: Any
    radius: Any
    name: Any = "round"


POINT = Node("namedtuple", ("x", "y"), (Leaf(), Leaf()), "shapes:Point")
PARTS, NAME = ("centre", "radius"), (("name", "round"),)
CIRCLE = Node("record", PARTS, (POINT, Leaf()), "shapes:Circle", NAME)
PAIR = Node("dict", ("b", "w"), (Leaf(), Leaf()))


class State:
    """As flax.nnx.State, which is no Mapping."""

    def __init__(self, **parts):
        self._parts = parts

    def keys(self):
        return self._parts.keys()

    def __getitem__(self, name):
        return self._parts[name]


@pytest.mark.parametrize(
    ("tree", "value"),
    [
        (CIRCLE, Circle(Point(1, 2), 3)),
        (CIRCLE, {"centre": {"x": 1, "y": 2}, "radius": 3}),
        (CIRCLE, Circle(namedtuple("Other", "y x")(2, 1), 3)),
        (CIRCLE, Circle((1, 2), 3)),
        (CIRCLE, ([1, 2], 3)),
        (PAIR, {"w": 2, "b": 1}),
        (PAIR, State(w=2, b=1)),
        (PAIR, namedtuple("Layer", "w b")(2, 1)),
        (PAIR, dataclasses.make_dataclass("Layer", ["w", "b"])(2, 1)),
    ],
)
def test_a_record_or_a_dict_is_anything_with_its_parts(tree, value):
    assert trees.parse(trees.to_text(tree)) == tree
    assert pytree.flatten(tree, value) == [1, 2, 3][: sum(1 for _ in trees.leaves(tree))]


@pytest.mark.parametrize(
    ("tree", "value", "problem"),
    [
        (CIRCLE, {"radius": 3}, r"centre\['x'\] is missing"),
        (CIRCLE, {"centre": (1, 2), "radius": 3, "more": 4}, "unexpected more"),
        (CIRCLE, {"centre": (1, 2, 3), "radius": 3}, r"unexpected centre\[2\]"),
        (CIRCLE, {"centre": (1, 2), "radius": None}, "radius is missing"),
        (CIRCLE, {"centre": (1, 2), "radius": {"a": 1}}, "radius is missing"),
        (PAIR, [1, 2], "expected value as a mapping, found list"),
        (PAIR, jax.tree_util.Partial(print, 1, 2), "expected value as a mapping, found Partial"),
        (PAIR, namedtuple("Layer", "w c")(1, 2), "b is missing"),
        (PAIR, dataclasses.make_dataclass("Layer", ["w", "b", "c"])(1, 2, None), "unexpected c"),
        (PAIR, State(w=1, b=2, c=3), "unexpected c"),
        (Node("dict"), [1], "expected value as a mapping, found list"),
    ],
)
def test_a_part_that_is_missing_or_too_many_is_named(tree, value, problem):
    with pytest.raises(MisfitError, match=problem):
        pytree.flatten(tree, value)


NAMED = [
    *(["a.b"], ["a", "b"], ["a%2Eb"], [""], ["result"], ["", ""], ["."], ["a\1"], ["a%01"]),
    *(["\ud800"], ["%D800"], ["a/b"], ["a%2Fb"], ["nul\0"], [".hidden"], ["%2F"]),
    *(["..", "..", "escaped"], ["/tmp/escaped"], ["a/../../escaped"]),
]
PATHS = st.lists(st.text(st.sampled_from("a./%2EF\\\0\ud800"), max_size=4), min_size=1, max_size=3)


@given(one=PATHS, other=PATHS)
def test_a_name_of_a_path_stays_in_its_directory_and_no_other_path_has_it(one, other):
    """Paths come out of the bundle, and whoever wrote it need not be a friend."""
    for path in (one, *NAMED):
        name = pytree.dotted(path)
        assert Path(f"/out/{name}.npy").resolve() == Path(f"/out/{name}.npy")
        assert not name.startswith(".")
        assert "/" not in name
        assert name.isprintable()
    assert (pytree.dotted(one) == pytree.dotted(other)) == (one == other)
    assert len({*map(pytree.dotted, NAMED)}) == len(NAMED)


FACTOR = 2.0
HELPER = lambda v: v * FACTOR  # noqa: E731
HERE = sys.modules[__name__]


def with_attribute(factor):
    def scaled(v):
        return v * scaled.factor

    scaled.factor = factor
    return scaled


def of_two(first, second):
    """Return a function that calls itself by way of another one."""

    def one(v):
        return v * first if v else other(v)

    def other(v):
        return one(v) * second

    return other


def with_a_cell(is_filled):
    if is_filled:
        held = 2.0
    return lambda v: v * held


@dataclasses.dataclass(frozen=True, eq=False)
class ByIdentity:
    k: float = dataclasses.field(compare=False)


@dataclasses.dataclass(frozen=True)
class ByOwnRule:
    k: float = dataclasses.field(compare=False)

    def __eq__(self, other):
        return self is other

    __hash__ = object.__hash__


@dataclasses.dataclass(frozen=True)
class NotCompared:
    k: float = dataclasses.field(compare=False)


@dataclasses.dataclass(frozen=True)
class Derived:
    k: dataclasses.InitVar[float]

    def __post_init__(self, k):
        object.__setattr__(self, "derived", k)


class NoState:
    def __init__(self, k):
        self.k = k

    def __getstate__(self):
        return {}


class Reduced:
    __slots__ = ("__k",)

    def __init__(self, k):
        self.__k = k

    def __reduce__(self):
        return Reduced, (1.0,)


def in_itself(k):
    found = {"k": k}
    found["children"] = [{"parent": found}]
    return found


class Labelled(np.ndarray[Any, Any]):
    """NumPy's own way to pickle an array drops the attributes of a class like this."""


def labelled(k):
    found = np.ones(2).view(Labelled)
    found.k = k
    return found


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda v: jnp.tanh(v), jax.vmap(lambda v: jax.nn.gelu(v))),  # which read modules
        (lambda a, b: a - b, lambda b, a: a - b),
        (lambda a, b=1: a, lambda a, *, b=1: a),
        (lambda a, /: a, lambda a: a),
        (with_attribute(2.0), with_attribute(5.0)),
        (with_a_cell(True), with_a_cell(False)),
        (type(None), type(...)),
        *((kind(2.0), kind(5.0)) for kind in (ByIdentity, ByOwnRule, NotCompared, Derived)),
        *((kind(2.0), kind(5.0)) for kind in (NoState, Reduced, labelled, in_itself)),
    ],
)
def test_no_part_of_a_constant_is_left_out(one, other):
    encoded = constants.encode(one)
    assert constants.same(encoded, constants.encode(one))
    assert not isinstance(encoded, constants.EncodedConstant) or not encoded.is_unknown
    assert encoded != constants.encode(other)
    assert constants.parse(constants.plain(encoded)) == encoded


@pytest.mark.parametrize(
    "made",
    [
        lambda: lambda v: v * FACTOR,
        lambda: lambda v: HELPER(v),
        lambda: lambda v: v * HERE.FACTOR,
        lambda: lambda v: [part * FACTOR for part in v],
    ],
)
def test_globals_of_a_function_are_parts_of_it(made, monkeypatch):
    before, again = constants.encode(made()), constants.encode(made())
    monkeypatch.setitem(globals(), "FACTOR", 5.0)
    monkeypatch.setitem(globals(), "HELPER", lambda v: v * FACTOR)
    assert before == again != constants.encode(made())
    monkeypatch.setitem(globals(), "FACTOR", threading.Lock())
    refused = constants.encode(made())
    assert isinstance(refused, constants.EncodedConstant)
    assert refused.is_unknown


def test_functions_and_constants_that_nobody_can_compare():
    pairs = [of_two(2, 3), of_two(5, 3)]
    for pair in pairs:  # the one function first, of which the other is a part
        constants.encode(pair.__closure__[0].cell_contents)
    assert constants.encode(pairs[0]) != constants.encode(pairs[1])
    assert constants.encode(pairs[0]) == constants.encode(of_two(2, 3))
    assert constants.encode(functools.lru_cache(lambda v: v)).is_unknown  # pickle names it alone
    unknown = constants.encode(threading.Lock())
    tree = dataclasses.replace(CIRCLE, constants=(("name", unknown),))
    assert trees.parse(trees.to_text(tree)) == tree
    for name in (threading.Lock(), "round"):
        with pytest.raises(MisfitError, match=r"name: expected _thread:lock, found"):
            pytree.flatten(tree, Circle(Point(1, 2), 3, name))
    assert pytree.flatten(tree, {"centre": [1, 2], "radius": 3}) == [1, 2, 3]
    with pytest.raises(UsageError, match="the bundle does not hold the value of name"):
        pytree.unflatten(tree, iter([1, 2, 3]), {"shapes:Circle": Circle})
    assert not hasattr(pytree.unflatten(tree, iter([1, 2, 3])), "name")
    for other in ("circle", object()):
        with pytest.raises(MisfitError, match=r"name: expected 'round', found"):
            pytree.flatten(CIRCLE, Circle(Point(1, 2), 3, other))


def test_known_classes_come_back_and_others_lists_and_none_stand_for_nodes():
    known = pytree.unflatten(CIRCLE, iter([1, 2, 3]), {"shapes:Circle": Circle})
    assert isinstance(known, Circle)
    assert (known.radius, known.name) == (3, "round")
    assert type(known.centre).__name__ == "Point"
    assert known.centre == (1, 2)
    unknown = pytree.unflatten(CIRCLE, iter([1, 2, 3]))
    assert dataclasses.asdict(unknown) == {"centre": (1, 2), "radius": 3, "name": "round"}
    with pytest.raises(dataclasses.FrozenInstanceError):
        unknown.radius = 4
    tree = Node("node", (0, 1), (Leaf(), Leaf()), "shapes:Turned")
    for value in ([1, 2], (1, 2), namedtuple("Turned", "b z")(1, 2)):
        assert pytree.flatten(tree, value, ("x",)) == [1, 2]
    for value in (namedtuple("Pair", "z b")(1, 2), jax.tree_util.Partial(print, 1, 2)):
        with pytest.raises(MisfitError, match="expected x as Turned, found Pa"):
            pytree.flatten(tree, value, ("x",))
    tree = trees.parse('["dict",[["a",null],["b",["tuple",[]]],["c",["list",["*",null]]]]]')
    value = {"a": None, "b": (), "c": [7, None]}
    assert pytree.flatten(tree, value) == [7]
    assert pytree.unflatten(tree, iter([7])) == value
    with pytest.raises(MisfitError, match="unexpected a: expected None"):
        pytree.flatten(tree, {**value, "a": 1})
    for less, missing in (({"b": (), "c": [7, None]}, "a"), ({**value, "c": [7]}, r"c\[1\]")):
        with pytest.raises(MisfitError, match=f"{missing} is missing: expected None"):
            pytree.flatten(tree, less)
