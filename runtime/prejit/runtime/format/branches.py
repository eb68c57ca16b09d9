"""The arguments or results of a program one by one: the branches of its tree, with their arrays."""

from __future__ import annotations

from collections.abc import Sequence
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

    def of(self, values: Sequence[_T]) -> list[_T]:
        """Return the branch's part of a list with a value for each argument or result."""
        return list(values[self.start : self.start + len(self.arrays)])

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
