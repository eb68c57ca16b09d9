"""A call of a jitted function: its arguments by the function's parameters, as jax.jit tells them apart."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, Signature
from typing import Any, final

from prejit.runtime.recorded.hook.plain_functions import is_plain

_BY_PLACE = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_ANY = Signature(
    [Parameter("args", Parameter.VAR_POSITIONAL), Parameter("kwargs", Parameter.VAR_KEYWORD)]
)


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
        static: names of the static ones.
        defaults: default values by name.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        static: Iterable[int | str],
        donated: Iterable[int | str],
    ) -> None:
        """Read the function's signature.

        A wrapper, such as of jax.vmap, may treat an argument by name otherwise than the same by position.
        Its calls are bound as they are written.

        Args:
            function: the function. One without a signature takes any arguments.
            static: places and names of static parameters.
            donated: places and names of donated ones.
        """
        try:
            self._signature = inspect.signature(function)
        except (TypeError, ValueError):
            self._signature = _ANY
        parameters = self._signature.parameters
        self._names = [name for name, each in parameters.items() if each.kind in _BY_PLACE]
        if not is_plain(function):
            static, donated = self._spellings(static), self._spellings(donated)
            self._signature, self._names, parameters = _ANY, [], _ANY.parameters
        self.static = frozenset(self._named(static))
        self._donated = frozenset(self._named(donated))
        self.defaults = {
            name: each.default
            for name, each in parameters.items()
            if each.default is not Parameter.empty
        }

    def _spellings(self, given: Iterable[int | str]) -> list[int | str]:
        """Return places and names of parameters, with both for each parameter that has both."""
        found: list[int | str] = []
        for each in given:
            place = self._names.index(each) if each in self._names else each
            found.append(place)
            if isinstance(place, int) and -len(self._names) <= place < len(self._names):
                found += [place % len(self._names), self._names[place]]
        return found

    def _named(self, given: Iterable[int | str]) -> Iterable[str]:
        for each in given:
            if isinstance(each, str):
                yield each
            elif -len(self._names) <= each < len(self._names):
                yield self._names[each]
            else:  # one of *args
                yield _item(each - len(self._names))

    def named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return all arguments by name, of a call of which `bind` said that they are nameable."""
        return {**dict(zip(self._names, args, strict=False)), **kwargs}

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> JittedCall:
        """Return a call by its parameters.

        Raises:
            TypeError: the function does not take these arguments.
        """
        bound = self._signature.bind(*args, **kwargs).arguments
        arrays: dict[str, Any] = {}
        static: dict[str, Any] = {}
        placed: list[str] = []
        nameable, unbroken = True, True
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is Parameter.VAR_KEYWORD:
                given = bound.get(name, {})
                static |= {key: given[key] for key in given if key in self.static}
                arrays |= {key: given[key] for key in given if key not in self.static}
            elif parameter.kind is Parameter.VAR_POSITIONAL:
                items = {_item(place): each for place, each in enumerate(bound.get(name, ()))}
                static |= {key: items[key] for key in items if key in self.static}
                unbroken = unbroken and not items.keys() & self.static
                items = {key: items[key] for key in items if key not in self.static}
                arrays |= items
                placed += [*items] if unbroken else []
                nameable = nameable and not items
            elif name not in bound or name in self.static:
                unbroken = False
                if name in bound:
                    static[name] = bound[name]
            else:
                arrays[name] = bound[name]
                nameable = nameable and parameter.kind is not Parameter.POSITIONAL_ONLY
                unbroken = unbroken and parameter.kind in _BY_PLACE
                placed += [name] if unbroken else []
        more = (_item(place) for place in range(max(0, len(args) - len(self._names))))
        first = [*self._names[: len(args)], *more]
        order = (name for name in (*first, *sorted(kwargs)) if name in arrays)
        donated = self._donated & arrays.keys()
        return JittedCall(arrays, tuple(placed), nameable, static, donated, tuple(order))


def _item(place: int) -> str:
    """Return a name for one of *args, which no parameter has."""
    return f"args[{place}]"
