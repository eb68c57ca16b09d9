"""The dtypes that matrices of a model can be stored in: the one table that all of the build reads.

To add a dtype, add it here and to the switch of `read_weights` in native/kernels/linear_ffi.cc. A dtype that
is neither an integer nor bfloat16 also needs a conversion in models/precision.py.

    manifest       accepts these names for `model.dtype`
    models         stores matrices in them, and computes the stored values (precision.py)
    native         lists the forms of a product with such a matrix, and its size
    lowering, compile   give a product that is measured its scales
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoredDtype:
    """A dtype that matrices can be stored in.

    Attributes:
        name: NumPy's name, in the manifest, in StableHLO and in the bundle.
        bits: bits of an element.
        largest: largest stored integer; values are the integers times a float32 scale for each output. None
            for a dtype that stores the values themselves.
    """

    name: str
    bits: int
    largest: int | None = None

    @property
    def has_scales(self) -> bool:
        """True if a matrix has one float32 scale for each output."""
        return self.largest is not None

    @property
    def is_narrow(self) -> bool:
        """True if an element has fewer bits than float32. Sums are always computed in float32."""
        return self.bits < 32


STORED_DTYPES: Mapping[str, StoredDtype] = {
    dtype.name: dtype
    for dtype in (
        StoredDtype("float32", 32),
        StoredDtype("bfloat16", 16),
        StoredDtype("int8", 8, largest=127),
    )
}
"""Every stored dtype by name."""
