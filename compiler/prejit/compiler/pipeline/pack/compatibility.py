"""How long jax promises to read a portable program."""

from __future__ import annotations

from datetime import date, timedelta

_RELEASED = {
    # version of jax: its release (the dates of the files in its wheels)
    "0.10.2": date(2026, 6, 17),
    "0.11.0": date(2026, 7, 16),
    "0.11.1": date(2026, 8, 17),
    "0.11.2": date(2026, 9, 17),
    "0.12.0": date(2026, 10, 16),
    "0.12.0.1": date(2026, 10, 20),
}
_WINDOW = timedelta(days=180)


def readable_until(jax: str) -> str | None:
    """The last day that jax promises to read what a version of it lowered, YYYY-MM-DD; None: not known.

    "Exported artifacts can be compiled and executed by a compiler and a jaxlib up to 6 months newer" (jax,
    docs/export/export.md, "Compatibility guarantees"). It counts from the release, not from the day of
    the build, so that equal builds give equal bytes.
    """
    released = _RELEASED.get(jax)
    return None if released is None else (released + _WINDOW).isoformat()
