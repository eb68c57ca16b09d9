"""NumPy and ml_dtypes types by their names in a bundle."""

from __future__ import annotations

from typing import Any

import numpy as np

from prejit.runtime.errors import MismatchError


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
