"""JSON files that a user gives: read within limits, so that no content of theirs is a crash. No JAX."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from prejit.compiler.base.suggestions import shown
from prejit.runtime.base.typed_json import depth
from prejit.runtime.errors import CheckpointError

MAX_BYTES = 16 << 20
"""Largest size of a file in bytes. The index of a checkpoint of 91,000 tensors has 9 MB."""
MAX_DEPTH = 64
"""Largest depth of nested lists and objects. The code that copies configurations recurses."""


def read_json(file: Path, hint: str | None = None) -> Any:
    """Return the content of a JSON file.

    Raises:
        CheckpointError: the file is missing, too large, nested too deeply, or no JSON in UTF-8. NaN and
            Infinity, which Python would accept, are no JSON.
    """
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ValueError(f"expected at most {MAX_BYTES} bytes, found more")
        # Not json.loads(content), which guesses among UTF-8, UTF-16 and UTF-32.
        constants: list[str] = []

        def constant(name: str) -> _Constant:
            constants.append(name)
            return _Constant(name)

        value = json.loads(content.decode(), parse_constant=constant)
        if constants:
            found = next(_places(value), constants[0])
            raise ValueError(f"expected JSON, which has no {found}")
        if depth(value) > MAX_DEPTH:
            raise ValueError(f"nested too deeply: expected at most {MAX_DEPTH} levels, found more")
    except FileNotFoundError as error:
        raise CheckpointError(f"{file}: expected a file, found none", hint=hint) from error
    except (OSError, ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise CheckpointError(f"{file}: cannot read JSON: {reason}", hint=hint) from error
    return value


def read_object(file: Path, hint: str | None = None, *, required: bool = True) -> dict[str, Any]:
    """Return the content of a JSON file that holds an object.

    Args:
        file: the file.
        hint: what to do about a file that cannot be read.
        required: whether the file must exist; else a missing file counts as an empty object.

    Raises:
        CheckpointError: as `read_json`, or the file holds something else than an object.
    """
    value = read_json(file, hint) if required or file.is_file() else {}
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: expected an object, found {shown(value)}", hint=hint)
    return value


def read_list(file: Path, hint: str) -> list[Any]:
    """Return the content of a JSON file that holds a list.

    Raises:
        CheckpointError: as `read_json`, or the file holds something else than a list.
    """
    value = read_json(file, hint)
    if not isinstance(value, list):
        raise CheckpointError(f"{file}: expected a list, found {shown(value)}", hint=hint)
    return value


class _Constant(str):
    """NaN, Infinity or -Infinity in a file."""


def _places(value: Any, key: str = "") -> Iterator[str]:
    """Yield each constant in a value, with its key."""
    if isinstance(value, _Constant):
        yield f"{value}, found at {key}" if key else value
    inner: Iterable[tuple[str, Any]] = ()
    if isinstance(value, dict):
        names = {name: name if name.isprintable() else shown(name) for name in value}
        inner = ((f"{key}.{names[name]}" if key else names[name], at) for name, at in value.items())
    elif isinstance(value, list):
        inner = ((f"{key}[{index}]", at) for index, at in enumerate(value))
    for name, at in inner:
        yield from _places(at, name)
