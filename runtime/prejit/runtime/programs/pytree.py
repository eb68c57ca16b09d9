"""Pytrees: nested dicts, lists and tuples of arrays to the flat lists that programs take, and back.

jax.tree_util does this too, but it would import jax, which the runtime does not need.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

Path = tuple[str | int, ...]


def leaves(tree: Any, at: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield every leaf of a tree with its path: dicts by key, lists and tuples by index."""
    if isinstance(tree, dict):
        for key, item in tree.items():
            yield from leaves(item, (*at, key))
    elif isinstance(tree, list | tuple):
        for place, item in enumerate(tree):
            yield from leaves(item, (*at, place))
    elif tree is not None:
        yield at, tree


def unflatten(paths: Sequence[Path], values: Sequence[Any]) -> Any:
    """Return the tree that has these values at these paths: dicts for names, tuples for indices."""
    if len(paths) == 1 and not paths[0]:
        return values[0]
    branches: dict[str | int, tuple[list[Path], list[Any]]] = {}
    for path, value in zip(paths, values, strict=True):
        below, found = branches.setdefault(path[0], ([], []))
        below.append(path[1:])
        found.append(value)
    built = {key: unflatten(*branch) for key, branch in branches.items()}
    if all(type(key) is int for key in built):
        return tuple(built[place] for place in sorted(built))
    return built


def spell(path: Path) -> str:
    """Return a path as one writes it in Python: `params['dense'][0]`."""
    head, *rest = path or ("value",)
    return str(head) + "".join(f"[{key!r}]" for key in rest)


_NOT_IN_NAMES = re.compile(r"[/%.\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def dotted(path: Path) -> str:
    """Return a path as one name for files and command lines: `1.dense.kernel`. It is unique in its tree.

    Dots inside a key, and characters that file names or terminals do not take, are written as %XX; an empty
    key is written as %.
    """
    keys = (_NOT_IN_NAMES.sub(lambda match: f"%{ord(match[0]):02X}", str(key)) for key in path)
    return ".".join(key or "%" for key in keys)
