"""Calls XLA FFI handlers by ctypes, so that no program is compiled for each shape.

The structures are those of `xla/ffi/api/c_api.h`, as far as a handler of a kernel reads them.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, c_char_p, c_int, c_int64, c_size_t, c_void_p
from typing import Any

import ml_dtypes
import numpy as np

_DTYPES = {
    np.dtype(np.int8): 2,
    np.dtype(np.int16): 3,
    np.dtype(np.int32): 4,
    np.dtype(np.float16): 10,
    np.dtype(np.float32): 11,
    np.dtype(ml_dtypes.bfloat16): 16,
}
"""The number that XLA_FFI_DataType gives each dtype."""
_BUFFER = 1
"""XLA_FFI_ArgType_BUFFER, which is XLA_FFI_RetType_BUFFER too."""
_SCALAR = 3
"""XLA_FFI_AttrType_SCALAR."""
_EXECUTE = 3
"""XLA_FFI_ExecutionStage_EXECUTE."""


class KernelError(Exception):
    """A handler refused its arguments; the message is the handler's."""


class _Header(Structure):
    _fields_ = (("struct_size", c_size_t), ("extension_start", c_void_p))


class _CreateError(Structure):
    _fields_ = (*_Header._fields_, ("message", c_char_p), ("code", c_int))


_ErrorCreate = ctypes.CFUNCTYPE(c_void_p, POINTER(_CreateError))


class _Api(Structure):
    _fields_ = (
        *_Header._fields_,
        *(("version_header", _Header), ("major", c_int), ("minor", c_int)),
        ("internal", c_void_p),
        ("create_error", _ErrorCreate),
        ("others", c_void_p * 17),
    )


class _Buffer(Structure):
    _fields_ = (
        *_Header._fields_,
        *(("dtype", c_int), ("data", c_void_p), ("rank", c_int64), ("dims", POINTER(c_int64))),
    )


class _Span(Structure):
    _fields_ = (("at", c_char_p), ("size", c_size_t))


class _Scalar(Structure):
    _fields_ = (("dtype", c_int), ("value", c_void_p))


class _Values(Structure):
    """XLA_FFI_Args and XLA_FFI_Rets."""

    _fields_ = (
        *_Header._fields_,
        *(("size", c_int64), ("types", POINTER(c_int)), ("values", POINTER(c_void_p))),
    )


class _Attributes(Structure):
    _fields_ = (
        *_Header._fields_,
        *(("size", c_int64), ("types", POINTER(c_int))),
        *(("names", POINTER(POINTER(_Span))), ("values", POINTER(c_void_p))),
    )


class _CallFrame(Structure):
    _fields_ = (
        *_Header._fields_,
        *(("api", POINTER(_Api)), ("context", c_void_p), ("stage", c_int)),
        *(("arguments", _Values), ("results", _Values), ("attributes", _Attributes)),
        ("future", c_void_p),
    )


_messages = threading.local()


def _create_error(arguments: Any) -> int:
    _messages.last = arguments.contents.message.decode()
    return 1  # the handler only returns it


_keep = _ErrorCreate(_create_error)
_API = _Api(ctypes.sizeof(_Api), None, _Header(24, None), 0, 3, None, _keep)

Handler = Callable[[Any], int | None]


def handler_of(library: ctypes.CDLL, kernel: str) -> Handler:
    """Return the handler that a library exports for a kernel."""
    handler = getattr(library, f"prejit_{kernel}")
    handler.restype, handler.argtypes = c_void_p, (POINTER(_CallFrame),)
    return handler  # type: ignore[no-any-return]


def call(
    handler: Handler,
    arguments: Sequence[np.ndarray],
    results: Sequence[np.ndarray],
    **attributes: np.generic,
) -> None:
    """Call a handler, which writes the results; an array that is an argument and a result is donated.

    Raises:
        KernelError: the handler refuses.
    """
    buffers = [[_buffer(array) for array in arrays] for arrays in (arguments, results)]
    names = sorted(attributes)
    values = [np.array(attributes[name]) for name in names]
    scalars = [_Scalar(_DTYPES[value.dtype], value.ctypes.data) for value in values]
    spans = [_Span(name.encode(), len(name)) for name in names]
    frame = _CallFrame(
        *(
            _CallFrame.future.offset,
            None,
            ctypes.pointer(_API),
            None,
            _EXECUTE,
        ),  # as handlers expect
        *(_values(each) for each in buffers),
        _Attributes(
            *(ctypes.sizeof(_Attributes), None, len(names)),
            (c_int * len(names))(*[_SCALAR] * len(names)),
            (POINTER(_Span) * len(names))(*map(ctypes.pointer, spans)),
            _pointers(scalars),
        ),
    )
    if handler(ctypes.byref(frame)):
        raise KernelError(_messages.last)


def _buffer(array: np.ndarray) -> _Buffer:
    assert array.flags.c_contiguous
    dims = (c_int64 * array.ndim)(*array.shape)
    return _Buffer(
        *(ctypes.sizeof(_Buffer), None, _DTYPES[array.dtype]), array.ctypes.data, array.ndim, dims
    )


def _values(buffers: Sequence[_Buffer]) -> _Values:
    types = (c_int * len(buffers))(*[_BUFFER] * len(buffers))
    return _Values(ctypes.sizeof(_Values), None, len(buffers), types, _pointers(buffers))


def _pointers(structures: Sequence[Structure]) -> Any:
    return (c_void_p * len(structures))(*map(ctypes.addressof, structures))
