"""Checks of the public API's arguments, made once where a call enters. Imports neither JAX nor NumPy.

Each function takes the name of an argument and its value, and returns the value in the Python type that the
code behind it computes with. For a wrong value it raises UsageError and nothing else. The message names the
argument, what was expected and what was found.
"""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from numbers import Real
from typing import Any, NoReturn, TypeVar

from prejit.runtime.errors import UsageError, printable

_T = TypeVar("_T")

_SHOWN_CHARACTERS = 80
_LARGEST_INTEGER = 2**63 - 1
_LARGEST_FLOAT32 = (2 - 2**-23) * 2.0**127
_TEXT_LIKE = (str, bytes, bytearray, memoryview, Mapping)
"""Iterable types that are not accepted as lists."""


def refuse(name: str, expected: str, value: object) -> NoReturn:
    """Raise the UsageError for a wrong argument: `name: expected EXPECTED, found VALUE`."""
    raise UsageError(f"{name}: expected {expected}, found {described(value)}")


def described(value: object) -> str:
    """Return a value's repr in one short line, or its type where it has no usable repr."""
    try:
        if isinstance(value, str | bytes):
            value = value[:_SHOWN_CHARACTERS]
        dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", ())
        if dtype is not None and shape:
            text = f"{dtype}{list(shape)}"
        elif isinstance(value, Collection) and len(value) > _SHOWN_CHARACTERS:
            text = f"{type(value).__name__} of {len(value)}"
        else:
            text = repr(value)
    except (
        Exception
    ):  # the value's own code may raise anything; so does an integer of 10,000 digits
        text = f"a value of type {type(value).__name__}"
    text = " ".join(printable(text).split())
    if len(text) > _SHOWN_CHARACTERS:
        text = f"{text[: _SHOWN_CHARACTERS - 4]} ..."
    return text


def integer(name: str, value: object, least: int, most: int = _LARGEST_INTEGER) -> int:
    """Return an integer in a range, from whatever Python takes as an index except bool."""
    found = _as_integer(value)
    if found is None:
        refuse(name, "an integer", value)
    if not least <= found <= most:
        is_open = most == _LARGEST_INTEGER and found < least
        refuse(name, f"{least} or more" if is_open else f"{least} to {most}", value)
    return found


def number(name: str, value: object, expected: str, holds: Callable[[float], bool]) -> float:
    """Return a number that float32 can hold and that meets a condition (in words: `expected`), unlike NaN."""
    if not isinstance(value, Real) or isinstance(value, bool):
        refuse(name, f"a number, {expected}", value)
    try:
        found = float(value)
    except Exception:  # an integer beyond float's range
        refuse(name, expected, value)
    if holds(found) and abs(found) > _LARGEST_FLOAT32 and found != float("-inf"):
        refuse(name, f"{expected}, and at most {_LARGEST_FLOAT32:.3g}", value)
    if not holds(found):
        refuse(name, expected, value)
    return found


def flag(name: str, value: object) -> bool:
    """Return a bool from a bool of Python or NumPy."""
    if not isinstance(value, bool) and type(value).__name__ not in ("bool_", "bool"):
        refuse(name, "True or False", value)
    return bool(value)


def choice(name: str, value: object, choices: Sequence[str]) -> str:
    """Return one of several words."""
    if not isinstance(value, str) or value not in choices:
        refuse(name, " or ".join(map(repr, choices)), value)
    return value


def text(name: str, value: object) -> str:
    """Return a text."""
    if not isinstance(value, str):
        refuse(name, "text", value)
    return value


def function(name: str, value: object) -> Callable[..., Any] | None:
    """Return a callable, or None."""
    if value is not None and not callable(value):
        refuse(name, "a function or None", value)
    return value


def classes(name: str, value: object) -> dict[str, type[Any]]:
    """Return classes by `module:Name`, from a list of them or a mapping of names."""
    wanted = "classes, or a dict of them by the names that they had at build time"
    if isinstance(value, Mapping):
        named = dict(value)
    elif isinstance(value, Iterable) and not isinstance(value, str):
        listed = list(value)
        if not all(isinstance(each, type) for each in listed):
            refuse(name, wanted, value)
        named = {f"{each.__module__}:{each.__qualname__}": each for each in listed}
    else:
        refuse(name, wanted, value)
    if not all(isinstance(key, str) and isinstance(each, type) for key, each in named.items()):
        refuse(name, wanted, value)
    return named


def instance(name: str, value: object, kind: type[_T]) -> _T:
    """Return an object of one of our own classes."""
    if not isinstance(value, kind):
        refuse(name, f"a {kind.__name__}", value)
    return value


