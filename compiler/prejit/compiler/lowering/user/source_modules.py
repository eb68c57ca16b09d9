"""Find the modules that a user's function is written in, and the packages that these modules import.

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
from prejit.runtime.jitted.function_sources import MODULE, PACKAGE, loaded, module_name

_MOST_OBJECTS = 100_000
"""Maximum number of objects that are visited: one of them may lead to most of the process."""
_OF_CONTAINERS = ("collections", "types")
"""Modules of Python whose classes hold objects of the application, such as SimpleNamespace and ChainMap."""


def modules_of(given: object, files: Collection[str]) -> tuple[str, ...]:
    """Return the names of the modules of the functions and classes in an object, at any depth, sorted.

    A function without a file, as in a notebook, leads to what it reads. `files` are sources whose modules
    count too.
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
    return tuple(sorted(map(module_name, names)))


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


def sources_of(of: Iterable[str], present: Present, *, is_loaded: bool) -> dict[str, str]:
    """Return what the code of modules comes from, as `function_sources.sources` finds it at a call.

    A module that nobody finds has no digest: its functions are a miss. `is_loaded`: modules of this process
    are those of the functions.
    """
    roots = {*of}
    waiting = [*roots]
    modules, packages = dict[str, str](), set[str]()
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
            package = name if spec.submodule_search_locations is not None else parent
            waiting += _imports(content, package)
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


def _imports(content: bytes, package: str) -> Iterator[str]:
    """Yield the names of what a source in a package imports, anywhere in it. Some of them are no modules."""
    try:
        tree = python_source.parse(content)
    except (SyntaxError, ValueError):  # a library of machine code
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            given = [str(each.value) for each in node.args if isinstance(each, ast.Constant)]
            if called in ("import_module", "__import__") and given:
                name, *beside = given
                yield (*beside, package)[0] + name if name.startswith(".") else name
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            above = parts[: len(parts) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            yield from (base, *(f"{base}.{alias.name}" for alias in node.names))
