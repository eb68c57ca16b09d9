"""The sources of a jitted function: digests of modules, and versions of packages.

A build lists them in the state of a program as `module NAME` and `package NAME`; a call looks at each of them
again. A function without a file, as of a notebook, is compared by its code.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from prejit.runtime.base.files import digest_of
from prejit.runtime.format import constants
from prejit.runtime.format.constants import Constant

MODULE, PACKAGE = "module ", "package "
"""The beginnings of places: of a module, and of a distribution."""
SCRIPTS = ("__main__", "__mp_main__")  # the second one is what multiprocessing calls it


def module_name(module: object, variables: Mapping[str, Any] | None = None) -> str:
    """Return the name by which other processes import a module: that of its file, where it is a script.

    `variables` are those of a function of it: a profiler's scripts are not in sys.modules.
    """
    if module not in SCRIPTS:
        return str(module)
    if variables is None or variables.get("__name__") != module:
        variables = vars(sys.modules[str(module)])
    name = getattr(variables.get("__spec__"), "name", "__main__")
    if name != "__main__":  # python -m
        return str(name)
    return (variables.get("__file__") or str(module)).rpartition("/")[2].removesuffix(".py")


def sources(places: Iterable[str]) -> dict[str, Constant]:
    """Return what modules and distributions are now, by place; those that are not there are left out."""
    found: dict[str, Constant] = {}
    for place in places:
        if place.startswith(MODULE):
            with suppress(Exception):  # a finder or a loader of the application may raise anything
                found[place] = digest_of(_source(place.removeprefix(MODULE)))
        elif place.startswith(PACKAGE):
            with suppress(metadata.PackageNotFoundError):
                found[place] = metadata.version(place.removeprefix(PACKAGE))
    return found


def loaded(name: str) -> Any:
    """Return a module or script that is imported, by the name of its file; None: it is not."""
    scripts = (each for each in SCRIPTS if each in sys.modules and module_name(each) == name)
    return sys.modules.get(name) or sys.modules.get(next(scripts, ""))


def _source(name: str) -> bytes:
    """Return the source of a module, which need not be imported."""
    module = loaded(name)
    if module is None:
        spec = _spec(name)
        return bytes(spec.loader.get_data(spec.origin))
    file, loader = module.__file__, module.__loader__
    return Path(file).read_bytes() if loader is None else bytes(loader.get_data(file))


def _spec(name: str) -> Any:
    """Return where Python would find a module. No code of a package runs."""
    package = name.rpartition(".")[0]
    places = _places(package) if package else None
    return next(filter(None, (each.find_spec(name, places) for each in sys.meta_path)))


def _places(package: str) -> Any:
    """Return the directories of a package."""
    if package in sys.modules:
        found: Any = sys.modules[package].__spec__
    else:
        parent, _, own = package.rpartition(".")
        try:
            found = _spec(package)
        except KeyError:  # a namespace package in one that is not imported
            return [str(Path(each, own)) for each in _places(parent)]
    if found.origin is None:  # a namespace package, which has no code
        import_module(package)
    return found.submodule_search_locations


def place_in_file(function: types.FunctionType) -> tuple[int, ...] | None:
    """Return the first line of a function, and where a lambda ends: a line may have several.

    None: other code has generated it, and `own_source` returns its code.
    """
    code = function.__code__
    if not is_in_file(function):
        return None
    if code.co_name != "<lambda>":
        return (code.co_firstlineno,)
    ends = ((line, at) for _, line, _, at in code.co_positions() if line and at is not None)
    return code.co_firstlineno, *max(ends, default=())


def is_in_file(function: types.FunctionType) -> bool:
    """Return whether the source of a function's module has the function."""
    generated = function.__code__.co_filename.startswith("<")
    return "__file__" in function.__globals__ and not generated


def own_source(function: types.FunctionType) -> dict[str, Any]:
    """Return what a function without a file is made of, by place: its code, and the variables that it reads.

    Functions and classes of its module that it reads by name count as it does.
    """
    variables = function.__globals__
    found: dict[str, Any] = {}
    waiting: list[Any] = [] if is_in_file(function) else [function]
    while waiting:
        each = waiting.pop()
        if isinstance(each, type):
            waiting += vars(each).values()
        waiting += filter(None, (getattr(each, at, None) for at in ("__wrapped__", "fget")))
        if not isinstance(each, types.FunctionType):
            continue
        # In a wrapper the two names differ.
        place = f"code of {each.__qualname__}: {each.__code__.co_qualname}"
        if place in found:
            continue
        found[place] = [each.__code__, each.__defaults__, each.__kwdefaults__]
        for name in sorted(constants.names_of(each.__code__) & variables.keys()):
            value = variables[name]
            if not hasattr(value, "__qualname__"):
                found[f"variable {name}"] = value
            elif getattr(value, "__module__", None) == function.__module__:
                waiting.append(value)
    return found
