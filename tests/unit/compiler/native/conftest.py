"""The library that tests of kernels without a choice of multipliers call."""

import pytest

from . import kernel_builds
from .kernel_builds import LEVELS


@pytest.fixture(
    scope="module", params=[pytest.param(LEVELS[0], marks=pytest.mark.thorough), *LEVELS[1:]]
)
def kernels(request, build_cache):
    """The library of a level, as bundles have it."""
    return kernel_builds.product_library(request.param, build_cache)
