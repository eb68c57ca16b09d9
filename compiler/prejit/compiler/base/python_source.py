"""Python source: its syntax tree, and whether it is that of an installed package."""

from __future__ import annotations

import ast
import os
import threading

PACKAGES = {"site-packages", "dist-packages"}
"""Names of the directories of installed packages."""

_lock = threading.Lock()
"""Python 3.11 counts the depth of a tree for all threads together, and fails where two make one at once."""


def parse(source: str | bytes) -> ast.Module:
    """Return the syntax tree of a source. Errors as `ast.parse`."""
    with _lock:
        return ast.parse(source)


def is_in_package(path: str) -> bool:
    """Return whether a path leads through a directory of installed packages."""
    return not PACKAGES.isdisjoint(path.split(os.sep))
