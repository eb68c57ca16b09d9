"""A call of a jitted function: its arguments, as jax.jit tells them apart, and what the function depends on.

A build lists the sources of a function in the state of a program: `module NAME` with a digest, `package NAME`
with a version. A call looks at each of them again. A function without a file, as of a notebook, is compared
by its code.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module, metadata
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any, final

from prejit.runtime.base.files import digest_of
from prejit.runtime.format import constants
from prejit.runtime.format.bundle_schema import ProgramEntry
from prejit.runtime.format.constants import Constant
from prejit.runtime.recorded.hook.plain_functions import is_plain

Chosen = tuple[int | Sequence[int] | None, str | Sequence[str] | None]
"""The places and the names of parameters, such as static_argnums and static_argnames of jax.jit."""
_BY_PLACE = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_PLACE = "place in its file"
"""The place, in what a function holds, of where its source is: two of a module may have one name."""
_JITTED = ("PjitFunction", "_Interpreted")  # of jax.jit, and of `jit`
_ANY = Signature(
    [Parameter("args", Parameter.VAR_POSITIONAL), Parameter("kwargs", Parameter.VAR_KEYWORD)]
)
MODULE, PACKAGE = "module ", "package "
"""The beginnings of places: of a module, and of a distribution."""
SCRIPTS = ("__main__", "__mp_main__")  # the second one is what multiprocessing calls it


@dataclass(frozen=True, slots=True)
class JittedCall:
    """The arguments of one call.

    Attributes:
        arrays: the arguments that are not static, by name, in the order of the parameters.
        placed: names of the first of them, up to the first one that a program with arguments by position
            could not take: it is static, keyword-only or left out.
        nameable: whether all of them can be passed by name.
        static: values of static arguments, by name.
        donated: names of the arguments that the caller gives up.
        order: names in the order in which jax flattens this call.
    """

    arrays: Mapping[str, Any]
    placed: tuple[str, ...]
    nameable: bool
    static: Mapping[str, Any]
    donated: frozenset[str]
    order: tuple[str, ...]

    def by_place(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the same call with all arrays by position."""
        return tuple(self.arrays.values()), dict(self.static)

    def by_name(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the same call with all arguments by name."""
        return (), {**self.arrays, **self.static}


@final
class Parameters:
    """The parameters of a function: which ones are static and which are donated.

    Attributes:
        defaults: default values by name.
    """

    def __init__(self, function: Callable[..., Any], *, static: Chosen, donated: Chosen) -> None:
        """Read the function's signature.

        A wrapper, such as of jax.vmap, may treat an argument by name otherwise than the same by position. Its
        calls are bound as they are written. A function without a signature takes any arguments.
        """
        try:
            self._signature = inspect.signature(function)
        except (TypeError, ValueError):
            self._signature = _ANY
        parameters = self._signature.parameters
        self._names = [name for name, each in parameters.items() if each.kind in _BY_PLACE]
        self._static = self._completed(*static)
        self._donated = self._completed(*donated)
        if not is_plain(function):
            self._signature, self._names, parameters = _ANY, [], _ANY.parameters
        self.defaults = {
            name: each.default
            for name, each in parameters.items()
            if each.default is not Parameter.empty
        }

    def _completed(self, places: Any, names: Any) -> tuple[frozenset[int], frozenset[str]]:
        """Return places and names as jax completes them: from the others, unless both are given.

        A place chooses arguments by position, and a name those by name.
        """
        by_place = frozenset((places,) if isinstance(places, int) else places or ())
        by_name = frozenset((names,) if isinstance(names, str) else names or ())
        both = [
            (place, name)
            for place, (name, each) in enumerate(self._signature.parameters.items())
            if each.kind is Parameter.POSITIONAL_OR_KEYWORD
        ]
        if places is None:
            by_place = frozenset(place for place, name in both if name in by_name)
        elif names is None:
            by_name = frozenset(name for place, name in both if place in by_place)
        if min(by_place, default=0) < 0:
            import jax

            if jax.__version_info__ >= (0, 12):
                return self._from_the_end(by_place, by_name if names is not None else None)
        return by_place, by_name

    def _from_the_end(
        self, places: frozenset[int], names: frozenset[str] | None
    ) -> tuple[frozenset[int], frozenset[str]]:
        """Return places below 0 as those of parameters, as jax counts them from 0.12 on, and their names.

        jax 0.10 and 0.11 count static ones from the last argument of a call, and donate none of them.
        """
        parameters = self._signature.parameters
        if names is None:  # jax counts these from the last parameter of any kind
            names = frozenset(
                name
                for place, (name, each) in enumerate(parameters.items())
                if each.kind is Parameter.POSITIONAL_OR_KEYWORD
                and not places.isdisjoint((place, place - len(parameters)))
            )
        count = len(self._names)
        if count and Parameter.VAR_POSITIONAL not in {each.kind for each in parameters.values()}:
            places = frozenset(place % count if place < 0 else place for place in places)
        return places, names

    def named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return all arguments by name, of a call of which `bind` said that they are nameable."""
        return {**dict(zip(self._names, args, strict=False)), **kwargs}

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> JittedCall:
        """Return a call by its parameters.

        Raises:
            TypeError: the function does not take these arguments.
        """
        bound = self._signature.bind(*args, **kwargs).arguments
        more = (_item(place) for place in range(max(0, len(args) - len(self._names))))
        first = [*self._names[: len(args)], *more]
        if both := {*first} & kwargs.keys():  # a positional-only parameter, and a key of **kwargs
            raise TypeError(f"expected one argument of each name, found two of {min(both)!r}")
        places, names = self._static
        if min(places, default=0) < -len(args):
            raise TypeError(f"expected {-min(places)} arguments by position, found {len(args)}")
        is_static = {
            *(first[place] for place in places if place < len(first)),
            *(names & kwargs.keys()),
        }
        arrays: dict[str, Any] = {}
        static: dict[str, Any] = {}
        placed: list[str] = []
        nameable, unbroken = True, True
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is Parameter.VAR_KEYWORD:
                given = bound.get(name, {})
                static |= {key: given[key] for key in given if key in is_static}
                arrays |= {key: given[key] for key in given if key not in is_static}
            elif parameter.kind is Parameter.VAR_POSITIONAL:
                items = {_item(place): each for place, each in enumerate(bound.get(name, ()))}
                static |= {key: items[key] for key in items if key in is_static}
                unbroken = unbroken and not items.keys() & is_static
                items = {key: items[key] for key in items if key not in is_static}
                arrays |= items
                placed += [*items] if unbroken else []
                nameable = nameable and not items
            elif name not in bound or name in is_static:
                unbroken = False
                if name in bound:
                    static[name] = bound[name]
            else:
                arrays[name] = bound[name]
                nameable = nameable and parameter.kind is not Parameter.POSITIONAL_ONLY
                unbroken = unbroken and parameter.kind in _BY_PLACE
                placed += [name] if unbroken else []
        order = (name for name in (*first, *sorted(kwargs)) if name in arrays)
        places, names = self._donated
        chosen = {
            *(first[place] for place in places if 0 <= place < len(first)),
            *(names & kwargs.keys()),
        }
        donated = frozenset(chosen & arrays.keys())
        return JittedCall(arrays, tuple(placed), nameable, static, donated, tuple(order))


def function_state(function: Callable[..., Any], bound: Iterable[str]) -> dict[str, Constant]:
    """Return the values that a function holds, by place: `closure rate`, `self`, `inner partial 0`.

    Defaults of the parameters `bound`, which a call or a program has, do not count.
    """
    defaults = Parameters(function, static=(None, None), donated=(None, None)).defaults
    found = {f"default {name}": value for name, value in defaults.items() if name not in bound}
    inner = ""
    while not isinstance(function, types.FunctionType):
        if isinstance(function, functools.partial):
            found |= {f"{inner}partial {place}": each for place, each in enumerate(function.args)}
            if more := {k: v for k, v in function.keywords.items() if k not in defaults}:
                found[f"{inner}partial keywords"] = more  # in order, which **kwargs shows
            function = function.func
            inner += "inner "
        elif isinstance(function, types.MethodType):
            found[f"{inner}self"] = function.__self__
            function = function.__func__
            inner += "inner "
        elif type(function).__name__ in _JITTED and hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        else:
            found["object"] = function
            break
    else:
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        found |= {f"closure {n}": c.cell_contents for n, c in cells if c != types.CellType()}
        found |= own_source(function)
        module = module_name(function.__module__, function.__globals__)
        found["function"] = f"{module}:{function.__qualname__}"
        found[_PLACE] = place_in_file(function)
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
    found |= sources(built)
    if _PLACE not in built:  # a bundle of an earlier prejit
        found.pop(_PLACE, None)
    for name in {**built, **found}:
        is_module = name.startswith(MODULE)
        if is_module and name not in found and built[name] is None:  # still not there
            continue
        if name in built and name in found and constants.same(built[name], found[name]):
            continue
        sides = [constants.shown(side[name]) if name in side else "none" for side in (built, found)]
        if is_module:
            sides = ["the source of the build", "another" if name in found else "none"]
            if built[name] is None:
                sides = ["none", "one"]
        unknown = [getattr(side.get(name), "is_unknown", False) for side in (built, found)]
        why = ", which no other process can compare" * any(unknown)
        return f"{program.name}: {name}: expected {sides[0]}, found {sides[1]}{why}"
    return ""


def _item(place: int) -> str:
    """Return a name for one of *args, which no parameter has."""
    return f"args[{place}]"


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
