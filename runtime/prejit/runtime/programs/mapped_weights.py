"""The weights layer as NumPy arrays, without copying: views of the mapped file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from prejit.runtime.device.transfer import dtype_of
from prejit.runtime.format.checks.layers import TensorSlice, check_weights, header_end

if TYPE_CHECKING:
    from prejit.runtime.format.blobs import Layer


class Weights(NamedTuple):
    """The tensors of a weights layer.

    Attributes:
        values: the tensors by name, as views of the file. Call `wait` before you read one.
        slices: the place of each tensor in the file.
        layer: the layer.
    """

    values: Mapping[str, np.ndarray[Any, Any]]
    slices: Mapping[str, TensorSlice]
    layer: Layer

    def wait(self, names: Iterable[str]) -> None:
        """Wait until tensors are verified.

        Raises:
            RejectError: the bundle is damaged.
            StoreError: the disk does not give its bytes.
        """
        start = end = 0
        for place in sorted((self.slices[name].start, self.slices[name].end) for name in names):
            if place[0] - end > _NEAR_BYTES:
                self.layer.wait(start, end)
                start = place[0]
            end = place[1]
        self.layer.wait(start, end)


_NEAR_BYTES = 1 << 16
"""Tensors that lie so near to each other are waited for together."""


def open_weights(layer: Layer) -> Weights:
    """Return the tensors of a weights layer, whose header is verified now.

    Raises:
        RejectError: the layer is damaged, is not a safetensors file, or its tensors are not aligned.
        StoreError: the disk does not give its bytes.
    """
    layer.wait(0, 8)
    content = memoryview(layer.content)
    layer.wait(0, header_end(content, layer.path))
    slices = check_weights(content, layer.path)
    values = {
        name: np.frombuffer(
            layer.content, dtype_of(tensor.dtype), (tensor.end - tensor.start) // item, tensor.start
        ).reshape(tensor.shape)
        for name, tensor in slices.items()
        if (item := dtype_of(tensor.dtype).itemsize)
    }
    return Weights(values, slices, layer)
