"""The weights layer as NumPy arrays, without copying: views of the mapped file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from prejit.runtime.device.dtypes import dtype_of
from prejit.runtime.format.checks.safetensors import check_weights

if TYPE_CHECKING:
    from prejit.runtime.format.blobs import Layer


def tensors(layer: Layer) -> dict[str, np.ndarray[Any, Any]]:
    """Return every tensor of a weights layer by name.

    Raises:
        RejectError: the layer is not a safetensors file, or its tensors are not aligned.
    """
    slices = check_weights(memoryview(layer.content), layer.path)
    return {
        name: np.frombuffer(
            layer.content, dtype_of(tensor.dtype), (tensor.end - tensor.start) // item, tensor.start
        ).reshape(tensor.shape)
        for name, tensor in slices.items()
        if (item := dtype_of(tensor.dtype).itemsize)
    }
