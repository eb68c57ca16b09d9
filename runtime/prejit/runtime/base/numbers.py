"""Limits of numbers in files."""

from __future__ import annotations

MAX_INTEGER = (1 << 63) - 1
"""Of any integer in a file."""
