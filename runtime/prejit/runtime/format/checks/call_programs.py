"""Checks of the programs of the user: how their arguments and results are nested, and static values."""

from __future__ import annotations

import json
from collections.abc import Sequence

from prejit.runtime.errors import rejecting
from prejit.runtime.format import constants, limits, trees
from prejit.runtime.format.arrays import Array, Mesh
from prejit.runtime.format.bundle_schema import Config, ProgramEntry
from prejit.runtime.format.checks.program_table import check_array
from prejit.runtime.format.constants import Constant


def _check_paths(arrays: Sequence[Array]) -> None:
    """Check that the arguments or results of a `call` program form a tree."""
    # keys as text, as files and options spell them
    paths = [tuple(map(str, array.path)) for array in arrays]
    if (longest := max(map(len, paths), default=0)) > limits.MAX_DEPTH:
        raise ValueError(f"expected at most {limits.MAX_DEPTH} keys in a path, found {longest}")
    inner = {at[:place] for at in paths for place in range(len(at))}
    if len(set(paths)) != len(paths) or not inner.isdisjoint(paths):
        raise ValueError("expected paths of a tree, found one twice or one inside of another")


@rejecting
def check_tree(text: str | None, arrays: Sequence[Array], path: str) -> trees.Tree:
    """7. Return the tree of a program's arguments or results, whose leaves must be these arrays."""
    tree = trees.parse(text or "")
    if tuple(trees.paths(tree)) != tuple(array.path for array in arrays):
        raise ValueError("expected a tree whose leaves have the paths of the arrays, in order")
    return tree


@rejecting
def check_programs(config: Config, path: str) -> None:
    """7. Check every line of a program table. A load checks those of a program when it is first used."""
    for program in config.programs:
        where = f"{path}: {program.name}"
        for texts, tree in (
            (program.arguments, program.arguments_tree),
            (program.results, program.results_tree),
        ):
            arrays = check_arrays(texts, program.kind, config.mesh, where)
            if program.kind == "call":
                check_tree(tree, arrays, where)
        check_static(program, where)


@rejecting
def check_static(program: ProgramEntry, path: str) -> dict[str, Constant]:
    """7. Return the values of a program's static arguments by name; check its `state`, sizes and mask."""
    _check_sizes(program)
    values: dict[str, Constant] = {}
    static = program.static or {}
    for name, text in (*(program.state or {}).items(), *static.items()):
        try:
            values[name] = constants.parse(found := json.loads(text))
            canonical = constants.dumps(found) == text
        except (ValueError, RecursionError):
            canonical = False
        if not canonical:
            raise ValueError(f"{name!r:.80}: expected a constant, found {text!r:.80}")
    return {name: values[name] for name in static}


def _check_sizes(program: ProgramEntry) -> None:
    """Check that dimensions have the sizes of their variables in the bucket, and that a mask is of bool."""
    bucket, mask = program.bucket, program.mask
    for name in (*(program.pad or ()), *(program.open_sizes or ())):
        if bucket.get(name, 0) < 1:
            raise ValueError(f"expected a size of {name!r:.80} in the bucket, found none")
    for text in (*program.arguments, *program.results):
        if " ~" not in text:
            continue
        array = Array.parse(text)
        for name, size in zip(array.variables, array.shape, strict=False):
            if name and bucket.get(name) != size:
                raise ValueError(
                    f"{text:.80}: expected {bucket.get(name)} as {name!r:.80} of the bucket, found {size}"
                )
    masks = [Array.parse(text) for text in program.arguments] if mask is not None else []
    for array in masks:
        if array.path and str(array.path[0]) == mask and array.dtype != "bool":
            raise ValueError(f"mask: expected an argument of bool, found {array.dtype}")


@rejecting
def check_arrays(
    texts: Sequence[str], kind: str, mesh: Mesh | None, path: str
) -> tuple[Array, ...]:
    """7. Return the checked arguments or results of a program; those of a `call` program must form a tree."""
    arrays = tuple(check_array(text, mesh, path) for text in texts)
    if kind == "call":  # check_config has compared other texts with the signature
        _check_paths(arrays)
    return arrays
