"""Constants inside of pytrees: what is no array, such as static fields of dataclasses, as text to compare.

A constant is JSON. Text, integers, true, false and null stand for themselves, all else is a list:

    ["float","0x1.8000000000000p+0"]    ["complex",REAL,IMAGINARY]    ["bytes","00ff"]
    ["tuple",[VALUE,...]]    ["list",[VALUE,...]]    ["set",[VALUE,...]]    ["frozenset",[VALUE,...]]
    ["dict",[[VALUE,VALUE],...]]
    ["enum","module:Class","MEMBER"]
    ["name","module:name"]              a function or class that a module has by this name
    ["digest","module:name",DIGEST]     another object of a class, or a function: digest of what it is made of
    ["unknown","module:name"]           an object that only its own process can compare
"""

from __future__ import annotations

import dataclasses
import enum
import json
import re
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

from prejit.runtime.base.digests import digest_of

_NAME = re.compile(r"[\w.<>]{1,512}:[\w.<>]{1,512}")
_MAX_CHARACTERS = 4096
"""Maximum length of the text of a constant. A longer one becomes a digest."""
_MAX_OBJECTS = 100_000
"""Maximum number of objects that a constant is made of; one of more is unknown."""
_functions: WeakKeyDictionary[types.FunctionType, list[Any]] = WeakKeyDictionary()
"""The digests of functions. A call may change the values that a function closes over, and it stays the same
function for jax."""
_CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "list": list,
    "set": set,
    "frozenset": frozenset,
}


@dataclass(frozen=True, slots=True)
class EncodedConstant:
    """A constant that JSON has no value for.

    Attributes:
        text: its JSON.
    """

    text: str

    def __str__(self) -> str:
        match json.loads(self.text):
            case ["digest", name, digest]:
                return f"{name} ({digest[7:15]})"
            case ["unknown", name]:
                return str(name)
        try:
            text = repr(decode(self))
        except LookupError:
            text = self.text
        return text if len(text) <= 80 else f"{text[:76]} ..."

    @property
    def is_unknown(self) -> bool:
        """Whether a part of it can be compared in its own process alone."""
        return '["unknown",' in self.text


Constant = str | int | bool | None | EncodedConstant


def encode(value: object) -> Constant:
    """Return any object as a constant. Equal constants have equal text, in every process."""
    if value is None or type(value) in (str, int, bool):
        kept: Constant = value  # type: ignore[assignment]
        return kept
    return described(value)


def described(value: object) -> EncodedConstant:
    """Return any object as JSON, also one that JSON has a value for."""
    try:
        text = _dumps(found := _plain(value, (), count()))
        if len(text) > _MAX_CHARACTERS and not EncodedConstant(text).is_unknown:
            text = _dumps(_digest(type(value), [found]))
    except Exception:  # whatever the code of an object raises that describes it
        text = _dumps(["unknown", _name_of(type(value))])
    return EncodedConstant(text)


def same(one: Constant, other: Constant) -> bool:
    """Return whether two constants are equal for sure. True is not 1."""
    is_unknown = isinstance(one, EncodedConstant) and one.is_unknown
    return type(one) is type(other) and one == other and not is_unknown


def decode(constant: Constant) -> Any:
    """Return the value of a constant.

    Raises:
        LookupError: the constant does not hold it, or the application has not imported its class.
    """
    return _value(json.loads(constant.text)) if isinstance(constant, EncodedConstant) else constant


def plain(constant: Constant) -> Any:
    """Return a constant as JSON."""
    return json.loads(constant.text) if isinstance(constant, EncodedConstant) else constant


def parse(plain: Any) -> Constant:
    """Return the constant that JSON describes; the inverse of `plain`.

    Raises:
        ValueError: it has another form.
    """
    found = parse_described(plain)
    return found if isinstance(plain, list) else plain


def parse_described(plain: Any) -> EncodedConstant:
    """Return what `described` gave from its JSON. Raises ValueError as `parse`."""
    if not _is_valid(plain):
        raise ValueError(f"expected a constant, found {plain!r:.80}")
    return EncodedConstant(_dumps(plain))


