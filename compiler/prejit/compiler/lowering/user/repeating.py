"""Repeat a function inside one program, so that many steps cost one call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
from jax import lax

from prejit.runtime.errors import ManifestError
from prejit.runtime.format.trees import candidates, how_to_name
from prejit.runtime.programs.pytree import changes_itself

Key = str | int


def repeated(
    function: Callable[..., Any], carry: Sequence[Key], times: int, where: str
) -> Callable[..., Any]:
    """Return a function that runs another one several times, each time on what it returned before.

    Args:
        function: takes arguments by position or by name, and returns the next values of those in `carry`:
            alone, or in a dict under their names, or as the only part of a dict, tuple or list that has the
            same structure, shapes and dtypes. What it returns beside them is stacked, the steps first.
        carry: names or positions of the arguments.
        times: number of steps, at least 1.
        where: the program, for errors.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        given: dict[Key, Any] = dict(enumerate(args))
        given.update(kwargs)
        values = {key: given[key] for key in carry}
        for key, value in values.items():
            if changes_itself(value):
                raise ManifestError(
                    f"{where}: repeat: expected {key!r} of classes that jax makes anew as they are, found "
                    "one whose own code changes its parts each time",
                    hint="carry its arrays, in a dict, tuple or list",
                )
        returned = jax.eval_shape(lambda: function(*args, **kwargs))
        places = _places(returned, values, given.keys(), where)

        def step(values: dict[Key, Any], _: None) -> tuple[dict[Key, Any], Any]:
            now = given | values
            by_place = [now[place] for place in range(len(args))]
            result = function(*by_place, **{name: now[name] for name in kwargs})
            following = {key: result if at is None else result[at] for key, at in places.items()}
            return following, _without(result, set(places.values()))

        last, stacked = lax.scan(step, values, length=times)
        return _together(stacked, {at: last[key] for key, at in places.items()})

    return run


def _places(
    result: Any, values: dict[Key, Any], arguments: Collection[Key], where: str
) -> dict[Key, Any]:
    """Return where the next value of each carried argument is in a result; None: it is the whole result."""
    if len(values) == 1 and _alike(result, next(iter(values.values()))):
        return dict.fromkeys(values)
    parts: dict[Any, Any] = {}
    if isinstance(result, dict):
        parts = dict(result)
    elif type(result) in (list, tuple):
        parts = dict(enumerate(result))
    found: dict[Key, Any] = {}
    for key, value in values.items():
        alike = [at for at, part in parts.items() if _alike(part, value)]
        may_be = [at for at in candidates(key, alike, arguments) if at not in found.values()]
        if not may_be:
            raise ManifestError(
                f"{where}: repeat: the function returns nothing with the structure, shapes and dtypes of "
                f"{key!r}",
                hint="return the next value of each argument that is carried, in a tuple or a dict; a weak "
                "type is part of a dtype, and .astype() makes one that is not weak",
            )
        if len(may_be) > 1:
            raise ManifestError(
                f"{where}: repeat: expected one result that can be the next {key!r}, found "
                f"{', '.join(map(repr, may_be))} with the same structure, shapes and dtypes",
                hint=how_to_name(key),
            )
        found[key] = may_be[0]
    return found


def _alike(one: Any, other: Any) -> bool:
    if jax.tree.structure(one) != jax.tree.structure(other):
        return False
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(
        jax.numpy.shape(a) == jax.numpy.shape(b)
        and jax.numpy.result_type(a) == jax.numpy.result_type(b)
        and getattr(a, "weak_type", False) == getattr(b, "weak_type", False)
        for a, b in pairs
    )


def _without(result: Any, places: set[Any]) -> Any:
    """Return a result with None at some places."""
    if None in places:
        return None
    if isinstance(result, dict):
        return {key: None if key in places else part for key, part in result.items()}
    return type(result)(None if at in places else part for at, part in enumerate(result))


def _together(stacked: Any, values: dict[Any, Any]) -> Any:
    """Return a result with values at the places where it has None."""
    if None in values:
        return values[None]
    if isinstance(stacked, dict):
        return {**stacked, **values}
    return type(stacked)(values.get(at, part) for at, part in enumerate(stacked))
