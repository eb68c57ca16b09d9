"""The JSON of the Open Inference Protocol, and its arrays: JSON numbers, or bytes behind the JSON."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import ml_dtypes
import msgspec
import numpy as np

from prejit.runtime.errors import UsageError
from prejit.runtime.format.limits import MAX_DIMENSIONS


class InferInput(msgspec.Struct, kw_only=True):
    """A tensor of a request.

    Attributes:
        name: its place among the arguments.
        shape: its extents.
        datatype: as in the metadata of the model.
        data: numbers in row-major order, nested or flat; without them, the bytes follow the JSON.
        parameters: `binary_data_size` is the number of those bytes.
    """

    name: str
    shape: list[int]
    datatype: str
    data: list[Any] | None = None
    parameters: dict[str, Any] = {}


class InferOutput(msgspec.Struct, kw_only=True):
    """A result that a client wants.

    Attributes:
        name: its place among the results.
        parameters: `binary_data` asks for bytes behind the JSON.
    """

    name: str
    parameters: dict[str, Any] = {}


class InferRequest(msgspec.Struct, kw_only=True):
    """A call of a program.

    Attributes:
        inputs: its arguments.
        id: comes back in the response.
        parameters: static arguments, and `binary_data_output`.
        outputs: the results that the client wants; all of them if it is missing.
    """

    inputs: list[InferInput] = []
    id: str | None = None
    parameters: dict[str, Any] = {}
    outputs: list[InferOutput] | None = None


class InferResult(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A tensor of a response.

    Attributes:
        name: its place among the results.
        datatype: the protocol's name of its dtype.
        shape: its extents.
        data: its elements in row-major order; null where JSON has no number for one.
        parameters: `binary_data_size` is the number of its bytes behind the JSON.
    """

    name: str
    datatype: str
    shape: list[int]
    data: list[Any] | None = None
    parameters: dict[str, Any] | None = None


