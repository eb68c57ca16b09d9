"""The weights layer as NumPy arrays: views of the mapped file, nothing copied."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from prejit.runtime import verify
from prejit.runtime.errors import MismatchError

if TYPE_CHECKING:
    from prejit.runtime.programs import Layer


def tensors(layer: Layer) -> dict[str, np.ndarray[Any, Any]]:
    """Every tensor of a weights layer, by name.

    Raises:
        RejectError: the layer is no safetensors file, or its tensors are not aligned.
    """
    slices = verify.check_weights(memoryview(layer.content), layer.path)
    return {
        name: np.frombuffer(
            layer.content, dtype_of(tensor.dtype), (tensor.end - tensor.start) // item, tensor.start
        ).reshape(tensor.shape)
        for name, tensor in slices.items()
        if (item := dtype_of(tensor.dtype).itemsize)
    }


def dtype_of(name: str) -> np.dtype[Any]:
    """NumPy's dtype of a name in bundle.DTYPES, also of those that are not NumPy's own (bfloat16, int4).

    Raises:
        MismatchError: the ml_dtypes that is installed does not have it.
    """
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        if (scalar := getattr(ml_dtypes, name, None)) is None:
            raise MismatchError(
                f"expected an ml_dtypes that has {name}, found {ml_dtypes.__version__}",
                hint="pip install --upgrade ml_dtypes",
            ) from None
        dtype: np.dtype[Any] = np.dtype(scalar)
        return dtype
