"""Find what the source of a module imports. Nothing is imported here."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from prejit.compiler.base import python_source

_IMPORTERS = {
    "import_module": ("name", "package"),
    "__import__": ("name", "globals", "locals", "fromlist", "level"),
    "find_spec": ("name", "package"),
    "resolve_name": ("name", "package"),
    "run_module": ("mod_name",),
}
"""Functions that import a module by its name, or find it, with their parameters."""
_LOADERS = ("exec_module", "load_module", "run_path")
"""Functions that run a module without its name."""
_OWN = ("__package__", "__name__", "__spec__.parent")
"""Expressions for the package of a module. `__name__` is that in its `__init__`."""


@dataclass(frozen=True, slots=True)
class Imports:
    """The imports of a source, anywhere in it.

    Attributes:
        names: of modules.
        attributes: of modules, or of what the package in front of the last dot has by that name.
        optional: those of `attributes` that the source may do without: an error there has a handler.
        are_computed: whether code computes the name of a module, or runs one without its name.
    """

    names: frozenset[str]
    attributes: frozenset[str]
    optional: frozenset[str]
    are_computed: bool


@functools.lru_cache(512)
def of_source(content: bytes, package: str, is_package: bool) -> Imports:
    """Return what the source of a module imports. `is_package`: it is that of the package itself."""
    try:
        tree = python_source.parse(content)
    except (SyntaxError, ValueError):  # a library of machine code
        return Imports(frozenset(), frozenset(), frozenset(), are_computed=False)
    nodes = [*ast.walk(tree)]
    blocks = [each for each in nodes if isinstance(each, (ast.Try, ast.TryStar, ast.With))]
    handled = {id(inner) for block in blocks for inner in ast.walk(block)}
    importers = {**_IMPORTERS}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            named = {each.asname: each.name for each in node.names if each.asname}
            importers |= {new: _IMPORTERS[old] for new, old in named.items() if old in _IMPORTERS}
    names, attributes, optional = set[str](), set[str](), set[str]()
    called, are_computed = set[int](), False
    for node in nodes:
        match node:
            case ast.Import():
                names |= {alias.name for alias in node.names}
            case ast.ImportFrom():
                base = _absolute(node.module or "", node.level, package)
                found = {f"{base}.{alias.name}" for alias in node.names}
                names.add(base)
                attributes |= found
                optional |= found if id(node) in handled else set()
            case ast.Assign(value=ast.List() | ast.Tuple() as value) if is_package and any(
                _name(each) == "__all__" for each in node.targets
            ):  # `from package import *` imports these
                attributes |= {f"{package}.{each}" for each in map(_constant, value.elts) if each}
            case ast.Call() if _name(node.func) in importers:
                called.add(id(node.func))
                parameters = importers[_name(node.func)]
                given = dict(zip(parameters, node.args, strict=False))
                given |= {each.arg: each.value for each in node.keywords if each.arg}
                imported = [*_called(given, parameters[0], package)]
                names |= {*imported[:1]}
                attributes |= {*imported[1:]}
                are_computed |= not imported and _name(node.func) != "find_spec"
            case ast.Name() | ast.Attribute() if id(node) not in called:
                are_computed |= _name(node) in importers.keys() - {"find_spec"} or (
                    _name(node) in _LOADERS
                )
    names.discard("")
    return Imports(frozenset(names), frozenset(attributes), frozenset(optional), are_computed)


def _called(given: dict[str, ast.expr], first: str, package: str) -> Iterator[str]:
    """Yield the name of the module that a call imports, then those of attributes; nothing: it is computed."""
    name, anchor = _constant(given.get(first)), given.get("package")
    level = _constant(given["level"]) if "level" in given else 0
    if not isinstance(name, str) or not isinstance(level, int):
        return
    name = name.partition(":")[0]  # of pkgutil.resolve_name
    if name.startswith("."):
        if anchor is not None and ast.unparse(anchor) not in _OWN:
            package = _constant(anchor)
            if not isinstance(package, str):
                return
        level = len(name) - len(name.lstrip("."))
    base = _absolute(name.lstrip("."), level, package)
    yield base
    attributes = given.get("fromlist")
    if isinstance(attributes, (ast.List, ast.Tuple)):
        yield from (f"{base}.{each}" for each in map(_constant, attributes.elts) if each)


def _absolute(name: str, level: int, package: str) -> str:
    """Return the whole name of a module from a relative one with as many dots in front as `level`."""
    parts = package.split(".")
    above = parts[: len(parts) - level + 1] if level else []
    return ".".join([*above, *filter(None, [name])])


def _name(node: ast.AST) -> str:
    """Return the name of a variable or attribute; empty: the expression is neither."""
    return str(getattr(node, "attr", getattr(node, "id", "")))


def _constant(node: ast.AST | None) -> Any:
    return node.value if isinstance(node, ast.Constant) else None
