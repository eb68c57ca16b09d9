"""A decoder with slots, whose steps come in an order that no clock decides."""

import pytest

from prejit.runtime import load


@pytest.fixture(scope="module")
def bundle(decoder_dir):
    return load(decoder_dir, on_mismatch="error")


@pytest.fixture(autouse=True)
def _copies_are_quick(monkeypatch):
    """The order of steps does not depend on how fast the machine is."""
    monkeypatch.setattr("prejit.runtime.generation.continuous_batch._PREPARING_SECONDS", 100.0)
