"""Find the modules that a user's function is written in, and what their sources import.

Nothing is imported here: a kept trace is used again in a process that never had its modules.
"""

from __future__ import annotations

import ast
import functools
import os
import sys
import types
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from importlib.machinery import ModuleSpec
from typing import Any

from prejit.compiler.base import python_source
from prejit.compiler.lowering.user.observer import owners_of
from prejit.compiler.lowering.user.trace_inputs import (
    Present,
    is_installed,
    is_ours,
    is_standard,
    read_source,
)
from prejit.runtime.base.files import digest_of
from prejit.runtime.format import constants
from prejit.runtime.jitted.jit_call import MODULE, PACKAGE, SCRIPTS, loaded, module_name

_MOST_OBJECTS = 100_000
"""Maximum number of objects that are visited: one of them may lead to most of the process."""
_OF_CONTAINERS = ("collections", "types")
"""Modules of Python whose classes hold objects of the application, such as SimpleNamespace and ChainMap."""


def modules_of(given: object, files: Collection[str]) -> tuple[str, ...]:
    """Return the names of the modules of the functions and classes in an object, at any depth, sorted.

    A function without a file, as in a notebook, leads to what it reads. `files` are sources whose modules
    count too. Where code computes the name of a module that it imports, all of the application count.
    """
    names = {name for name in [*sys.modules] if _file_of(name) in files}
    seen, waiting = dict[int, object](), [given]
    while waiting and len(seen) < _MOST_OBJECTS:
        each: Any = waiting.pop()
        kind = type(each)
        if id(each) in seen or kind in (str, int, float, bool, bytes, type(None)):
            continue
        seen[id(each)] = each
        if issubclass(kind, types.ModuleType):
            names.add(each.__name__)
        elif issubclass(kind, type):
            for base in each.__mro__:
                if _file_of(base.__module__):
                    names.add(base.__module__)
                elif not constants.is_base(base.__module__):
                    waiting += vars(base).values()
        elif kind is types.FunctionType:
            known = each.__globals__
            names |= set(filter(_file_of, [each.__module__]))
            if "__file__" in known:
                names.add(module_name(known.get("__name__"), known))
            else:
                read = constants.names_of(each.__code__)
                names |= read & sys.modules.keys()  # imports in it
                waiting += [known[name] for name in read & known.keys()]
            waiting += _held(each)
        else:
            waiting += [kind, *_held(each)]
    if _computes_imports(names):
        names |= {*filter(_is_of_application, [*sys.modules])} - {*SCRIPTS}
    return tuple(sorted({*map(module_name, names)}))


def _computes_imports(names: Iterable[str]) -> bool:
    """Return whether modules of the application, or those that they import, compute what to import."""
    waiting, seen = [*names], set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen or not _is_of_application(name):
            continue
        seen.add(name)
        module: Any = sys.modules[name]
        spec, own = _spec_of(module), name if hasattr(module, "__path__") else module.__package__
        if spec is None:
            continue
        with suppress(OSError):
            found = imports_of(read_source(spec), own or "", own == name)
            if found.are_computed:
                return True
            waiting += [*found.names, *found.attributes, name.rpartition(".")[0]]
    return False


def _is_of_application(name: str) -> bool:
    """Return whether a module is loaded from a source whose digest counts."""
    file = _file_of(name)
    return file is not None and not (
        is_installed(file)
        and (
            is_standard(file)
            or is_ours(file)
            or constants.is_base(name)
            or _has_code_of_version(name.partition(".")[0])
        )
    )