def _dumps(plain: Any) -> str:
    return json.dumps(plain, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def _is_valid(plain: Any) -> bool:
    match plain:
        case None | str() | int():
            return True
        case ["float", str(text)]:
            return _is_float(text)
        case ["complex", str(real), str(imaginary)]:
            return _is_float(real) and _is_float(imaginary)
        case ["bytes", str(text)]:
            return re.fullmatch("([0-9a-f]{2})*", text) is not None
        case ["tuple" | "list" | "set" | "frozenset", list(items)]:
            return all(map(_is_valid, items))
        case ["dict", list(pairs)]:
            return all(
                isinstance(p, list) and len(p) == 2 and all(map(_is_valid, p)) for p in pairs
            )
        case ["enum", str(name), str()] | ["name" | "unknown", str(name)]:
            return _NAME.fullmatch(name) is not None
        case ["digest", str(name), str(digest)]:
            return bool(_NAME.fullmatch(name) and re.fullmatch("sha256:[0-9a-f]{64}", digest))
        case _:
            return False


def _is_float(text: str) -> bool:
    try:
        return float.fromhex(text).hex() == text
    except (ValueError, OverflowError):
        return False


def _value(plain: Any) -> Any:
    match plain:
        case ["float", text]:
            return float.fromhex(text)
        case ["complex", real, imaginary]:
            return complex(float.fromhex(real), float.fromhex(imaginary))
        case ["bytes", text]:
            return bytes.fromhex(text)
        case ["tuple" | "list" | "set" | "frozenset" as kind, items]:
            return _CONTAINERS[kind](map(_value, items))
        case ["dict", pairs]:
            return {_value(key): _value(value) for key, value in pairs}
        case ["enum", name, member]:
            found = imported(name)
            if isinstance(found, type) and issubclass(found, enum.Enum):
                return found[member]
        case ["name", name]:
            if (found := imported(name)) is not None:
                return found
        case _ if not isinstance(plain, list):
            return plain
    raise LookupError(f"no value for {plain!r:.80}")


def imported(name: str) -> Any:
    """Return what has the name `module:name` if the application has imported it, else None."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found


def _name_of(value: Any) -> str:
    """Return `module:name` of a function or class."""
    name = f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', '')}"
    return name if _NAME.fullmatch(name) else "builtins:object"


def _digest(of: Any, parts: Any) -> list[Any]:
    return ["digest", _name_of(of), digest_of(_dumps(parts).encode())]


def _plain(value: Any, inside: tuple[int, ...], visits: Iterator[int]) -> Any:
    """Return an object as JSON.

    Args:
        value: the object.
        inside: the identities of the objects that it is a part of.
        visits: counts objects.

    Raises:
        Exception: it has too many parts, or the code of one raises.
    """
    if next(visits) > _MAX_OBJECTS:
        raise ValueError("too many parts")
    if id(value) in inside:
        return ["cycle", len(inside) - inside.index(id(value))]
    inside = (*inside, id(value))
    kind = type(value)
    if value is None or kind in (str, int, bool):
        return value
    if kind is float:
        return ["float", value.hex()]
    if kind is complex:
        return ["complex", value.real.hex(), value.imag.hex()]
    if kind is bytes:
        return ["bytes", value.hex()]
    if kind in (tuple, list):
        return [kind.__name__, [_plain(each, inside, visits) for each in value]]
    if kind in (set, frozenset):
        return [kind.__name__, sorted((_plain(each, inside, visits) for each in value), key=_dumps)]
    if kind is dict:
        return ["dict", [[_plain(each, inside, visits) for each in pair] for pair in value.items()]]
    if isinstance(value, enum.Enum) and imported(_name_of(kind)) is kind and value.name:
        return ["enum", _name_of(kind), value.name]
    if hasattr(value, "__qualname__") and imported(_name_of(value)) is value:
        return ["name", _name_of(value)]
    if isinstance(value, types.FunctionType) and (known := _functions.get(value)) is not None:
        return known
    parts = [_plain(part, inside, visits) for part in _parts(value)]
    if '["unknown",' in _dumps(parts):
        return ["unknown", _name_of(kind)]
    if not isinstance(value, types.FunctionType):
        return _digest(kind, parts)
    return _functions.setdefault(value, _digest(value, parts))


def _parts(value: Any) -> list[Any]:
    """Return what an object is made of.

    Raises:
        Exception: it does not tell, as pickle would find.
    """
    kind = type(value)
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return [value.__code__, value.__defaults__, value.__kwdefaults__, *cells]
    if isinstance(value, types.CodeType):
        return [value.co_qualname, value.co_code, value.co_consts, value.co_names]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, types.ModuleType):
        return [value.__name__]
    if isinstance(value, type):
        raise TypeError("a class without a name")
    if dataclasses.is_dataclass(value):
        return [
            kind,
            {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.compare},
        ]
    if kind.__name__ == "PyTreeDef":
        return [value.node_data(), value.children()]
    reduced = value.__reduce_ex__(4)
    if isinstance(reduced, str):
        return [kind, reduced]
    return [list(part) if hasattr(part, "__next__") else part for part in reduced]
