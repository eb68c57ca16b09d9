"""The weights layer: a safetensors file, checked before any tensor is used."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from prejit.runtime.base.typed_json import check_amount, each_key_once
from prejit.runtime.errors import RejectError

GAP_PREFIX = ".gap"
"""The beginning of the names of gaps. safetensors allows no holes, so the bytes between aligned tensors are
tensors."""
WEIGHTS_ALIGNMENT_BYTES = 64
"""The alignment of tensors in bytes. XLA copies a host buffer that has another
(xla/service/cpu/cpu_runtime)."""

MAX_WEIGHTS_HEADER_BYTES = 16 << 20
"""Maximum size of the header. A tensor takes about 120 bytes of it."""

MAX_DIMENSIONS = 64
"""Maximum number of dimensions of a tensor, as in NumPy."""


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A tensor of the weights layer; `start` and `end` are byte offsets from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


SAFETENSORS_DTYPES = {
    # safetensors' name -> (NumPy's or ml_dtypes' name, bytes an element)
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


def header_end(content: memoryview, path: str) -> int:
    """10. Return where the header of a safetensors file ends, in bytes from the start of the file."""
    if len(content) < 8:
        raise RejectError(path, f"expected a safetensors file, found {len(content)} bytes")
    header_size = int.from_bytes(content[:8], "little")
    if not 0 < header_size <= min(MAX_WEIGHTS_HEADER_BYTES, len(content) - 8):
        raise RejectError(path, f"expected a safetensors header, found one of {header_size} bytes")
    return 8 + header_size


def check_weights(content: memoryview, path: str) -> dict[str, TensorSlice]:
    """10. Check that a weights layer is a safetensors file with all tensors inside, aligned and apart.

    8 bytes: size of the header, little-endian | header: JSON | tensors, each at a multiple of 64
    """
    data = header_end(content, path)
    text = bytes(content[8:data])
    check_amount(text, (b":",), (b"[", b"{"), path)
    try:
        header = json.loads(text, object_pairs_hook=each_key_once)
        slices = {
            name: _slice(entry, data) for name, entry in header.items() if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RejectError(path, f"expected a safetensors header: {error!r:.80}") from error
    end = data
    for name, tensor in sorted(slices.items(), key=lambda item: (item[1].start, item[1].end)):
        if tensor.start < end or tensor.end > len(content):
            raise RejectError(
                path, f"{name}: its bytes are not inside the file and apart from others"
            )
        gap = name.startswith(GAP_PREFIX)
        if not gap and tensor.start % WEIGHTS_ALIGNMENT_BYTES:
            raise RejectError(path, f"{name}: expected at a multiple of 64, found {tensor.start}")
        end = tensor.end
    return slices


def _slice(entry: dict[str, Any], data: int) -> TensorSlice:
    (start, end), shape = entry["data_offsets"], entry["shape"]
    if type(shape) is not list or len(shape) > MAX_DIMENSIONS:
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
