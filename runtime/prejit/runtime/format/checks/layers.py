"""Checks of layers: native kernels, libraries of the user, programs and their signatures, chat templates."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import zstandard

from prejit.runtime.errors import RejectError
from prejit.runtime.format import limits
from prejit.runtime.format.arrays import Array, Mesh
from prejit.runtime.format.bundle_schema import Kernels, Segment, UserLibrary
from prejit.runtime.format.checks.elf import read_shared_library
from prejit.runtime.format.checks.oci import check_digest
from prejit.runtime.format.names import KERNEL_PREFIX


def check_kernels(content: bytes, kernels: Kernels, path: str) -> None:
    """9. Check the digest of a library of kernels, and that it exports the kernels of the config.

    The dynamic linker runs code of a library before anybody calls it, so nothing unverified may reach it.
    """
    check_digest(content, kernels.digest, path)
    try:
        exported = read_shared_library(content).exported
    except ValueError as error:
        raise RejectError(path, f"expected a shared library: {error}") from error
    expected = tuple(sorted(KERNEL_PREFIX + name for name in kernels.handlers))
    if exported != expected:
        raise RejectError(
            path, f"expected exports {', '.join(expected)}, found {', '.join(exported) or 'none'}"
        )


def check_library(content: bytes, library: UserLibrary, architecture: str, path: str) -> None:
    """9. Check the digest of a library of the user, its architecture, and that it exports its handlers.

    Args:
        content: the library.
        library: its entry in the config.
        architecture: the architecture of the target.
        path: the file, for errors.
    """
    check_digest(content, library.digest, path)
    try:
        found = read_shared_library(content)
    except ValueError as error:
        raise RejectError(path, f"expected a shared library: {error}") from error
    if found.architecture != architecture:
        raise RejectError(
            path, f"expected a library for {architecture}, found one for {found.architecture}"
        )
    if missing := sorted(set(library.handlers.values()) - set(found.exported)):
        raise RejectError(path, f"expected exports {', '.join(missing)}, found others")


Shape = tuple[str, tuple[int, ...]]
"""The dtype and the shape of an array."""


def check_signature(
    arguments: Sequence[Shape],
    results: Sequence[Shape],
    donated: Collection[int],
    *,
    takes: Sequence[Array],
    gives: Sequence[Array],
    mesh: Mesh | None,
    path: str,
) -> None:
    """9. Check that a compiled program agrees with the program table and donates no more arguments.

    Args:
        arguments: the arguments of the compiled program, on each device.
        results: the results of the compiled program, on each device.
        donated: numbers of the arguments whose memory it reuses.
        takes: weights and arguments, as the weights layer and the program table have them.
        gives: results, as the program table has them.
        mesh: the mesh that splits them; None: one device.
        path: the program, for errors.
    """
    sides = (("arguments", arguments, takes), ("results", results, gives))
    for what, compiled, table in sides:
        if len(compiled) != len(table):
            raise RejectError(
                path,
                f"{what}: expected {len(table)} as in the program table, found {len(compiled)}",
            )
        for place, (found, array) in enumerate(zip(compiled, table, strict=True)):
            expected = array.dtype, _shard(array, mesh)
            if found != expected:
                raise RejectError(
                    path,
                    f"{what}[{place}]: expected {_spelled(expected)} as in the program table, "
                    f"found {_spelled(found)}",
                )
    for place in sorted(donated):
        if place >= len(takes) or not takes[place].donated:
            raise RejectError(
                path,
                f"arguments[{place}]: expected an argument that is kept, as in the program table, "
                "found one that the program donates",
            )


def _shard(array: Array, mesh: Mesh | None) -> tuple[int, ...]:
    if mesh is None or not array.sharding:
        return array.shape
    sizes = {"": 1, "data": mesh.data, "tensor": mesh.tensor}
    return tuple(
        extent // sizes[axis] for extent, axis in zip(array.shape, array.sharding, strict=True)
    )


def _spelled(shape: Shape) -> str:
    return f"{shape[0]}[{','.join(map(str, shape[1]))}]"


def unpack(frame: bytes, segment: Segment, path: str) -> bytes:
    """9. Check a frame of a pack, decompress it with a bound, and return the bytes after a check."""
    check_digest(frame, segment.digest, path)
    if not 0 <= segment.raw_size <= limits.MAX_PROGRAM_BYTES:
        raise RejectError(
            path, f"expected at most {limits.MAX_PROGRAM_BYTES} bytes, found {segment.raw_size}"
        )
    try:
        parameters = zstandard.get_frame_parameters(frame)
        if parameters.content_size != segment.raw_size or not parameters.has_checksum:
            raise RejectError(path, "expected a zstd frame with its content size and a checksum")
        raw = zstandard.ZstdDecompressor().decompress(
            frame, max_output_size=segment.raw_size, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise RejectError(path, f"expected a zstd frame: {error}") from error
    check_digest(raw, segment.raw_digest, path)
    return raw
