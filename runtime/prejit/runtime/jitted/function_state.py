"""The state of a function itself, which a trace reads as constants: closure, defaults, a method's object."""

from __future__ import annotations

import functools
import json
import types
from collections.abc import Callable, Iterable
from typing import Any

from prejit.runtime.format import constants
from prejit.runtime.format.bundle_schema import ProgramEntry
from prejit.runtime.format.constants import Constant
from prejit.runtime.jitted.jit_call import Parameters


def function_state(function: Callable[..., Any], bound: Iterable[str]) -> dict[str, Constant]:
    """Return the values that a function holds, by where: `self`, `closure rate`, `default rate`.

    Defaults of the parameters `bound`, which a program takes or has as static values, do not count. A plain
    function of a module has no state.
    """
    defaults = Parameters(function, static=(None, None), donated=(None, None)).defaults
    found = {f"default {name}": value for name, value in defaults.items() if name not in bound}
    while not isinstance(function, types.FunctionType):
        if isinstance(function, functools.partial):
            more = {key: each for key, each in function.keywords.items() if key not in defaults}
            given = (*enumerate(function.args), *more.items())
            found |= {f"partial {key}": each for key, each in given}
            function = function.func
        elif isinstance(function, types.MethodType):
            found["self"] = function.__self__
            function = function.__func__
        elif hasattr(function, "lower") and hasattr(function, "__wrapped__"):  # of jax.jit
            function = function.__wrapped__
        else:
            found["object"] = function
            break
    else:
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        found |= {f"closure {n}": c.cell_contents for n, c in cells if c != types.CellType()}
        if not defaults:  # of a wrapper, whose signature is that of the function inside
            own = {"defaults": function.__defaults__, "keywords": function.__kwdefaults__}
            found |= {name: value for name, value in own.items() if value}
    return {name: constants.encode(value) for name, value in found.items()}


def state_misfit(program: ProgramEntry, function: Callable[..., Any], bound: Iterable[str]) -> str:
    """Return which state of a function is not that of a program's build; empty: none."""
    if program.state is None:
        return ""
    found = function_state(function, {*bound, *(program.static or ())})
    built = {name: constants.parse(json.loads(text)) for name, text in program.state.items()}
    for name in {**built, **found}:
        if name in built and name in found and constants.same(built[name], found[name]):
            continue
        sides = [constants.shown(side[name]) if name in side else "none" for side in (built, found)]
        unknown = [getattr(side.get(name), "is_unknown", False) for side in (built, found)]
        why = ", which no other process can compare" * any(unknown)
        return f"{program.name}: {name}: expected {sides[0]}, found {sides[1]}{why}"
    return ""
