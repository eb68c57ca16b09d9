"""The application's code and the globals that it reads: a program is for those of its build."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable
from typing import Any

from prejit.runtime.base.files import digest_of
from prejit.runtime.format import constants
from prejit.runtime.format.constants import Constant, EncodedConstant
from prejit.runtime.recorded.hook.plain_texts import attributes_of, is_of_program

_PYTHON = f" in {sys.implementation.cache_tag}{'-O' * sys.flags.optimize}"
"""End of places of code. Each Python compiles code otherwise, which may read globals in other places."""
_CODE, _GLOBAL = "code of ", "global "
_WRAPPED = ("__wrapped__", "__func__", "__self__", "func", "args", "keywords", "fget")
"""Attributes of partials, methods, properties and what jax.jit makes of a function."""
_MAX_OBJECTS = 100_000


def code_state(roots: Iterable[object]) -> dict[str, Constant]:
    """Return the code of the application's functions, by module, and the globals that it reads.

    It begins with `roots` and goes on with all that their code names and that they hold. Libraries belong to
    the environment and are left out; so are values that only their own process can compare. Of more than
    `_MAX_OBJECTS` nothing is returned.
    """
    code: dict[str, set[str]] = {}
    values: dict[str, Any] = {}
    owners: list[tuple[str, dict[str, Any]]] = []  # modules and classes
    names: set[str] = set()  # in the code so far: attributes of owners may be among them
    seen: dict[int, object] = {}  # with the objects, or another one could get the identity
    waiting = [*roots]
    while waiting:
        value = waiting.pop()
        if id(value) not in seen:
            seen[id(value)] = value
            waiting += _held(value)
            if isinstance(value, types.FunctionType) and is_of_program(value.__module__):
                module = constants.module_name(value.__module__)
                code.setdefault(module, set()).add(
                    str(constants.plain(constants.encode(value.__code__)))
                )
                read, more = constants.globals_of(value.__code__)
                names |= more
                known = {n: value.__globals__[n] for n in read & value.__globals__.keys()}
                values |= {f"{module}.{name}": each for name, each in known.items()}
                waiting += known.values()
            elif isinstance(value, types.ModuleType) and is_of_program(value.__name__):
                owners.append((constants.module_name(value.__name__), dict(vars(value))))
            elif isinstance(value, type) and is_of_program(value.__module__):
                owners.append((constants.name_of(value).replace(":", "."), dict(vars(value))))
        if len(seen) > _MAX_OBJECTS:
            return {}
        if not waiting:
            read_too = {
                f"{at}.{n}": v for at, known in owners for n, v in known.items() if n in names
            }
            waiting += [each for place, each in read_too.items() if place not in values]
            values = read_too | values
    found: dict[str, Constant] = {}
    for module, texts in code.items():
        digest = ["digest", f"{module}:code", digest_of("".join(sorted(texts)).encode())]
        found[f"{_CODE}{module}{_PYTHON}"] = EncodedConstant(constants.dumps(digest))
    for place, value in values.items():
        constant = constants.encode(value)
        own = isinstance(value, types.ModuleType) or type(value).__module__.startswith("prejit.")
        if not own and not getattr(constant, "is_unknown", False):
            found[f"{_GLOBAL}{place}{_PYTHON}"] = constant
    return found


def compared(built: Iterable[str], found: Iterable[str]) -> list[str]:
    """Return the places to compare: those of code and globals only if this Python's are in the build."""
    ours = any(place.endswith(_PYTHON) for place in built)
    places = dict.fromkeys((*built, *found))
    return [
        p for p in places if not p.startswith((_CODE, _GLOBAL)) or (ours and p.endswith(_PYTHON))
    ]


def code_place(place: str) -> str:
    """Return the module whose code has a place; empty: it is another place."""
    return place.removeprefix(_CODE).removesuffix(_PYTHON) if place.startswith(_CODE) else ""


def _held(value: Any) -> list[Any]:
    """Return what an object is made of: functions, classes and modules may be among it."""
    kind = type(value)
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return [*cells, *defaults, *vars(value).values()]
    if isinstance(value, type):
        if not is_of_program(value.__module__):
            return []
        known = [*vars(value).values()]
        return [*value.__bases__, *(v for v in known if callable(v) or hasattr(v, "__get__"))]
    if isinstance(value, types.ModuleType) or kind in (type(None), str, int, float, bool, bytes):
        return []
    if isinstance(value, dict):
        return [kind, *value.values()]
    if isinstance(value, (tuple, list, set, frozenset)):
        return [kind, *value]
    told = constants.is_told(kind.__module__) or kind.__module__.startswith("prejit.")
    wrapped = [getattr(value, name) for name in _WRAPPED if told and hasattr(value, name)]
    return [kind, *wrapped, *([] if told else attributes_of(value).values())]
