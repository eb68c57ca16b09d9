"""How long a portable program can be read."""

from __future__ import annotations

from importlib.metadata import version

from prejit.compiler.pipeline.pack.compatibility import readable_until


def test_the_window_is_six_months_from_the_release() -> None:
    assert readable_until("0.10.2") == "2026-12-14"
    assert readable_until("0.12.0.1") == "2027-04-18"


def test_an_unknown_release_promises_nothing() -> None:
    assert readable_until("0.99.0") is None


def test_the_jax_that_is_tested_with_is_known() -> None:
    """Or the bundles of today's environments would say nothing."""
    assert readable_until(version("jax")) is not None
