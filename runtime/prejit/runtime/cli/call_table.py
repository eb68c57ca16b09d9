"""How to call the programs of the user in a bundle, as `prejit inspect` shows it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from prejit.runtime.base.wording import shortened, table
from prejit.runtime.format import trees
from prejit.runtime.format.arrays import Array
from prejit.runtime.format.bundle_schema import Config, ProgramEntry
from prejit.runtime.format.checks.call_programs import check_arrays, check_static, check_tree
from prejit.runtime.format.constants import EncodedConstant
from prejit.runtime.programs.usage_hint import functions_of

_WIDTH = 90
"""Maximum number of characters of an argument or result."""


def calls_table(config: Config) -> str:
    """Return a table of the arguments and results of the user's programs; empty if there are none.

    Sizes are those of the first bucket.

    Raises:
        RejectError: the program table is damaged.
    """
    functions = functions_of(config.programs)
    rows = [row for name, buckets in functions.items() for row in _rows(name, buckets, config)]
    return table(("call", "", "value"), rows) if rows else ""


def _rows(
    name: str, programs: Sequence[ProgramEntry], config: Config
) -> Iterator[tuple[str, str, str]]:
    first = programs[0]
    where = f"{config.bundle}: program table of {config.target}: {first.name}"
    arguments = check_arrays(first.arguments, first.kind, config.mesh, where)
    results = check_arrays(first.results, first.kind, config.mesh, where)
    tree = check_tree(first.arguments_tree, arguments, where)
    assert isinstance(tree, trees.Node)
    arrays, title = iter(arguments), name
    for key, child in zip(tree.keys, tree.children, strict=True):
        yield title, str(key), shortened(_described(child, arrays), _WIDTH)
        title = ""
    static: dict[str, list[str]] = {}
    for program in programs:
        for key, value in check_static(program, where).items():
            static.setdefault(key, []).append(
                str(value) if isinstance(value, EncodedConstant) else json.dumps(value)
            )
    for key, values in static.items():
        yield title, key, shortened(" or ".join(dict.fromkeys(values)), _WIDTH)
        title = ""
    gives = check_tree(first.results_tree, results, where)
    yield title, "->", shortened(_described(gives, iter(results)), _WIDTH)


def _described(tree: trees.Tree, arrays: Iterator[Array]) -> str:
    """Return a value as Python writes it, with dtypes and shapes for arrays."""
    if isinstance(tree, trees.Leaf):
        array = next(arrays)
        if tree.key:
            return f"random key{list(array.shape[:-1]) or ''}"
        names = array.variables or ("",) * len(array.shape)
        extents = ", ".join(
            name or str(extent) for name, extent in zip(names, array.shape, strict=True)
        )
        return f"{'weak ' * array.weak}{array.dtype}[{extents}]"
    parts = [_described(child, arrays) for child in tree.children]
    pairs = zip(tree.keys, parts, strict=True)
    match tree.kind:
        case "none":
            return "None"
        case "list":
            return f"[{', '.join(parts)}]"
        case "dict":
            return f"{{{', '.join(f'{key!r}: {part}' for key, part in pairs)}}}"
        case "namedtuple" | "record":
            name = tree.type.rpartition(":")[2]
            return f"{name}({', '.join(f'{key}={part}' for key, part in pairs)})"
        case _:
            return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
