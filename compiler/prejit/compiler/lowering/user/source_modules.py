"""Where the code of a user's function comes from: modules of the application, and packages that they import.

Nothing is imported: a kept trace is used again in a process that never had its modules.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from typing import Any

from prejit.compiler.base import python_source
from prejit.compiler.lowering.user.observer import owners_of_packages
from prejit.compiler.lowering.user.trace_inputs import (
    Present,
    is_installed,
    is_ours,
    is_standard,
    read_source,
)
from prejit.runtime.base.files import digest_of
from prejit.runtime.format import constants
from prejit.runtime.jitted.function_sources import MODULE, PACKAGE, module_name

_NAMED = re.compile(r"\b([A-Za-z_][\w.]*):[A-Za-z_<]")
"""The module of a function or class in the text of a constant or tree."""


def modules_of(function: str | Callable[..., Any], texts: Iterable[str]) -> frozenset[str]:
    """Return the names of the modules of a function and of its constants.

    Args:
        function: the function itself, or `module:name`.
        texts: the constants and trees that belong to it, as text.
    """
    named = {name for text in texts for name in _NAMED.findall(text)}
    if isinstance(function, str):
        return frozenset({function.partition(":")[0], *named})
    inner: Any = function
    while inner is not None:
        own = getattr(inner, "__globals__", {}).get(
            "__name__"
        )  # a wrapper's `__module__` is another one's
        named |= {module_name(each) for each in (inner.__module__, own) if each}
        is_partial = isinstance(inner, functools.partial)
        inner = inner.func if is_partial else getattr(inner, "__wrapped__", None)
    return frozenset(named)


def sources_of(of: Iterable[str], present: Present) -> dict[str, str]:
    """Return what the code of modules comes from, as `function_sources.sources` finds it at a call."""
    waiting = [*of]
    modules, packages = dict[str, str](), set[str]()
    while waiting:
        name = waiting.pop()
        parent = name.rpartition(".")[0]
        waiting += [parent] if parent else []
        spec = present.spec(name)
        if name in modules or spec is None or not spec.has_location or spec.origin is None:
            continue
        file = os.path.abspath(spec.origin)
        if not is_installed(file):
            content = read_source(spec)
            modules[name] = digest_of(content)
            package = name if spec.submodule_search_locations is not None else parent
            waiting += _imports(content, package)
        elif not (is_standard(file) or is_ours(file) or constants.is_told(name)):
            packages.add(name.partition(".")[0])
    owners = owners_of_packages(tuple(sys.path)) if packages else {}
    distributions = {each for package in packages for each in owners.get(package, ())}
    return {
        **{f"{MODULE}{name}": modules[name] for name in sorted(modules)},
        **{f"{PACKAGE}{name}": metadata.version(name) for name in sorted(distributions)},
    }


def _imports(content: bytes, package: str) -> Iterator[str]:
    """Yield the names of what a source in a package imports, anywhere in it. Some of them are no modules."""
    try:
        tree = python_source.parse(content)
    except (SyntaxError, ValueError):  # a library of machine code
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            above = parts[: len(parts) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            yield from (base, *(f"{base}.{alias.name}" for alias in node.names))
