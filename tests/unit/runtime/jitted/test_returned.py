"""What results are made into, without tracing the function."""

import dataclasses
from collections import OrderedDict
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

from prejit.runtime.format import trees
from prejit.runtime.format.arrays import Array
from prejit.runtime.format.constants import EncodedConstant, described, of_argument
from prejit.runtime.format.trees import Leaf, Node
from prejit.runtime.jitted.jit_program_choice import MissError
from prejit.runtime.jitted.returned import from_bundle, from_trace
from prejit.runtime.programs.pytree import ORDERED

HERE = __name__


class Point(NamedTuple):
    x: Any
    y: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Checked:
    """A class that only takes arrays of two numbers."""

    x: Any

    def __post_init__(self):
        if self.x.shape != (2,):
            raise ValueError("expected two numbers")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Scaled:
    x: Any
    scale: float = dataclasses.field(default=1.0, metadata={"static": True})


def node(kind, type_, *keys, constants=()):
    return Node(kind, keys, tuple(Leaf() for _ in keys), type_, constants)


def test_results_are_made_by_the_bundle_or_compared_with_a_trace():
    def returned(tree, *leaves):
        return from_bundle(tree, {}).value([*leaves])

    one, two = jnp.ones(1), jnp.ones(2)
    tree = Node("dict", ("a", "b"), (node("namedtuple", f"{HERE}:Point", "x", "y"), trees.NONE))
    assert returned(tree, one, two) == {"a": Point(one, two), "b": None}
    scaled = node("record", f"{HERE}:Scaled", "x", constants=(("scale", 2),))
    assert returned(scaled, one).scale == 2
    # Its own code runs with the results alone, as with jax.
    assert returned(node("record", f"{HERE}:Checked", "x"), two).x is two
    for keys in ((), ("a", "b"), ("b", "a")):  # it is no dict
        tree = Node("dict", keys, tuple(Leaf() for _ in keys), aux=ORDERED)
        value = returned(tree, *(one for _ in keys))
        assert (type(value), (*value,)) == (OrderedDict, keys)
    key = jax.random.key(7)
    [found] = returned(Node("list", (0,), (Leaf("threefry2x32"),)), jax.random.key_data(key))
    assert (found == key).all()
    traced = jax.jit(lambda x: {"a": x, "k": jax.random.key(0)}).trace(1.0)
    tree = Node("dict", ("a", "k"), (Leaf(), Leaf("threefry2x32")))
    arrays = [Array(("a",), "float32", (), weak=True), Array(("k",), "uint32", (2,))]
    returned = from_trace(traced, tree, arrays)
    assert returned.keys == ("", "threefry2x32")
    for other in ({"weak": False}, {"dtype": "float16"}, {"shape": (1,)}):
        with pytest.raises(MissError, match="it has changed since the build"):
            from_trace(traced, tree, [dataclasses.replace(arrays[0], **other), arrays[1]])
    with pytest.raises(MissError, match=r"weak float32\[\], uint32\[2\], found one that returns"):
        from_trace(jax.jit(lambda x: x).trace(1.0), tree, arrays)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass
class Pair:
    parts: tuple[Any, Any]
    about: Any

    def tree_flatten(self):
        return self.parts, self.about

    @classmethod
    def tree_unflatten(cls, about, parts):
        return cls(tuple(parts), about)


def test_a_registered_class_gets_its_auxiliary_data_or_that_of_an_argument():
    one, two, about = jnp.ones(1), jnp.ones(2), object()
    digest = EncodedConstant('["digest","a:B","sha256:' + "0" * 64 + '"]')
    given = {digest.text: about}
    for aux, expected in ((described((1, 2.5)), (1, 2.5)), (of_argument(digest), about)):
        tree = Node("node", (0, 1), (Leaf(), Leaf()), f"{HERE}:Pair", aux=aux)
        found = from_bundle(tree, given)
        assert found.structure == jax.tree.structure(Pair((one, two), expected))
        assert found.value([one, two]).about == expected
    for aux, known in ((digest, given), (of_argument(digest), {})):
        assert from_bundle(Node("node", (0,), (Leaf(),), f"{HERE}:Pair", aux=aux), known) is None


@pytest.mark.parametrize(
    "tree",
    [
        node("namedtuple", "a_module_that_nobody_imported:Point", "x", "y"),
        node("namedtuple", f"{HERE}:OrderedDict", "x", "y"),  # the class says another module
        node("record", f"{HERE}:Scaled", "x"),  # its scale is not told
        node("record", f"{HERE}:Point", "x", "y"),
        Node("node", (0,), (Leaf(),), f"{HERE}:Point"),
    ],
)
def test_what_the_bundle_does_not_tell(tree):
    assert OrderedDict.__module__ == "collections"
    assert from_bundle(tree, {}) is None
    assert from_bundle(Node("list", (0,), (tree,)), {}) is None
