"""Where the code of a jitted function comes from: the source of modules, and the versions of packages.

A build lists them in the state of a program as `module NAME` and `package NAME`; a call looks at each of them
again. A function without a file, as of a notebook, is compared by its code.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from prejit.runtime.base.files import digest_of
from prejit.runtime.format import constants
from prejit.runtime.format.constants import Constant

MODULE, PACKAGE = "module ", "package "
"""What the place of a module and of a distribution begins with."""
_SCRIPTS = ("__main__", "__mp_main__")  # the second one is what multiprocessing calls it


def module_name(module: object) -> str:
    """Return the name by which other processes import a module: that of its file, where it is a script."""
    if module not in _SCRIPTS:
        return str(module)
    spec = getattr(sys.modules[str(module)], "__spec__", None)
    if spec is not None:  # python -m
        return str(spec.name.removesuffix(".__main__"))
    file = getattr(sys.modules[str(module)], "__file__", None) or str(module)
    return file.rpartition("/")[2].removesuffix(".py")


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


def _source(name: str) -> bytes:
    """Return the source of a module, which need not be imported."""
    scripts = (each for each in _SCRIPTS if each in sys.modules and module_name(each) == name)
    module: Any = sys.modules.get(name) or sys.modules.get(next(scripts, ""))
    if module is None:
        spec: Any = find_spec(name)
        return bytes(spec.loader.get_data(spec.origin))
    return bytes(module.__loader__.get_data(module.__file__))


def own_source(function: types.FunctionType) -> dict[str, Any]:
    """Return what a function without a file is made of, by place: its code, and the variables that it reads.

    Functions and classes of its module that it reads by name count as it does.
    """
    variables = function.__globals__
    found: dict[str, Any] = {}
    waiting: list[Any] = [] if "__file__" in variables else [function]
    while waiting:
        each = waiting.pop()
        if isinstance(each, type):
            waiting += vars(each).values()
        waiting += filter(None, (getattr(each, at, None) for at in ("__wrapped__", "fget")))
        if not isinstance(each, types.FunctionType):
            continue
        place = (
            f"code of {each.__qualname__}: {each.__code__.co_qualname}"  # that of a wrapper differs
        )
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
