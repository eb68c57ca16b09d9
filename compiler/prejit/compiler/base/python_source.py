"""Python source as a syntax tree."""

from __future__ import annotations

import ast
import threading

_lock = threading.Lock()
"""Python 3.11 counts the depth of a tree for all threads together, and fails where two make one at once."""


def parse(source: str | bytes) -> ast.Module:
    """Return the syntax tree of a source. Errors as `ast.parse`."""
    with _lock:
        return ast.parse(source)
