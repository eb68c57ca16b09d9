"""Calls XLA FFI handlers by ctypes, so that no program is compiled for each shape.

The structures are those of `xla/ffi/api/c_api.h`, as far as a handler of a kernel reads them.
"""

import ctypes
import threading
from ctypes import POINTER, Structure, c_char_p, c_int, c_int64, c_size_t, c_void_p

import ml_dtypes
import numpy as np

_NUMBERS = {np.int8: 2, np.int16: 3, np.int32: 4, np.uint32: 8, np.float16: 10, np.float32: 11}
_DTYPES = {np.dtype(each): number for each, number in _NUMBERS.items()}
_DTYPES[np.dtype(ml_dtypes.bfloat16)] = 16
"""The number that XLA_FFI_DataType gives each dtype."""
_BUFFER = 1
"""XLA_FFI_ArgType_BUFFER, which is XLA_FFI_RetType_BUFFER too."""
_SCALAR = 3
"""XLA_FFI_AttrType_SCALAR."""
_EXECUTE = 3
"""XLA_FFI_ExecutionStage_EXECUTE."""


class KernelError(Exception):
    """A handler refused its arguments; the message is the handler's."""


def _structure(name, **fields):
    return type(name, (Structure,), {"_fields_": tuple(fields.items())})


_HEADER = {"struct_size": c_size_t, "extension_start": c_void_p}
_Header = _structure("Header", **_HEADER)
_CreateError = _structure("CreateError", **_HEADER, message=c_char_p, code=c_int)
_ErrorCreate = ctypes.CFUNCTYPE(c_void_p, POINTER(_CreateError))
_Api = _structure(
    "Api",
    **{**_HEADER, "version_header": _Header, "major": c_int, "minor": c_int},
    **{"internal": c_void_p, "create_error": _ErrorCreate, "others": c_void_p * 17},
)
_ARRAY = {"dtype": c_int, "data": c_void_p, "rank": c_int64, "dims": POINTER(c_int64)}
_Buffer = _structure("Buffer", **_HEADER, **_ARRAY)
_Span = _structure("Span", at=c_char_p, size=c_size_t)
_Scalar = _structure("Scalar", dtype=c_int, value=c_void_p)
_TYPED = {**_HEADER, "size": c_int64, "types": POINTER(c_int)}
_Values = _structure("Values", **_TYPED, values=POINTER(c_void_p))  # XLA_FFI_Args, XLA_FFI_Rets
_NAMES = POINTER(POINTER(_Span))
_Attributes = _structure("Attributes", **_TYPED, names=_NAMES, values=POINTER(c_void_p))
_CallFrame = _structure(
    "CallFrame",
    **{**_HEADER, "api": POINTER(_Api), "context": c_void_p, "stage": c_int},
    **{"arguments": _Values, "results": _Values, "attributes": _Attributes, "future": c_void_p},
)
_messages = threading.local()


def _create_error(arguments):
    _messages.last = arguments.contents.message.decode()
    return 1  # the handler only returns it


_keep = _ErrorCreate(_create_error)
_API = _Api(ctypes.sizeof(_Api), None, _Header(24, None), 0, 3, None, _keep)


def call(library, kernel, arguments, results, **attributes):
    """Call a library's kernel, which writes the results; an array that is an argument too is donated.

    Attributes are floats, or integers and booleans: float32 and int32 for the kernel.

    Raises:
        KernelError: the handler refuses.
    """
    handler = getattr(library, f"prejit_{kernel}")
    handler.restype, handler.argtypes = c_void_p, (POINTER(_CallFrame),)
    buffers = [[_buffer(array) for array in arrays] for arrays in (arguments, results)]
    names = sorted(attributes)
    values = [np.array(attributes[name]) for name in names]
    values = [v.astype(np.float32 if v.dtype == float else np.int32) for v in values]
    scalars = [_Scalar(_DTYPES[value.dtype], value.ctypes.data) for value in values]
    spans = [_Span(name.encode(), len(name)) for name in names]
    frame = _CallFrame(
        *(_CallFrame.future.offset, None, ctypes.pointer(_API), None, _EXECUTE),
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


def _buffer(array):
    assert array.flags.c_contiguous
    dims = (c_int64 * array.ndim)(*array.shape)
    return _Buffer(
        *(ctypes.sizeof(_Buffer), None, _DTYPES[array.dtype]), array.ctypes.data, array.ndim, dims
    )


def _values(buffers):
    types = (c_int * len(buffers))(*[_BUFFER] * len(buffers))
    return _Values(ctypes.sizeof(_Values), None, len(buffers), types, _pointers(buffers))


def _pointers(structures):
    return (c_void_p * len(structures))(*map(ctypes.addressof, structures))
