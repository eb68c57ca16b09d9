"""Choose the sizes at which a build compares a program of varying sizes with its function."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prejit.compiler.base import python_source

_MOST_NUMBERS = 16
"""Maximum number of sizes that are tried because the user's code mentions them."""
_LARGEST = 4096
"""The largest size that is tried because the user's code mentions it."""
_ODD = 7
"""A small prime: a size that code rarely treats in a special way."""


def padded_sizes(
    bucket: Mapping[str, int], pad: Sequence[str], numbers: Iterable[int]
) -> list[dict[str, int]]:
    """Return sizes for which a bucket is padded.

    Args:
        bucket: the size of each variable.
        pad: the variables that are padded.
        numbers: sizes that the code mentions.
    """
    tried = {}
    for name in pad:
        size = bucket[name]
        known = (1, size - 1, _prime(size // 2), *sorted(numbers))
        if found := dict.fromkeys(each for each in known if 1 <= each < size):
            tried[name] = list(found)
    return _together(tried)


def open_sizes(
    bucket: Mapping[str, int], opened: Sequence[str], numbers: Iterable[int]
) -> list[dict[str, int]]:
    """Return sizes that no bucket has: few, even, odd, and one more than the bucket. Arguments as above."""
    tried = {}
    for name in opened:
        known = (_ODD, 2, bucket[name] + 1, 1, *sorted(numbers))
        tried[name] = list(dict.fromkeys(each for each in known if each != bucket[name]))
    return _together(tried)


def _together(tried: Mapping[str, Sequence[int]]) -> list[dict[str, int]]:
    """Return sizes of all variables together, so that each has each of its own, and so that all have one."""
    found = []
    if len(tried) > 1 and (common := set.intersection(*map(set, tried.values()))):
        found.append(dict.fromkeys(tried, max(common)))
    for turn in range(max(map(len, tried.values()), default=0)):
        sizes = {
            name: each[(turn + place) % len(each)]
            for place, (name, each) in enumerate(tried.items())
        }
        if sizes not in found:
            found.append(sizes)
    return found


def _prime(most: int) -> int:
    """Return the largest prime up to a number; 0: there is none."""
    return next((n for n in range(most, 1, -1) if all(n % d for d in range(2, int(n**0.5) + 1))), 0)


def numbers_in(files: Iterable[str]) -> list[int]:
    """Return the integers that source files compare with, look up, divide by or name, smallest first.

    Code that looks at a size while it is traced does so for one of these: `n == 100`, `n in (64, 128)`,
    `{64: 2.0}.get(n)`, `n % 16`, `LIMIT = 100`.
    """
    found = set[int]()
    for file in files:
        try:
            tree = python_source.parse("".join(linecache.getlines(file)))
        except (SyntaxError, ValueError):  # no Python: a file that generates code
            continue
        found.update(each for each in _numbers(tree) if 1 < each <= _LARGEST)
    return sorted(found)[:_MOST_NUMBERS]


def _numbers(tree: ast.AST) -> Iterator[int]:
    for node in ast.walk(tree):
        match node:
            case ast.Compare() | ast.MatchValue():
                yield from _constants(node)
            case ast.Dict():
                for key in node.keys:
                    yield from _constants(key)
            case ast.BinOp(op=ast.Mod()):
                yield from _constants(node.right)
            case ast.Assign() | ast.AnnAssign():
                if isinstance(node.value, ast.Constant | ast.Tuple | ast.List | ast.Set):
                    yield from _constants(node.value)


def _constants(node: ast.AST | None) -> Iterator[int]:
    for each in ast.walk(node) if node is not None else ():
        if isinstance(each, ast.Constant) and type(each.value) is int:
            yield each.value