class InferResponse(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The results of a program.

    Attributes:
        model_name: the name in the path.
        model_version: always 1.
        id: as in the request.
        outputs: the results.
    """

    model_name: str
    model_version: str
    outputs: list[InferResult]
    id: str | None = None


class TensorMetadata(msgspec.Struct, kw_only=True):
    """A tensor of a model.

    Attributes:
        name: its place.
        datatype: the protocol's name of its dtype.
        shape: its extents; -1 where buckets differ or a caller may give less.
    """

    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(msgspec.Struct, kw_only=True):
    """A model.

    Attributes:
        name: the name in the path.
        versions: its versions.
        platform: what runs it.
        inputs, outputs: its tensors.
    """

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class ServerMetadata(msgspec.Struct, kw_only=True):
    """A server.

    Attributes:
        name: what it is.
        version: of prejit.
        extensions: extensions of the protocol that it has.
    """

    name: str
    version: str
    extensions: list[str]


class InferError(msgspec.Struct, kw_only=True):
    """An error.

    Attributes:
        error: one sentence with where, what was expected and what was found.
    """

    error: str


_DATATYPES = {
    "bool": "BOOL",
    **{
        f"{sign}int{bits}": f"{sign}int{bits}".upper()
        for sign in ("", "u")
        for bits in (8, 16, 32, 64)
    },
    **{f"float{bits}": f"FP{bits}" for bits in (16, 32, 64)},
    "bfloat16": "BF16",
}
"""The protocol's names of dtypes."""
_NUMPY = {
    datatype: np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    for name, datatype in _DATATYPES.items()
}
_MAX_BYTES = 1 << 40
"""A shape that asks for more is a mistake, whatever the body's size."""


def datatype_of(dtype: str, where: str) -> str:
    """Return the protocol's name of a dtype.

    Args:
        dtype: NumPy's or ml_dtypes's name.
        where: the tensor, for errors.

    Raises:
        UsageError: the protocol has no name for it.
    """
    if (found := _DATATYPES.get(dtype)) is None:
        raise UsageError(
            f"{where}: expected a dtype of the Open Inference Protocol, found {dtype}",
            hint=f"it has {', '.join(_DATATYPES)}: let the program take and return one of these",
        )
    return found


def dtype_of(datatype: str, where: str) -> np.dtype[Any]:
    """Return the dtype of a protocol's name.

    Raises:
        UsageError: there is no such name, or it is BYTES, which no program takes.
    """
    if (found := _NUMPY.get(datatype)) is None:
        hint = None
        if datatype == "BYTES":
            hint = "programs take numbers: send a text as the token ids of its model"
        known = ", ".join(_NUMPY)
        raise UsageError(
            f"{where}: datatype: expected one of {known}, found {datatype!r:.80}", hint=hint
        )
    return found


def from_bytes(
    content: memoryview, dtype: np.dtype[Any], shape: tuple[int, ...], where: str
) -> np.ndarray[Any, Any]:
    """Return the array of little-endian bytes in row-major order: a view of them, or a copy.

    Raises:
        UsageError: the number of bytes is not that of the shape.
    """
    expected = _elements(shape, dtype, where) * dtype.itemsize
    if len(content) != expected:
        raise UsageError(
            f"{where}: expected {expected} bytes for {dtype}{list(shape)}, found {len(content)}"
        )
    flat = np.frombuffer(content, np.uint8) if content else np.empty(0, np.uint8)
    if flat.ctypes.data % dtype.itemsize:  # behind JSON, bytes may begin anywhere
        flat = flat.copy()
    if dtype == np.bool_ and flat.size and flat.max() > 1:
        raise UsageError(f"{where}: expected bytes of 0 and 1 for BOOL, found {flat.max()}")
    return flat.view(dtype).reshape(shape)


def from_json(
    data: Any, dtype: np.dtype[Any], shape: tuple[int, ...], where: str
) -> np.ndarray[Any, Any]:
    """Return the array of JSON numbers, nested as the shape says or flat.

    Raises:
        UsageError: they have another number, another nesting, or another kind, or the dtype cannot hold them.
    """
    expected = _elements(shape, dtype, where)
    if not isinstance(data, list):
        raise UsageError(f"{where}: data: expected a list, found {type(data).__name__}")
    try:
        given = np.array(data)  # no dtype: the kind of what came decides
    except (ValueError, OverflowError):
        raise UsageError(
            f"{where}: data: expected a list of numbers, or lists of one length"
        ) from None
    if given.size != expected or (given.ndim > 1 and given.shape != shape):
        raise UsageError(
            f"{where}: data: expected {expected} elements of shape {list(shape)}, found {list(given.shape)}"
        )
    if not given.size:
        return np.empty(shape, dtype)
    kinds = {"b": "b", "i": "iu", "u": "iu"}.get(dtype.kind, "iuf")
    if given.dtype.kind not in kinds and (wide := _large(data, dtype)) is not None:
        given = wide
    if given.dtype.kind not in kinds:
        wanted = {"b": "true and false", "iu": "integers"}.get(kinds, "numbers")
        raise UsageError(
            f"{where}: data: expected {wanted} for {_name(dtype)}, found {_described(given)}"
        )
    if kinds == "iu":
        limits = np.iinfo(dtype)
        low, high = int(given.min()), int(given.max())
        if low < limits.min or high > limits.max:
            wrong = low if low < limits.min else high
            raise UsageError(
                f"{where}: data: expected {limits.min} to {limits.max} for {_name(dtype)}, found {wrong}"
            )
    with np.errstate(over="ignore"):
        found = given.astype(dtype).reshape(shape)
    if dtype.kind not in "biu" and not (held := np.isfinite(found.astype(np.float64))).all():
        wrong = given.reshape(shape)[~held].flat[0]
        raise UsageError(
            f"{where}: data: expected numbers that {_name(dtype)} holds, found {wrong:.6g}"
        )
    return found


def _large(data: list[Any], dtype: np.dtype[Any]) -> np.ndarray[Any, Any] | None:
    """Return an array of numbers that are too large for NumPy's own choice of a dtype; None: refuse them.

    For integers above 2**63 beside smaller ones it finds no common dtype, and none for floats that are
    written as integers above 2**64, as JavaScript writes 1e20.
    """
    values = np.array(data, object).ravel().tolist()
    if dtype.kind == "u" and all(type(value) is int and value >= 0 for value in values):
        wide: type[Any] = np.uint64
    elif dtype.kind not in "biu" and all(type(value) in (int, float) for value in values):
        wide = np.float64
    else:
        return None
    with contextlib.suppress(OverflowError):
        return np.array(data, wide)
    return None


def to_json(array: np.ndarray[Any, Any]) -> list[Any]:
    """Return the elements in row-major order. NaN and infinity, which JSON does not have, are null."""
    flat = array.ravel()
    if array.dtype.kind in "biu":
        return list(flat.tolist())
    # float32 values of FP16 and BF16: ml_dtypes's own tolist gives its scalars.
    wide = flat.astype(np.float32) if array.dtype.itemsize < 4 else flat
    if np.isfinite(wide).all():
        return list(wide.tolist())
    return [each if math.isfinite(each) else None for each in wide.tolist()]


def _elements(shape: tuple[int, ...], dtype: np.dtype[Any], where: str) -> int:
    # NumPy refuses large extents beside one of 0, too.
    most = math.prod(max(1, extent) for extent in shape) * dtype.itemsize
    if most > _MAX_BYTES or len(shape) > MAX_DIMENSIONS or any(extent < 0 for extent in shape):
        raise UsageError(
            f"{where}: shape: expected at most {MAX_DIMENSIONS} extents of 0 or more, of at most "
            f"{_MAX_BYTES} bytes, found {list(shape)!r:.80}"
        )
    return math.prod(shape)


def _name(dtype: np.dtype[Any]) -> str:
    return _DATATYPES[dtype.name]


def _described(array: np.ndarray[Any, Any]) -> str:
    kinds = {"b": "true or false", "f": "fractions", "U": "text", "O": "null or mixed values"}
    return kinds.get(array.dtype.kind, str(array.dtype))
