"""Both ways to compute a model: as the portable program does, and with the native kernels."""

import numpy as np
import pytest


@pytest.fixture(params=["portable", "kernels"])
def forms(request):
    """What models are traced with."""
    if request.param == "portable":
        return None
    return request.getfixturevalue("with_kernels")


@pytest.fixture(scope="module")
def reference(request):
    """The arrays that torch computed, from all files in the REFERENCES of a module."""
    found = {}
    for file in request.module.REFERENCES:
        with np.load(file) as recorded:
            found |= recorded
    return found
