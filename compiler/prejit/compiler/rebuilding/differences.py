"""How two versions of a part differ, in words: StableHLO, executables and weights."""

from __future__ import annotations

import json
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prejit.runtime.base.files import Content
from prejit.runtime.device.portable import stablehlo_module
from prejit.runtime.format.checks.elf import read_sections

_ELF = b"\x7fELF\x02\x01"
"""The first bytes of a 64-bit little-endian object file."""
_EXECUTABLE = 4
"""The flag of sections that hold code, SHF_EXECINSTR."""
_OPERATION = re.compile(r"\b(?:stablehlo|chlo|mhlo|sdy)\.[a-z_0-9]+")
_SHOWN = 6
"""Maximum number of operations or tensors in a description."""
_LINE_CHARACTERS = 100
"""Maximum length of a line of StableHLO in a description."""


@dataclass(frozen=True)
class PartDifference:
    """How two versions of a part differ.

    Attributes:
        text: what differs.
        harmless: whether they compute the same by construction.
    """

    text: str
    harmless: bool = False


def in_programs(old: bytes, new: bytes, platforms: Sequence[str], platform: str) -> PartDifference:
    """Return how two portable programs differ: by their operations, or by the first line that differs."""
    texts = []
    for portable in (old, new):
        module = stablehlo_module(portable, platforms, platform)
        texts.append(module.operation.get_asm(large_elements_limit=16))
    counts = [Counter(_OPERATION.findall(text)) for text in texts]
    names = sorted(name for name in {*counts[0], *counts[1]} if counts[0][name] != counts[1][name])
    if names:
        shown = [f"{name} {counts[0][name]} -> {counts[1][name]}" for name in names[:_SHOWN]]
        more = f" and {len(names) - _SHOWN} more operations" if len(names) > _SHOWN else ""
        return PartDifference(f"{', '.join(shown)}{more}")
    lines = [text.splitlines() for text in texts]
    for before, after in zip(*lines, strict=False):
        if before != after:
            both = [line.strip()[:_LINE_CHARACTERS] for line in (before, after)]
            return PartDifference(f"the same operations, another line: {both[0]!r} -> {both[1]!r}")
    return PartDifference(
        "the same text: other large constants, or another version of its encoding"
    )


def in_executables(old: bytes, new: bytes) -> PartDifference:
    """Return how two executables differ: by the object files in them, or by their first byte that differs."""
    objects, rest = zip(*map(_split, (old, new)), strict=True)
    if any(objects):
        counts = [Counter(each) for each in objects]
        # The lengths between the objects move with them: without order they are the same bytes.
        if counts[0] == counts[1] and Counter(rest[0]) == Counter(rest[1]):
            return PartDifference(
                f"the same {len(objects[0])} kernels in another order", harmless=True
            )
        if counts[0] == counts[1]:
            return PartDifference(f"the same {len(objects[0])} kernels with another description")
        differing = sum((counts[0] - counts[1]).values())
        return PartDifference(
            f"{differing} of {len(objects[0])} kernels; {len(old)} -> {len(new)} bytes"
        )
    return PartDifference(_first_byte(old, new))


def in_libraries(old: bytes, new: bytes) -> PartDifference:
    """Return how two libraries of kernels differ: whether in code, and in how many sections."""
    sizes = f"{len(old)} -> {len(new)} bytes"
    try:
        sections = [read_sections(each) for each in (old, new)]
    except ValueError as error:
        return PartDifference(f"{sizes}; {error}")
    if len(sections[0]) != len(sections[1]):
        return PartDifference(f"{len(sections[0])} -> {len(sections[1])} sections; {sizes}")
    pairs = [pair for pair in zip(*sections, strict=True) if pair[0].content != pair[1].content]
    code = any(section.flags & _EXECUTABLE for pair in pairs for section in pair)
    which = ", code among them" if code else ", and no code"
    return PartDifference(f"{len(pairs)} of {len(sections[0])} sections{which}; {sizes}")


def in_weights(old: Content, new: Content) -> PartDifference:
    """Return how two weights layers differ: by the tensors that do."""
    headers = [_header(each) for each in (old, new)]
    names = [*dict.fromkeys((*headers[0], *headers[1]))]
    differing = [
        name for name in names if _tensor(old, headers[0], name) != _tensor(new, headers[1], name)
    ]
    if not differing:
        return PartDifference("the same tensors in another order or place", harmless=True)
    more = f" and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
    return PartDifference(
        f"{len(differing)} of {len(names)} tensors: {', '.join(differing[:_SHOWN])}{more}"
    )


def _first_byte(old: bytes, new: bytes) -> str:
    place = next(
        (at for at, (a, b) in enumerate(zip(old, new, strict=False)) if a != b),
        min(len(old), len(new)),
    )
    return f"from byte {place}; {len(old)} -> {len(new)} bytes"


def _split(executable: bytes) -> tuple[list[bytes], bytes]:
    """Return the object files in an executable, and the other bytes."""
    objects, rest, done = [], bytearray(), 0
    for start, end in _places(executable):
        rest += executable[done:start]
        objects.append(executable[start:end])
        done = end
    rest += executable[done:]
    return objects, bytes(rest)


def _places(executable: bytes) -> Iterator[tuple[int, int]]:
    """Yield where object files start and end. In those that LLVM writes, the table of sections is last."""
    start = executable.find(_ELF)
    while start >= 0:
        end = start + len(_ELF)
        if start + 64 <= len(executable):
            (table,) = struct.unpack_from("<Q", executable, start + 40)
            size, count = struct.unpack_from("<HH", executable, start + 58)
            if start + table + size * count <= len(executable):
                end = max(end, start + table + size * count)
        yield start, end
        start = executable.find(_ELF, end)


def _header(weights: Content) -> dict[str, Any]:
    size = int.from_bytes(bytes(weights[:8]), "little")
    found: dict[str, Any] = json.loads(bytes(weights[8 : 8 + size]))
    found.pop("__metadata__", None)
    return found


def _tensor(weights: Content, header: Mapping[str, Any], name: str) -> object:
    """Return what a tensor is: its dtype, its shape and its values."""
    if name not in header:
        return None
    start, end = header[name]["data_offsets"]
    base = 8 + int.from_bytes(bytes(weights[:8]), "little")
    return header[name]["dtype"], header[name]["shape"], bytes(weights[base + start : base + end])
