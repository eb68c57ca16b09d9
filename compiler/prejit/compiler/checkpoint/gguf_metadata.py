"""Read the metadata of a GGUF file, before the package `gguf` reads the file.

    file     "GGUF", version u32, tensors u64, entries u64; entries; tensors
    entry    key, type u32, value
    text     bytes u64, UTF-8
    array    type u32, elements u64, elements
    tensor   name, dimensions u32, each u64, type u32, offset u64

The package makes an object for each element that the file counts, even past its end.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

from prejit.compiler.base.suggestions import shown
from prejit.runtime.errors import CheckpointError

_NUMBERS = dict(zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True))
"""The format of each type of numbers, for `struct`."""
_TEXT, _ARRAY = 8, 9
_MOST_ELEMENTS = 1 << 22
"""Maximum elements of all arrays, entries and tensors of a file: vocabularies have some 500,000."""
_MOST_DIMENSIONS = 4


def read_metadata(path: Path, *, arrays: bool = False) -> dict[str, Any]:
    """Return the metadata of a file.

    Args:
        path: the file.
        arrays: whether to return all arrays; else texts, and more than 1024 numbers, are None.

    Raises: as `_read`.
    """
    return _read(path, arrays=arrays)[0]


def read_kinds(path: Path) -> set[int]:
    """Return the numbers of the types of a file's tensors.

    Raises: as `_read`.
    """
    return _read(path, arrays=False)[1]


def _read(path: Path, *, arrays: bool) -> tuple[dict[str, Any], set[int]]:
    """Return the metadata of a file, and the types of its tensors.

    Raises:
        CheckpointError: the file is one of several, or of another byte order.
        ValueError, struct.error: the file is damaged.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        cursor = _Cursor(content, arrays)
        if cursor.bytes(4, "the file") != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version = cursor.number("I")
        if version and version & 0xFFFF == 0:
            raise CheckpointError(
                f"{path}: expected a little-endian file, found a big-endian one",
                hint="convert it: gguf-convert-endian FILE little",
            )
        if version not in (2, 3):
            raise ValueError(f"expected version 2 or 3 of GGUF, found {version}")
        tensors, entries = cursor.number("Q"), cursor.number("Q")
        cursor.count(entries, 13, "the metadata")
        found = {}
        for _ in range(entries):
            key = cursor.text("a key")
            found[key] = cursor.value(key)
        cursor.count(tensors, 24, "the tensors")
        kinds = set()
        for _ in range(tensors):
            name = cursor.text("a tensor")
            dimensions = cursor.number("I")
            if dimensions > _MOST_DIMENSIONS:
                raise ValueError(
                    f"{name}: expected up to {_MOST_DIMENSIONS} dimensions, found {dimensions}"
                )
            cursor.bytes(8 * dimensions, name)
            kinds.add(cursor.number("I"))
            cursor.bytes(8, name)
    if found.get("split.count", 0) not in (0, 1):
        raise CheckpointError(
            f"{path}: split.count: expected a whole model, found one of {shown(found['split.count'])} files",
            hint="join them: llama-gguf-split --merge FIRST_FILE WHOLE_FILE",
        )
    return found, kinds


class _Cursor:
    """A place in a file."""

    def __init__(self, content: mmap.mmap, arrays: bool) -> None:
        self._content, self._at, self._elements = content, 0, 0
        self._arrays = arrays

    def number(self, form: str) -> Any:
        """Return a number."""
        (value,) = struct.unpack_from(f"<{form}", self._content, self._at)
        self._at += struct.calcsize(f"<{form}")
        return value

    def bytes(self, size: int, name: str) -> bytes:
        """Return so many bytes."""
        self._fits(size, "bytes", name)
        self._at += size
        return self._content[self._at - size : self._at]

    def text(self, name: str) -> str:
        """Return a text."""
        return self.bytes(self.number("Q"), name).decode()

    def count(self, elements: int, least_bytes: int, name: str) -> None:
        """Check that the file can hold so many elements, each of some bytes."""
        self._fits(elements * least_bytes, "bytes", name)
        self._elements += elements
        if self._elements > _MOST_ELEMENTS:
            raise ValueError(
                f"{name}: expected up to {_MOST_ELEMENTS:,} elements, found {self._elements:,}"
            )

    def value(self, name: str) -> Any:
        """Return the value of an entry."""
        kind = self.number("I")
        if kind == _TEXT:
            return self.text(name)
        if kind != _ARRAY:
            return self.number(_number(kind, name))
        kind, elements = self.number("I"), self.number("Q")
        if kind == _TEXT:
            self.count(elements, 8, name)
            if self._arrays:
                return [self.text(name) for _ in range(elements)]
            for _ in range(elements):
                self.bytes(self.number("Q"), name)
            return None
        form = _number(kind, name)
        size = struct.calcsize(f"<{form}")
        self.count(elements, size, name)
        content = self.bytes(elements * size, name)
        is_read = self._arrays or elements <= 1024
        return list(struct.unpack(f"<{elements}{form}", content)) if is_read else None

    def _fits(self, size: int, unit: str, name: str) -> None:
        left = len(self._content) - self._at
        if size > left:
            raise ValueError(f"{name}: expected up to {left:,} {unit}, found {size:,}")


def _number(kind: int, name: str) -> str:
    if kind not in _NUMBERS:
        raise ValueError(f"{name}: expected a type of numbers or texts, found {kind}")
    return _NUMBERS[kind]
