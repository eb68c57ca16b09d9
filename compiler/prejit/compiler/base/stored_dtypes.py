"""The dtypes that matrices of a model can be stored in: the one table that all of the build reads.

These follow the table:

    manifest       accepts these names for `model.dtype`
    models         stores matrices in them, and computes the stored values (quantizing.py)
    native         lists the forms of a product with such a matrix, and its size
    lowering, compile   give a product that is measured its scales

These do not, and a new dtype needs a change in each:

    native/kernels/linear.h, linear_ffi.cc  `Dtype`; `read_weights`, which also says which dtypes have scales
    native/kernels/linear.cc            `bytes_of`, `with_dtype`
    native/kernels/linear_amx.cc        `panel_of`, `fetch_of`: int8 or else bfloat16
    native/kernels/linear_dot_bf16.cc   `load_weights`, `dot_block`, `multiply_all`: int8 or else bfloat16
    native/kernels/simd.h, pairs.h      `load`, `load_pairs`: elements to float32, and to bfloat16
    models/quantizing.py, own_decoder_narrowing.py  `_rounded`, `_fits`: an integer or else bfloat16
    pipeline/measure/golden_answers.py  `NARROW`, if no prefix in it fits the name
    runtime/format/safetensors_dtypes.py  its name in the weights layer, if it is not there; as a reader of
                                        today does not know it, this is a new version of the format
    docs/bundle-format.md               the dtypes that a matrix may have

int4 needs more, as its elements take less than a byte: `SAFETENSORS_DTYPES` and `bytes_of` count whole bytes,
`write_weights` and `open_weights` write and map arrays of NumPy, which gives int4 a byte, and kernels find a
row by pointers to elements. tests/kernels/linear_driver.cc and test_kernel_linear.py try each dtype.
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
