"""Programs whose sizes vary: dimensions that follow a variable, their limits, and sizes to try.

A build compares such a program with its function at sizes that the bucket does not have.
"""

from __future__ import annotations

import ast
import linecache
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from prejit.compiler.base import python_source
from prejit.compiler.lowering.user.traced_primitives import equations
from prejit.runtime.errors import ManifestError

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

    `bucket` has the size of each variable, `pad` those that are padded, `numbers` the sizes that the code
    mentions.
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


Shapes = Sequence[tuple[int, ...]]
Variables = list[tuple[str, ...]]
"""The variable of each dimension of each array, `""` for none; `()` for an array without any."""


def variables_of(
    shapes_at: Callable[[Mapping[str, int]], tuple[Shapes, Shapes]],
    bucket: Mapping[str, int],
    pad: Sequence[str],
    open_sizes: Sequence[str],
    where: str,
) -> tuple[Variables, Variables]:
    """Return the padded variables among the dimensions of arguments and results.

    Each variable is doubled in turn. A dimension that it doubles and that has its size is the variable.

    Args:
        shapes_at: returns the shapes of all arguments and all results at a bucket.
        bucket: the size of each variable.
        pad: the variables that a call may have less of.
        open_sizes: the variables that a call may give any size. The program is compiled again for that size,
            so dimensions of results may depend on it in any way.
        where: the program, for errors.

    Raises:
        ManifestError: a dimension depends on a variable in another way, so nothing can be cut from it.
    """
    if not (pad or open_sizes):
        none: list[Variables] = [[()] * len(side) for side in shapes_at(bucket)]
        return none[0], none[1]
    fixed = shapes_at(bucket)
    found = [[[""] * len(shape) for shape in shapes] for shapes in fixed]
    for variable in dict.fromkeys((*pad, *open_sizes)):
        doubled = shapes_at({**bucket, variable: 2 * bucket[variable]})
        for side, (before, after) in enumerate(zip(fixed, doubled, strict=True)):
            for place, (one, other) in enumerate(zip(before, after, strict=True)):
                for dimension, (extent, changed) in enumerate(zip(one, other, strict=True)):
                    if extent == changed or (side and variable not in pad):
                        continue
                    if (extent, changed) != (bucket[variable], 2 * bucket[variable]):
                        what = f"{('argument', 'result')[side]} {place}"
                        raise ManifestError(
                            f"{where}: expected dimensions that are {variable!r}, and dimension "
                            f"{dimension} of {what} is {extent} where {variable!r} is {bucket[variable]}",
                            hint="return arrays that have the variable as a dimension of their own",
                        )
                    found[side][place][dimension] = variable
    named: list[Variables] = [[tuple(each) if any(each) else () for each in side] for side in found]
    return named[0], named[1]


def size_limits(traced: ClosedJaxpr, names: Sequence[str]) -> list[str]:
    """Return constraints on symbolic sizes, as jax.export.symbolic_shape takes them.

    Each term of a sum, such as `3*n^2*m - n`, has its share. Of a number with quotients,
    remainders, minima or maxima of sizes nothing is known.

    `traced` is the function at the symbolic sizes `names`.
    """
    found = set[str]()
    largest = int(np.iinfo(jax.dtypes.canonicalize_dtype(np.int64)).max)
    for equation in equations(traced.jaxpr):
        number = str(equation.params.get("dim", ""))
        if equation.primitive.name != "dim_as_value" or "(" in number:
            continue
        terms = re.split(r"[+-]", number.replace(" ", "").lstrip("-"))
        for term in terms:
            factors = [factor.partition("^") for factor in term.split("*")]
            whole = math.prod(int(base) for base, _, _ in factors if base.isdigit())
            powers = [(base, int(power or 1)) for base, _, power in factors if base in names]
            sizes = [base for base, power in powers for _ in range(power)]
            if sizes and (len(sizes) > 1 or whole > 1 or len(terms) > 1):
                most = str(largest // len(terms) // whole)
                limit = reduce(lambda rest, size: f"floordiv({rest}, {size})", sizes[1:], most)
                found.add(f"{sizes[0]} <= {limit}")
    return sorted(found)