def _held(value: Any) -> list[Any]:
    """Return the objects that an object of the application holds, without what jax keeps of earlier calls."""
    match value:
        case list() | tuple() | set() | frozenset() | deque():
            return [*value]
        case dict():
            return [*value, *value.values()]
        case types.MethodType():
            return [value.__func__, value.__self__]
        case functools.partial():
            return [value.func, value.args, value.keywords]
        case types.FunctionType():
            cells = (each for each in value.__closure__ or () if each != types.CellType())
            return [
                value.__defaults__,
                value.__kwdefaults__,
                vars(value),
                *(c.cell_contents for c in cells),
            ]
        case staticmethod() | classmethod():
            return [value.__func__]
        case property():
            return [value.fget]
    held = getattr(value, "__dict__", {})  # a class may raise anything for other names
    module = type(value).__module__
    if not ("__wrapped__" in held or module in _OF_CONTAINERS) and constants.is_base(module):
        return []
    slots = (name for base in type(value).__mro__ for name in getattr(base, "__slots__", ()))
    return [held, *(getattr(value, name, None) for name in slots)]


def _file_of(module: str | None) -> str | None:
    found = sys.modules.get(str(module))
    return vars(found).get("__file__") if isinstance(found, types.ModuleType) else None


def sources_of(of: Iterable[str], present: Present, *, is_loaded: bool) -> dict[str, str | None]:
    """Return what the code of modules comes from, as `jit_call.sources` finds it at a call.

    A module of a function that nobody finds has no digest: its functions are a miss. One that only an import
    names, such as before `except ImportError`, is None. `is_loaded`: modules of this process are those of the
    functions.
    """
    roots = {*of}
    waiting = [*roots]
    modules, packages, optional = dict[str, str | None](), set[str](), set[str]()
    while waiting:
        name = waiting.pop()
        parent, top = name.rpartition(".")[0], name.partition(".")[0]
        waiting += [parent] if parent else []
        if name in modules:
            continue
        spec = (_spec_of(loaded(name)) if is_loaded else None) or present.spec(name)
        if spec is None and name in roots and not constants.is_base(name) and not present.spec(top):
            modules[name] = ""
        if spec is None or not spec.has_location or spec.origin is None:
            continue
        file = os.path.abspath(spec.origin)
        if is_installed(file) and (is_standard(file) or is_ours(file) or constants.is_base(name)):
            continue
        if is_installed(file) and _has_code_of_version(top):
            packages.add(top)
        else:
            content = read_source(spec)
            modules[name] = digest_of(content)
            is_package = spec.submodule_search_locations is not None
            imports = imports_of(content, name if is_package else parent, is_package)
            waiting += [*imports.names, *imports.attributes]
            optional |= imports.names | imports.optional
    for name in optional - modules.keys():
        package = present.spec(name.rpartition(".")[0]) if "." in name else None
        is_attribute = package is not None and package.submodule_search_locations is None
        if not (is_attribute or constants.is_base(name) or loaded(name) or present.spec(name)):
            modules[name] = None
    distributions = {each for package in packages for each in owners_of(package)}
    return {
        **{f"{MODULE}{name}": modules[name] for name in sorted(modules)},
        **{f"{PACKAGE}{name}": metadata.version(name) for name in sorted(distributions)},
    }


def _spec_of(module: Any) -> ModuleSpec | None:
    """Return the spec of a module as it runs: a script has another name in its own one."""
    if getattr(module, "__file__", None) is None:
        return None
    spec = ModuleSpec(
        module.__name__,
        getattr(module, "__loader__", None),
        origin=module.__file__,
        is_package=hasattr(module, "__path__"),
    )
    spec.has_location = True
    return spec


@functools.cache
def _has_code_of_version(package: str) -> bool:
    """Return whether a package's version decides its code: not if it comes from a directory or repository."""
    owners = owners_of(package)
    origins = (metadata.distribution(each).read_text("direct_url.json") for each in owners)
    return bool(owners) and all("archive_info" in each for each in origins if each)


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
        are_computed: whether code computes the name of a module, runs one without its name, or runs a text.
    """

    names: frozenset[str]
    attributes: frozenset[str]
    optional: frozenset[str]
    are_computed: bool


@functools.lru_cache(512)
def imports_of(content: bytes, package: str, is_package: bool) -> Imports:
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
            case ast.Name(id="exec" | "eval"):  # no method: `eval` is one of many models
                are_computed = True
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
