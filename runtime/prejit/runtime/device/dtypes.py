"""NumPy and ml_dtypes types by their names in a bundle."""

from __future__ import annotations

from typing import Any

import numpy as np

from prejit.runtime.errors import MismatchError


def dtype_of(name: str) -> np.dtype[Any]:
    """Return NumPy's dtype for a name in `format.arrays.DTYPES`; bfloat16, int4 and others are ml_dtypes's.

    Raises:
        MismatchError: the installed ml_dtypes does not have it.
    """
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        if (scalar := getattr(ml_dtypes, name, None)) is None:
            raise MismatchError(
                f"expected a version of ml_dtypes that has {name}, found {ml_dtypes.__version__}",
                hint="pip install --upgrade ml_dtypes",
            ) from None
        dtype: np.dtype[Any] = np.dtype(scalar)
        return dtype
