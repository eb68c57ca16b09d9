"""Both ways to compute a model: as the portable program does, and with the native kernels."""

from __future__ import annotations

import pytest

from prejit.compiler.models.layers.product_forms import Forms


@pytest.fixture(params=["portable", "kernels"])
def forms(request: pytest.FixtureRequest) -> Forms | None:
    """What models are traced with."""
    if request.param == "portable":
        return None
    forms: Forms = request.getfixturevalue("with_kernels")
    return forms
