"""Read a shared library: its architecture, its exports, the libraries and the glibc that it needs, its notes.

elf(5) describes sections and their records; the LSB, "Symbol Versioning", describes versions of symbols.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

_MAGIC = b"\x7fELF\x02\x01"  # 64 bits, little-endian
_ET_DYN = 3
"""The type of shared libraries."""
_MACHINES = {62: "x86_64", 183: "aarch64"}
"""Architectures, as `uname -m` names them, by ELF's number e_machine."""
_SHT_DYNAMIC, _SHT_DYNSYM, _SHT_GNU_VERNEED = 6, 11, 0x6FFFFFFE
_DT_NEEDED = 1
_HEADER_BYTES = 64
"""Size of a section header, an Elf64_Shdr."""
_SHT_NOTE, _NOTE_BYTES = 7, 12
"""The section type of notes, and the size of a note's header, an Elf64_Nhdr."""
_STB_LOCAL, _SHN_UNDEF = 0, 0
_MAX_ENTRIES = 1 << 16
"""Maximum number of entries in each table. Libraries of kernels have some hundred."""
_MAX_NAME_BYTES = 512


class SharedLibrary(NamedTuple):
    """The entries of a shared library that a dynamic linker reads.

    Attributes:
        architecture: what `uname -m` says on a machine that can load it; None: another architecture.
        needed: names of the libraries that it needs, in its own order.
        exported: names of the symbols that it defines for others, sorted.
        versions: versions of the symbols that it needs: `GLIBC_2.17`, sorted as text.
    """

    architecture: str | None
    needed: tuple[str, ...]
    exported: tuple[str, ...]
    versions: tuple[str, ...]


class Section(NamedTuple):
    """A section of an ELF file (elf(5), Elf64_Shdr): SHT_* type, SHF_* flags, address before it is loaded.

    `content` is a view of the file, shorter than `size` where the file ends before it; `strings` is the
    number of the section that holds its names.
    """

    kind: int
    flags: int
    address: int
    size: int
    content: memoryview
    strings: int


def read_sections(content: bytes) -> list[Section]:
    """Return the sections of a 64-bit little-endian ELF file.

    Raises:
        ValueError: the content is not such a file, or its section headers are not whole.
    """
    if not content.startswith(_MAGIC):
        raise ValueError("not an ELF file of 64 bits")
    view = memoryview(content)  # most of it is code, which nobody here needs a copy of
    try:
        (start,) = struct.unpack_from("<Q", content, 40)
        size, count = struct.unpack_from("<HH", content, 58)
        if size != _HEADER_BYTES:
            raise ValueError(f"not an ELF file: section headers of {size} bytes")
        if start + size * count > len(content):
            raise ValueError("not a whole ELF file: its section headers end behind it")
        sections = []
        for at in range(start, start + size * count, size):
            kind, flags, address, offset, length, link = struct.unpack_from(
                "<4xIQQQQI", content, at
            )
            piece = view[offset : offset + length]
            sections.append(Section(kind, flags, address, length, piece, link))
    except (struct.error, OverflowError) as error:
        raise ValueError(f"not a whole ELF file: {error}") from error
    return sections


def find_note(content: bytes, owner: bytes) -> tuple[int, bytes] | None:
    """Return the first note of an owner (without its ending 0) in a shared library; None: there is none.

    Returns:
        The address of the note's descriptor, relative to where the library is loaded, and the descriptor.

    Raises:
        ValueError: the content is not an ELF file with whole section headers.
    """
    for section in read_sections(content):
        if section.kind != _SHT_NOTE or len(section.content) < _NOTE_BYTES:
            continue
        name_bytes, size, _ = struct.unpack_from("<III", section.content)
        at = _NOTE_BYTES + (name_bytes + 3 & ~3)
        name = bytes(section.content[_NOTE_BYTES : _NOTE_BYTES + name_bytes])
        if name == owner + b"\0" and at + size <= len(section.content):
            return section.address + at, bytes(section.content[at : at + size])
    return None


def read_shared_library(content: bytes) -> SharedLibrary:
    """Read a shared library of Linux, of 64 bits and little-endian, that still has its section headers.

    Raises:
        ValueError: the content is not such a library.
    """
    try:
        return _read(content)
    except (struct.error, IndexError, OverflowError) as error:
        raise ValueError(f"not a whole ELF file: {error}") from error


def _read(content: bytes) -> SharedLibrary:
    sections = read_sections(content)
    kind, machine = struct.unpack_from("<HH", content, 16)
    if kind != _ET_DYN:
        raise ValueError("an ELF file that is no shared library")
    found: dict[int, list[str]] = {}
    for section in sections:
        if section.kind not in _READERS:
            continue
        if section.kind in found:  # a dynamic linker reads one of each
            raise ValueError(f"expected one section of type {section.kind:#x}, found several")
        names, places = sections[section.strings].content, _READERS[section.kind](section.content)
        # No linker needs more, and a forged table could take forever.
        taken = list(islice(places, _MAX_ENTRIES + 1))
        if len(taken) > _MAX_ENTRIES:
            raise ValueError(f"expected at most {_MAX_ENTRIES} entries in a table, found more")
        found[section.kind] = [_text(names, name) for name in taken if name is not None]
    needed, exported, versions = (found.get(kind, []) for kind in _READERS)
    return SharedLibrary(
        _MACHINES.get(machine), tuple(needed), tuple(sorted(exported)), tuple(sorted(versions))
    )


def _needed(content: memoryview) -> Iterator[int | None]:
    """Yield the places of the names of needed libraries; None for other entries of the dynamic section."""
    for tag, value in struct.iter_unpack("<QQ", content):
        yield value if tag == _DT_NEEDED else None


def _exported(content: memoryview) -> Iterator[int | None]:
    """Yield the places of the names of exported symbols; None for other symbols."""
    for name, info, _, defined_in, _, _ in struct.iter_unpack("<IBBHQQ", content):
        yield name if defined_in != _SHN_UNDEF and info >> 4 != _STB_LOCAL else None


def _wanted_versions(content: memoryview) -> Iterator[int | None]:
    """Yield the places of version names: Elf64_Verneed, each with its Elf64_Vernaux; 0 ends each chain."""
    at, following = 0, 1
    while following:
        first, following = struct.unpack_from("<8xII", content, at)
        auxiliary, step = at + first, 1
        while step:
            name, step = struct.unpack_from("<8xII", content, auxiliary)
            yield name
            auxiliary += step
        at += following


_READERS = {_SHT_DYNAMIC: _needed, _SHT_DYNSYM: _exported, _SHT_GNU_VERNEED: _wanted_versions}


def _text(strings: memoryview, start: int) -> str:
    name, ended, _ = bytes(strings[start : start + _MAX_NAME_BYTES]).partition(b"\0")
    if not ended:
        raise ValueError(f"a name does not end within {_MAX_NAME_BYTES} bytes")
    return name.decode("ascii", "replace")
