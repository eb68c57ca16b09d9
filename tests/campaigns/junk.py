"""Hypothesis strategies for damaged configuration: JSON objects and files with parts replaced by junk."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

from hypothesis import strategies as st

NUMBERS = (-2, -1, 0, 1, 3, 7, 100_000, 2**31 - 1, 2**31, 2**63, 2**64, 10**30)
FLOATS = (-1.0, 0.0, 1e-300, 0.5, 1.5, 1e300, math.inf, -math.inf, math.nan)
_TEXTS = (
    *("", "0", "1e9", "float32", "silu", "../..", "/dev/zero"),
    *("\x1b[31m", "\x00", "é" * 40, "a" * 5000),
)


def _nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


_SCALARS: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(NUMBERS),
    st.sampled_from(FLOATS),
    st.sampled_from(_TEXTS),
    st.text(max_size=8),
)
VALUES: st.SearchStrategy[Any] = st.one_of(
    _SCALARS,
    st.lists(_SCALARS, max_size=3),
    st.dictionaries(st.sampled_from(("factor", "rope_type", "type", "a")), _SCALARS, max_size=3),
)
"""A value of any type, most often a wrong one."""
JUNK: st.SearchStrategy[Any] = st.one_of(
    VALUES, VALUES, VALUES, st.sampled_from((90, 2000)).map(_nested)
)
"""A value of a configuration file, where lists may be nested deeper than Python's recursion goes."""


def _near(value: Any) -> st.SearchStrategy[Any]:
    """Values of the same type, which may well be right ones."""
    if isinstance(value, bool):
        return st.just(not value)
    if isinstance(value, int):
        return st.sampled_from((value - 1, value + 1, 2 * value, value // 2))
    if isinstance(value, float):
        return st.sampled_from((value / 2, value * 2, -value))
    if isinstance(value, list) and value and not isinstance(value[-1], list):  # deep junk
        return st.lists(st.one_of(st.just(value[0]), _near(value[-1])), max_size=3)
    return JUNK


@st.composite
def mutated(draw: st.DrawFn, tree: Any, more: tuple[str, ...] = (), most: int = 3) -> Any:
    """Draw a JSON object with some nodes deleted, replaced or added.

    Args:
        draw: of Hypothesis.
        tree: the object to start from.
        more: names that may be added to it.
        most: the largest number of changes.
    """
    tree = deepcopy(tree)
    for _ in range(draw(st.integers(1, most))):
        *parents, last = draw(st.sampled_from([*_paths(tree), *((name,) for name in more)]))
        node = tree
        for key in parents:
            node = node[key]
        if isinstance(node, dict) and last not in node:
            node[last] = draw(JUNK)
        elif (what := draw(st.integers(0, 3))) == 3:
            del node[last]
        else:
            node[last] = draw(JUNK if what == 2 else _near(node[last]))
    return tree


@st.composite
def mutated_bytes(draw: st.DrawFn, content: bytes) -> bytes:
    """Draw a file that is cut off, or has some bytes replaced."""
    if draw(st.booleans()):
        return content[: draw(st.integers(0, max(0, len(content) - 1)))]
    changed = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        changed[draw(st.integers(0, len(changed) - 1))] = draw(st.integers(0, 255))
    return bytes(changed)


def _paths(tree: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the path of every node below the root."""
    if isinstance(tree, dict | list):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield (*at, key)
            if len(at) < 8:  # deep junk of an earlier mutation
                yield from _paths(value, (*at, key))


def to_json(value: Any) -> str:
    """Return JSON, NaN as Python writes it, of lists that may be nested deeper than json.dumps goes."""
    depth = 0
    while isinstance(value, list) and len(value) == 1:
        value, depth = value[0], depth + 1
    if isinstance(value, dict):
        text = ", ".join(f"{json.dumps(str(name))}: {to_json(x)}" for name, x in value.items())
        text = f"{{{text}}}"
    elif isinstance(value, list):
        text = f"[{', '.join(map(to_json, value))}]"
    else:
        text = json.dumps(value)
    return "[" * depth + text + "]" * depth


def to_toml(value: Any) -> str:
    """Return a value as TOML; null, which TOML lacks, becomes text."""
    depth = 0
    while isinstance(value, list) and len(value) == 1:
        value, depth = value[0], depth + 1
    if isinstance(value, dict):
        text = ", ".join(f"{json.dumps(str(name))} = {to_toml(x)}" for name, x in value.items())
        text = f"{{{text}}}"
    elif isinstance(value, list):
        text = f"[{', '.join(map(to_toml, value))}]"
    elif isinstance(value, float):
        text = str(value)
    else:
        text = json.dumps("null" if value is None else value)
    return "[" * depth + text + "]" * depth
