"""Checks of layers: native kernels, programs and their signatures, weights, chat templates."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import zstandard

from prejit.runtime.base.typed_json import check_amount, each_key_once
from prejit.runtime.errors import rejecting
from prejit.runtime.format import limits
from prejit.runtime.format.arrays import Array, Mesh
from prejit.runtime.format.bundle_schema import Kernels, Segment
from prejit.runtime.format.checks.elf import read_shared_library
from prejit.runtime.format.checks.oci import check_digest
from prejit.runtime.format.names import KERNEL_PREFIX

SAFETENSORS_DTYPES = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "U16": ("uint16", 2),
    "I16": ("int16", 2),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "U32": ("uint32", 4),
    "I32": ("int32", 4),
    "F32": ("float32", 4),
    "U64": ("uint64", 8),
    "I64": ("int64", 8),
    "F64": ("float64", 8),
    "C64": ("complex64", 8),
}
"""NumPy's or ml_dtypes' name and the bytes of an element, by the name in the header of a safetensors file.

A dtype of less than a byte has no place here: an element takes a whole number of bytes.
"""


@rejecting
def check_kernels(content: bytes, kernels: Kernels, path: str) -> None:
    """9. Check the digest of a library of kernels, and that it exports the kernels of the config.

    The dynamic linker runs code of a library before anybody calls it, so nothing unverified may reach it.
    """
    check_digest(content, kernels.digest, path)
    try:
        exported = read_shared_library(content).exported
    except ValueError as error:
        raise ValueError(f"expected a shared library: {error}") from error
    expected = tuple(sorted(KERNEL_PREFIX + name for name in kernels.handlers))
    if exported != expected:
        raise ValueError(
            f"expected exports {', '.join(expected)}, found {', '.join(exported) or 'none'}"
        )


Shape = tuple[str, tuple[int, ...]]
"""The dtype and the shape of an array."""


@rejecting
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

    `arguments`, `results` and `donated` (numbers of arguments) are those of the compiled program, on each
    device; `takes` (weights and arguments) and `gives` are those of the table, which `mesh` splits (None: one
    device).
    """
    sides = (("arguments", arguments, takes), ("results", results, gives))
    for what, compiled, table in sides:
        if len(compiled) != len(table):
            raise ValueError(
                f"{what}: expected {len(table)} as in the program table, found {len(compiled)}"
            )
        for place, (found, array) in enumerate(zip(compiled, table, strict=True)):
            expected = array.dtype, _shard(array, mesh)
            if found != expected:
                raise ValueError(
                    f"{what}[{place}]: expected {_spelled(expected)} as in the program table, "
                    f"found {_spelled(found)}"
                )
    for place in sorted(donated):
        if place >= len(takes) or not takes[place].donated:
            raise ValueError(
                f"arguments[{place}]: expected an argument that is kept, as in the program table, "
                "found one that the program donates"
            )


def _shard(array: Array, mesh: Mesh | None) -> tuple[int, ...]:
    if mesh is None or not array.sharding:
        return array.shape
    pairs = zip(array.shape, array.sharding, strict=True)
    return tuple(extent // mesh.parts(axis) for extent, axis in pairs)


def _spelled(shape: Shape) -> str:
    return f"{shape[0]}[{','.join(map(str, shape[1]))}]"


@rejecting
def unpack(frame: bytes, segment: Segment, path: str) -> bytes:
    """9. Check a frame of a pack, decompress it with a bound, and return the bytes after a check."""
    check_digest(frame, segment.digest, path)
    if not 0 <= segment.raw_size <= limits.MAX_PROGRAM_BYTES:
        raise ValueError(
            f"expected at most {limits.MAX_PROGRAM_BYTES} bytes, found {segment.raw_size}"
        )
    try:
        parameters = zstandard.get_frame_parameters(frame)
        if parameters.content_size != segment.raw_size or not parameters.has_checksum:
            raise ValueError("expected a zstd frame with its content size and a checksum")
        raw = zstandard.ZstdDecompressor().decompress(
            frame, max_output_size=segment.raw_size, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise ValueError(f"expected a zstd frame: {error}") from error
    check_digest(raw, segment.raw_digest, path)
    return raw


GAP_PREFIX = ".gap"
"""The beginning of the names of gaps. safetensors allows no holes, so the bytes between aligned tensors are
tensors."""
WEIGHTS_ALIGNMENT_BYTES = 64
"""The alignment of tensors in bytes. XLA copies a host buffer that has another
(xla/service/cpu/cpu_runtime)."""

MAX_WEIGHTS_HEADER_BYTES = 16 << 20
"""Maximum size of the header. A tensor takes about 120 bytes of it."""


class TensorSlice(NamedTuple):
    """A tensor of the weights layer; `start` and `end` are byte offsets from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@rejecting
def header_end(content: memoryview, path: str) -> int:
    """10. Return where the header of a safetensors file ends, in bytes from the start of the file."""
    if len(content) < 8:
        raise ValueError(f"expected a safetensors file, found {len(content)} bytes")
    header_size = int.from_bytes(content[:8], "little")
    if not 0 < header_size <= min(MAX_WEIGHTS_HEADER_BYTES, len(content) - 8):
        raise ValueError(f"expected a safetensors header, found one of {header_size} bytes")
    return 8 + header_size


@rejecting
def check_weights(
    content: memoryview, path: str, *, alignment: int = WEIGHTS_ALIGNMENT_BYTES
) -> dict[str, TensorSlice]:
    """10. Check that a weights layer is a safetensors file with all tensors inside, aligned and apart.

    8 bytes: size of the header, little-endian | header: JSON | tensors, each at a multiple of `alignment`
    """
    data = header_end(content, path)
    text = bytes(content[8:data])
    check_amount(text, (b":",), (b"[", b"{"), path)
    try:
        header = json.loads(text, object_pairs_hook=each_key_once)
        slices = {
            name: tensor_slice(entry, data)
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"expected a safetensors header: {error!r:.80}") from error
    end = data
    for name, tensor in sorted(slices.items(), key=lambda item: (item[1].start, item[1].end)):
        if tensor.start < end or tensor.end > len(content):
            raise ValueError(f"{name}: its bytes are not inside the file and apart from others")
        gap = name.startswith(GAP_PREFIX)
        if not gap and tensor.start % alignment:
            raise ValueError(f"{name}: expected at a multiple of {alignment}, found {tensor.start}")
        end = tensor.end
    return slices


def tensor_slice(entry: dict[str, Any], data: int) -> TensorSlice:
    """Return the place of a tensor, from its entry in a header that ends at `data`."""
    (start, end), shape = entry["data_offsets"], entry["shape"]
    if type(shape) is not list or len(shape) > limits.MAX_DIMENSIONS:
        raise TypeError(f"shape {shape}")
    if not all(type(extent) is int and extent >= 0 for extent in shape):
        raise ValueError(f"shape {shape}")
    dtype, item_bytes = SAFETENSORS_DTYPES[entry["dtype"]]
    # NumPy multiplies all sizes but 0, even if the array is empty.
    if item_bytes * math.prod(extent or 1 for extent in shape) >= 1 << 63:
        raise ValueError(f"shape {shape}")
    size = item_bytes * math.prod(shape)
    if type(start) is not int or type(end) is not int or end - start != size:
        raise ValueError(f"data_offsets {start}, {end}")
    return TensorSlice(dtype, tuple(shape), data + start, data + end)