def path(name: str, value: object) -> str | os.PathLike[str]:
    """Return the path of a file or directory."""
    if not isinstance(value, str | os.PathLike):
        refuse(name, "a path", value)
    try:
        found = os.fspath(value)
    except Exception:  # __fspath__ may raise anything
        refuse(name, "a path", value)
    if not isinstance(found, str) or "\0" in found:
        refuse(name, "a path without a null character", value)
    return value


def items(name: str, value: object, expected: str, *, sets: bool = False) -> list[Any]:
    """Return the items of a list, tuple, array, and a set if allowed; no text, mapping or iterator."""
    kinds = (Sequence, Set) if sets else (Sequence,)
    if isinstance(value, _TEXT_LIKE) or not (
        isinstance(value, kinds) or hasattr(value, "__array__")
    ):
        refuse(name, expected, value)
    try:
        return list(value)  # type: ignore[call-overload, no-any-return]
    except Exception:  # an array without dimensions, or an object with a wrong __array__
        refuse(name, expected, value)


def integers(
    name: str, value: object, expected: str = "a list of integers", *, sets: bool = False
) -> list[int]:
    """Return integers, from a list, tuple, range or an array with one dimension; from a set as `items`."""
    if hasattr(value, "__array__") and not isinstance(value, _TEXT_LIKE):
        import numpy as np

        try:
            array = np.asarray(value)
        except Exception:  # a deleted buffer, or an object with a wrong __array__
            refuse(name, expected, value)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            refuse(name, expected, value)
        return [int(each) for each in array.tolist()]
    found = items(name, value, expected, sets=sets)
    if {*map(type, found)} <= {int}:  # in C: a prompt may have 100,000 tokens
        return found
    converted = []
    for place, each in enumerate(found):
        if (one := _as_integer(each)) is None:
            refuse(f"{name}[{place}]", "an integer", each)
        converted.append(one)
    return converted


def check_vocabulary(name: str, ids: Collection[int], vocab_size: int) -> None:
    """Check that token ids are from 0 to `vocab_size` - 1."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        wrong = next(each for each in ids if not 0 <= each < vocab_size)
        refuse(name, f"token ids of 0 to {vocab_size - 1}", wrong)


def prompt(name: str, value: object, vocab_size: int) -> str | list[int]:
    """Return a text, or a list of at least one token id from 0 to `vocab_size` - 1."""
    if isinstance(value, str):
        return value
    found = integers(name, value, "text or a list of token ids")
    if not found:
        raise UsageError(f"{name}: expected at least one token, found none")
    check_vocabulary(name, found, vocab_size)
    return found


def strings(name: str, value: object) -> tuple[str, ...]:
    """Return strings of at least one character, from one or from a list of them."""
    expected = "text or a list of texts"
    found = [value] if isinstance(value, str) else items(name, value, expected, sets=True)
    for each in found:
        if not isinstance(each, str) or not each:
            refuse(name, "strings of at least one character", each)
    return tuple(found)


class CheckedPairs(tuple[tuple[int, float], ...]):
    """Pairs of a logit bias that `pairs` has checked: it does not go through them again."""

    __slots__ = ()


def pairs(name: str, value: object) -> CheckedPairs:
    """Return a logit bias as pairs of token id and number, sorted by token id; each id occurs once.

    It is given as a mapping, or as such pairs. A number is finite, or -inf, which forbids its token.
    """
    if isinstance(value, CheckedPairs):
        return value
    expected = "a mapping of token ids to numbers"
    try:
        given = value.items() if isinstance(value, Mapping) else items(name, value, expected)
        found = [(token, bias) for token, bias in given]
    except UsageError:
        raise
    except Exception:  # items that are not pairs, or a mapping that raises
        refuse(name, expected, value)
    checked: dict[int, float] = {}
    for token, bias in found:
        one = _as_integer(token)
        if one is None or one < 0:
            refuse(name, "token ids of 0 or more", token)
        if one in checked:
            refuse(name, "each token id once", value)
        checked[one] = number(f"{name} of token {one}", bias, "finite or -inf", lambda x: x == x)
    return CheckedPairs(sorted(checked.items()))


def _as_integer(value: object) -> int | None:
    """Return an integer; None: the value is a bool, or not an integer."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except Exception:  # not an integer, or __index__ raised
        return None


def callers_level() -> int:
    """Return the stack level, as the function that calls this one sees it, of the code that called prejit."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith("prejit."):
        level, frame = level + 1, frame.f_back
    return level
