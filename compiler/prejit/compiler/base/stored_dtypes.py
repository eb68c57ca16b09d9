"""The dtypes that matrices of a model can be stored in: the one table that all of the build reads.

These follow the table:

    manifest       accepts these names for `model.dtype`
    models         stores matrices in them, and computes the stored values (quantizing.py)
    native         lists the forms of a product with such a matrix, and its size
    lowering, compile   give a product that is measured its scales

These do not, and a new dtype needs a change in each:

    native/kernels/linear.h, linear_ffi.cc  `Dtype`; `read_weights`, which also says which dtypes have scales
    native/kernels/linear.cc            `bytes_of`, `with_dtype`
    native/kernels/linear_amx.cc        `load_step`, `kAreDigits`: int8 or else bfloat16
    native/kernels/linear_dot_bf16.cc   bfloat16 alone
    native/kernels/linear_integers.cc   int8 alone
    native/kernels/simd.h, pairs.h      `load`, `load_pairs`: elements to float32, and to bfloat16
    models/quantizing.py, own_decoder_narrowing.py  `_rounded`, `_fits`: an integer or else bfloat16
    pipeline/measure/golden_answers.py  `NARROW`, if no prefix in it fits the name
    runtime/format/checks/layers.py  its name in the weights layer, if it is not there; as a reader of
                                        today does not know it, this is a new version of the format
    docs/bundle-format.md               the dtypes that a matrix may have

int4 is another way to store: words of 8 values, and scales of `Groups` (models/layers/int4_words.py,
models/int4_rounding.py, native/kernels/linear_int4*). A matrix that it does not fit, an embedding and the
head are int8. tests/kernels/linear_driver.cc and test_kernel_linear.py try each dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoredDtype:
    """A dtype that matrices can be stored in.

    Attributes:
        name: its name in the manifest, and NumPy's name of the elements unless `words` says otherwise.
        bits: bits of an element.
        largest: largest stored integer; values are the integers times a float32 scale for each output. None
            for a dtype that stores the values themselves, or that has scales of its own.
        words: NumPy's name of what holds several elements, if elements are smaller than a byte.
        otherwise: the dtype of matrices that it does not fit.
    """

    name: str
    bits: int
    largest: int | None = None
    words: str | None = None
    otherwise: str | None = None

    @property
    def has_scales(self) -> bool:
        """True if a matrix has scales: one for each output, or more."""
        return self.largest is not None or self.words is not None

    @property
    def is_narrow(self) -> bool:
        """True if an element has fewer bits than float32. Sums are always computed in float32."""
        return self.bits < 32


@dataclass(frozen=True, slots=True)
class Groups:
    """The inputs of an output that share a scale in int4, for all matrices of a model.

    Attributes:
        size: inputs of a group: 32, 64 or 128. A matrix that has no whole groups of them has groups of 32.
        zeros: whether a group has a zero point, too.
    """

    size: int = 32
    zeros: bool = False

    def of(self, inputs: int) -> Groups:
        """Return the groups of a matrix with so many inputs."""
        return self if inputs % self.size == 0 else Groups(zeros=self.zeros)

    @classmethod
    def holding(cls, sizes: Iterable[int], *, zeros: bool) -> Groups:
        """Return the largest groups that hold published groups of these sizes."""
        common = math.gcd(128, *sizes)
        return cls(max(32, common), zeros)


GROUPS_OF_32 = Groups()
"""The groups of a matrix that was not published in four bits."""

STORED_DTYPES: Mapping[str, StoredDtype] = {
    dtype.name: dtype
    for dtype in (
        StoredDtype("float32", 32),
        StoredDtype("bfloat16", 16),
        StoredDtype("int8", 8, largest=127),
        StoredDtype("int4", 4, words="uint32", otherwise="int8"),
    )
}
"""Every stored dtype by name."""


def stored_as(array: object) -> StoredDtype:
    """Return the dtype of a matrix by the dtype of its array."""
    name = str(array)
    return next(each for each in STORED_DTYPES.values() if name == (each.words or each.name))
