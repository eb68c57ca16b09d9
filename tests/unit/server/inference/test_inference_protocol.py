"""A tensor that is read as another dtype, shape or value would be a wrong answer without an error."""

import ml_dtypes
import numpy as np
import pytest

from prejit.runtime.errors import UsageError
from prejit.runtime.format.arrays import DTYPES
from prejit.server.inference import inference_protocol as tensors

PAIRS = [
    *((name, name.upper()) for name in ("bool", "int8", "int16", "int32", "int64")),
    *((name, name.upper()) for name in ("uint8", "uint16", "uint32", "uint64")),
    *(("float16", "FP16"), ("float32", "FP32"), ("float64", "FP64"), ("bfloat16", "BF16")),
]


@pytest.mark.parametrize(("name", "datatype"), PAIRS)
def test_a_dtype_goes_there_and_back_by_bytes_and_by_numbers(name, datatype):
    dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
    assert tensors.datatype_of(name, "x") == datatype
    assert tensors.dtype_of(datatype, "x") == dtype
    assert tensors.from_json([], dtype, (0, 3), "x").shape == (0, 3)
    assert tensors.from_bytes(memoryview(b""), dtype, (0, 3), "x").shape == (0, 3)
    array = np.array([[0, 1, 1], [1, 0, 1]]).astype(dtype)
    contents = [memoryview(b"." * n + array.tobytes())[n:] for n in range(4)]  # behind JSON
    found = [tensors.from_bytes(content, dtype, (2, 3), "x") for content in contents]
    assert all(each.ctypes.data % dtype.itemsize == 0 for each in found)
    data = (tensors.to_json(array), array.tolist())
    found += [tensors.from_json(each, dtype, (2, 3), "x") for each in data]
    for each in found:
        np.testing.assert_array_equal(each, array, strict=True)


WRONG = [
    *((data, "FP32", (1,)) for data in (None, "1", ["1"], [None], [{}], [True], [1e300])),
    *((data, "FP32", (3,)) for data in ([1, 2], [[1, 2], [3]], [[1, 2], 3])),
    ([[1, 2], [3, 4]], "FP32", (4, 1)),
    *((data, "INT32", (1,)) for data in ([1.0], [1.5], [True], [2**31])),
    *(([1], "BOOL", (1,)), ([128], "INT8", (1,)), ([-1], "UINT8", (1,))),
    *(([2**63], "INT64", (1,)), ([10**30], "INT64", (1,)), ([2**64], "UINT64", (1,))),
    ([0, 70000], "FP16", (2,)),
    *(([1], "FP32", (-1,)), ([1], "FP32", (2**40, 2**40)), ([1], "FP32", (1,) * 65)),
    *(([], "FP32", (0, 2**62)), ([], "FP32", (0, 2**64))),
]


def test_dtypes_numbers_and_bytes_that_are_not_such_a_tensor_are_refused():
    for data, datatype, shape in WRONG:
        with pytest.raises(UsageError, match=r"^x: "):
            tensors.from_json(data, tensors.dtype_of(datatype, "x"), shape, "x")
    for content, datatype in ((b"123", "FP32"), (b"12345", "FP32"), (b"", "INT8"), (b"\2", "BOOL")):
        with pytest.raises(UsageError, match=r"^x: expected"):
            tensors.from_bytes(memoryview(content), tensors.dtype_of(datatype, "x"), (1,), "x")
    for name in set(DTYPES) - dict(PAIRS).keys():
        with pytest.raises(UsageError, match=f"found {name}"):
            tensors.datatype_of(name, "x")
    for name, has_hint in (("BYTES", True), ("FP8", False)):
        with pytest.raises(UsageError, match=f"found '{name}'") as caught:
            tensors.dtype_of(name, "x")
        assert caught.value.hint is not None or not has_hint


def test_large_integers_arrive_exactly_and_what_json_cannot_say_is_null():
    for name in ("INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64"):
        dtype = tensors.dtype_of(name, "x")
        limits = [int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)]
        assert tensors.from_json(limits, dtype, (2,), "x").tolist() == limits
    uint64, float32 = np.dtype(np.uint64), np.dtype(np.float32)
    found = tensors.from_json([2**63, 1, 2**64 - 1], uint64, (3,), "x")
    assert found.tolist() == [2**63, 1, 2**64 - 1]
    found = tensors.from_json([[10**20], [0.5]], float32, (2, 1), "x")
    assert found.tolist() == [[np.float32(1e20)], [0.5]]
    wrong = [(data, uint64) for data in ([2**63, -1], [2**64, 1], [2**63, 1.0])]
    for data, dtype in (*wrong, ([10**400], float32)):
        with pytest.raises(UsageError, match="data: expected"):
            tensors.from_json(data, dtype, (len(data),), "x")
    array = np.array([1.5, np.nan, np.inf, -np.inf], np.float32)
    assert tensors.to_json(array) == [1.5, None, None, None]
    assert tensors.to_json(array.astype(ml_dtypes.bfloat16)) == [1.5, None, None, None]
