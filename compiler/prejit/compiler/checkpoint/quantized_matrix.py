"""A matrix that was published in few bits: its values in float32, or its integers, scales and zero points."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from prejit.runtime.errors import CheckpointError

if TYPE_CHECKING:
    from prejit.compiler.models.published_integers import Integers

Values = np.ndarray[Any, Any]


@dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix (out, in) in few bits.

    Attributes:
        name: its name, for errors.
        path: its file.
        form: how it was published, in words.
        shape: outputs and inputs.
        values: returns what is multiplied by the scales, for a slice of outputs: integers or floats.
        scales: returns the scales, float32 [r, c].
        block: the outputs and the inputs that share a scale.
        zeros: returns the zero points [r, c], of the values' kind; None: they are 0.
        groups: returns the group of each input, an index of c; None: the inputs of a block lie beside each
            other.
    """

    name: str
    path: Path
    form: str
    shape: tuple[int, int]
    values: Callable[[slice], Values]
    scales: Callable[[], Values]
    block: tuple[int, int]
    zeros: Callable[[], Values] | None = None
    groups: Callable[[], Values] | None = None

    def read(self, part: slice | None = None) -> Values:
        """Return the values of a slice of outputs, float32."""
        part = slice(*(part or slice(None)).indices(self.shape[0])[:2])
        outputs = np.arange(part.start, max(part.start, part.stop))
        at = np.ix_(outputs // self.block[0], self._group_of_each())
        values = self.values(part)
        if self.zeros is not None:
            wide: Any = np.int16 if np.issubdtype(values.dtype, np.integer) else np.float32
            values = values.astype(wide) - self.zeros().astype(wide)[at]
        return values.astype(np.float32) * self.scales()[at]

    def integers(self) -> Integers | None:
        """Return the matrix as integers and scales; None: it is no such product."""
        from prejit.compiler.models.published_integers import Integers

        (outputs, inputs), (rows, columns) = self.shape, self.block
        values = self.values(slice(0, outputs))
        if not np.issubdtype(values.dtype, np.integer) or inputs % columns:
            return None
        groups = self._group_of_each()
        if not np.array_equal(groups, np.arange(inputs) // columns):
            return None
        each_output = np.arange(outputs) // rows
        zeros = None if self.zeros is None else self.zeros().astype(np.int16)[each_output]
        if values.dtype == np.uint8:  # of 4 or 8 bits, without a sign
            most = max(int(each.max(initial=0)) for each in (values, zeros) if each is not None)
            half = 8 if most < 16 else 128
            zeros = np.zeros((outputs, inputs // columns), np.int16) if zeros is None else zeros
            values, zeros = values.astype(np.int16) - half, zeros - half
        if values.min(initial=0) < -128 or values.max(initial=0) > 127:
            return None
        floats = None if zeros is None or not zeros.any() else zeros.astype(np.float32)
        return Integers(values.astype(np.int8), self.scales()[each_output], floats)

    def _group_of_each(self) -> Values:
        """Return the group of each input.

        Raises:
            CheckpointError: there is no such group.
        """
        inputs, columns = self.shape[1], self.block[1]
        if self.groups is None:
            return np.arange(inputs) // columns
        found = self.groups()
        count = -(-inputs // columns)
        if found.min(initial=0) < 0 or found.max(initial=0) >= count:
            raise CheckpointError(
                f"{self.path}: {self.name}: expected groups from 0 to {count - 1} in g_idx, found "
                f"{found.min()} to {found.max()}",
                hint="fetch or write the checkpoint again",
            )
        return found
