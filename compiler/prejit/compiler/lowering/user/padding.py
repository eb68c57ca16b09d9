"""Find the dimensions of a function's arrays that follow a bucket variable, so that their size may vary."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from prejit.runtime.errors import ManifestError

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
