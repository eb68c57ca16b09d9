"""The arguments or results of a program one by one: the branches of its tree, with their arrays."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from prejit.runtime.format import trees
from prejit.runtime.format.arrays import Array

_T = TypeVar("_T")


@dataclass(frozen=True)
class Branch:
    """An argument or a result of a program: one branch of its tree.

    Attributes:
        key: its name, or its place.
        tree: how it is nested.
        arrays: its arrays, in order.
        start: the place of the first one among all arrays of the program.
    """

    key: trees.Key
    tree: trees.Tree
    arrays: tuple[Array, ...]
    start: int

    @property
    def places(self) -> range:
        """The places of its arrays."""
        return range(self.start, self.start + len(self.arrays))

    def of(self, values: Sequence[_T]) -> list[_T]:
        """Return the branch's part of a list with a value for each argument or result."""
        return list(values[self.start : self.places.stop])

    def holds_what(self, other: Branch) -> bool:
        """Return whether another branch has the same structure, shapes and types."""
        return self.tree == other.tree and [(a.dtype, a.weak, a.shape) for a in self.arrays] == [
            (a.dtype, a.weak, a.shape) for a in other.arrays
        ]


def whole(tree: trees.Tree, arrays: tuple[Array, ...]) -> Branch:
    """Return all arguments or results of a program as one branch."""
    return Branch("", tree, arrays, 0)


def branches(tree: trees.Tree, arrays: tuple[Array, ...]) -> list[Branch]:
    """Return the arguments or results of a program; a single array is one by itself."""
    if isinstance(tree, trees.Leaf):
        return [whole(tree, arrays)]
    found, start = [], 0
    for key, child in zip(tree.keys, tree.children, strict=True):
        count = sum(1 for _ in trees.leaves(child))
        found.append(Branch(key, child, arrays[start : start + count], start))
        start += count
    return found


def candidates(
    key: trees.Key, alike: Sequence[trees.Key], arguments: Collection[trees.Key]
) -> list[trees.Key]:
    """Return the results that may be the next value of an argument: one if there is no doubt.

    Args:
        key: the name or place of the argument.
        alike: names or places of the results with its structure, shapes and dtypes.
        arguments: names or places of all arguments. A result with the name of another one belongs to that.
    """
    if isinstance(key, str) and key in alike:
        return [key]
    return [each for each in alike if isinstance(each, int) or each not in arguments]


def how_to_name(key: trees.Key) -> str:
    """Return a hint that says how a function tells the next value of an argument from other results."""
    if isinstance(key, str):
        return f"let the function return a dict whose key {key!r} is the next value of {key!r}"
    return (
        "give the arguments names (`args` as a table, or keyword arguments), and let the function return a "
        "dict whose key is the argument's name"
    )
