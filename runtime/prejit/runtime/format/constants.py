"""Constants inside of pytrees: what is no array, such as static fields of dataclasses, as text to compare.

A constant is JSON. Text, integers, true, false and null stand for themselves, all else is a list:

    ["float","0x1.8000000000000p+0"]    ["complex",REAL,IMAGINARY]    ["bytes","00ff"]
    ["tuple",[VALUE,...]]    ["list",[VALUE,...]]    ["set",[VALUE,...]]    ["frozenset",[VALUE,...]]
    ["dict",[[VALUE,VALUE],...]]
    ["enum","module:Class","MEMBER"]
    ["name","module:name"]              a function or class that a module has by this name
    ["digest","module:name",DIGEST]     another object of a class, or a function: digest of what it is made of
    ["unknown","module:name"]           an object that only its own process can compare
    ["argument",VALUE]                  in results: the object that VALUE stands for in the arguments
"""

from __future__ import annotations

import dataclasses
import dis
import enum
import json
import re
import sys
import types
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from threading import get_ident
from typing import Any
from weakref import WeakKeyDictionary

from prejit.runtime.base.files import digest_of

_NAME = re.compile(r"[\w.<>]{1,512}:[\w.<>]{1,512}")
_MAX_CHARACTERS = 4096
"""Maximum length of the text of a constant. A longer one becomes a digest."""
_MAX_OBJECTS = 100_000
"""Maximum number of objects that a constant is made of; one of more is unknown."""
_functions: WeakKeyDictionary[types.FunctionType, list[Any]] = WeakKeyDictionary()
"""The digests of functions that constants are. A call may change the values that a function closes over, and
it stays the same function for jax."""
_READS = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
"""Instructions that read a global by name."""
_OF_CODE = (
    *("co_qualname", "co_code", "co_consts", "co_names", "co_varnames", "co_freevars"),
    *("co_cellvars", "co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_flags"),
    "co_exceptiontable",
)
"""Attributes of code that decide what it does. The others tell where it was written."""
_BASE_LIBRARIES = {*sys.stdlib_module_names, "jax", "jaxlib", "numpy", "ml_dtypes"}
"""Packages whose classes give pickle all that counts, and whose functions read no globals that do."""
_OF_PYTHON = {each: f"types:{name}" for name, each in vars(types).items() if isinstance(each, type)}
"""Names of the classes of None and the like, which builtins does not have."""
_OF_OPTAX = "optax.schedules._schedule:cosine_decay_schedule.<locals>.schedule"
"""A function that computes with floats. Its first call makes an int that it closes over one."""
_CONTAINERS: dict[str, Any] = {each.__name__: each for each in (tuple, list, set, frozenset)}
_asked: set[tuple[int, int]] = set()
"""Each is a thread, and an object whose cached properties it computes again."""


@dataclass(slots=True)
class _Walk:
    """A walk through all that a constant is made of.

    Attributes:
        visits: the number of objects so far.
        has_cycle: whether one of them is a part of itself.
        depth: the number of objects around the next one that jax compares by identity: it traces a new one of
            them anew, with the functions in it as they are by then.
        functions, outer: the digests of functions so far, and those of them at depth 0.
    """

    visits: int = 0
    has_cycle: bool = False
    depth: int = 0
    functions: dict[types.FunctionType, list[Any]] = field(default_factory=dict)
    outer: dict[types.FunctionType, list[Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EncodedConstant:
    """A constant that JSON has no value for, as text."""

    text: str

    def __str__(self) -> str:
        match json.loads(self.text):
            case ["digest", name, digest]:
                return f"{name} ({digest[7:15]})"
            case ["unknown", name]:
                return str(name)
            case ["argument", value]:
                return str(EncodedConstant(dumps(value)))
        try:
            text = repr(decode(self))
        except LookupError:
            text = self.text
        return text if len(text) <= 80 else f"{text[:76]} ..."

    @property
    def is_unknown(self) -> bool:
        """True if a part of it can be compared in its own process alone."""
        return '["unknown",' in self.text


Constant = str | int | bool | None | EncodedConstant


def encode(value: object) -> Constant:
    """Return any object as a constant. Equal constants have equal text, in every process."""
    if value is None or type(value) in (str, int, bool, EncodedConstant):
        kept: Constant = value  # type: ignore[assignment]
        return kept
    return described(value)


def described(value: object) -> EncodedConstant:
    """Return any object as JSON, also one that JSON has a value for."""
    walk = _Walk()
    try:
        text = dumps(found := _plain(value, (), walk))
        is_long = len(text) > _MAX_CHARACTERS or '["cycle",' in text  # a list in itself has no end
        if is_long and not EncodedConstant(text).is_unknown:
            text = dumps(_digest(type(value), [found]))
    except Exception:  # whatever the code of an object raises that describes it
        return EncodedConstant(dumps(["unknown", _name_of(type(value))]))
    if not walk.has_cycle:  # or the digest of a function depends on where the walk began
        for function, digest in walk.outer.items():
            _functions.setdefault(function, digest)
    return EncodedConstant(text)


def forget_functions() -> None:
    """Look at functions anew: jax traces them again, with what they close over by then."""
    _functions.clear()


def of_argument(constant: EncodedConstant) -> EncodedConstant:
    """Return what stands in results for a constant of the arguments."""
    return EncodedConstant(dumps(["argument", json.loads(constant.text)]))


def same(one: Constant, other: Constant) -> bool:
    """Return whether two constants are equal for sure. True is not 1."""
    is_unknown = isinstance(one, EncodedConstant) and one.is_unknown
    return type(one) is type(other) and one == other and not is_unknown


def shown(constant: Constant) -> str:
    """Return a constant for a message."""
    return str(constant) if isinstance(constant, EncodedConstant) else repr(constant)


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
    return EncodedConstant(dumps(plain))


def dumps(plain: Any) -> str:
    """Return the only text of a tree or a constant."""
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
        case ["argument", value]:
            return _is_valid(value)
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
    return ["digest", _name_of(of), digest_of(dumps(parts).encode())]


def _plain(value: Any, inside: tuple[int, ...], walk: _Walk) -> Any:
    """Return an object as JSON; `inside`: the identities of the objects that it is a part of.

    It raises anything where the object has too many parts, or the code of one raises.
    """
    walk.visits += 1
    if walk.visits > _MAX_OBJECTS:
        raise ValueError("too many parts")
    if id(value) in inside:
        walk.has_cycle = True
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
        return [kind.__name__, [_plain(each, inside, walk) for each in value]]
    if kind in (set, frozenset):
        return [kind.__name__, sorted((_plain(each, inside, walk) for each in value), key=dumps)]
    if kind is dict:
        return ["dict", [[_plain(each, inside, walk) for each in pair] for pair in value.items()]]
    if isinstance(value, enum.Enum) and imported(_name_of(kind)) is kind and value.name:
        return ["enum", _name_of(kind), value.name]
    if isinstance(value, type) and value in _OF_PYTHON:
        return ["name", _OF_PYTHON[value]]
    if hasattr(value, "__qualname__") and imported(_name_of(value)) is value:
        return ["name", _name_of(value)]
    if isinstance(value, types.FunctionType):
        known = walk.functions.get(value) if walk.depth else _functions.get(value)
        if known is not None:
            return known
    is_by_value = isinstance(value, tuple) or _is_by_fields(value)
    walk.depth += not is_by_value
    parts = [_plain(part, inside, walk) for part in _parts(value)]
    walk.depth -= not is_by_value
    if '["unknown",' in dumps(parts):
        return ["unknown", _name_of(kind)]
    if not isinstance(value, types.FunctionType):
        return _digest(kind, parts)
    walk.functions[value] = found = _digest(value, parts)
    if not walk.depth:
        walk.outer[value] = found
    return found


def _parts(value: Any) -> list[Any]:
    """Return what an object is made of. It raises anything where it does not tell, as pickle would find."""
    kind = type(value)
    if isinstance(value, types.FunctionType):
        held = value.__closure__ or ()
        cells = [[] if cell == types.CellType() else [cell.cell_contents] for cell in held]
        if _name_of(value) == _OF_OPTAX:
            cells = [[float(v) if isinstance(v, int) else v for v in cell] for cell in cells]
        known, code, kept = value.__globals__, value.__code__, value.__dict__
        names, attributes = _globals_of(code)
        is_read = not is_base(known.get("__name__"))
        read = _read(known, names & known.keys(), attributes) if is_read else []
        return [code, value.__defaults__, value.__kwdefaults__, kept, read, *cells]
    if isinstance(value, types.CodeType):
        return [getattr(value, name) for name in _OF_CODE]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, types.ModuleType):
        return [value.__name__]
    if isinstance(value, type):
        raise TypeError("a class without a name")
    if _is_by_fields(value):
        fields = {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}
        if all(base.__module__ != "flax.linen.module" for base in kind.__mro__):
            fields |= _attributes(value)  # flax.linen gives each module an id
        return [kind, sorted(fields.items())]
    match kind.__name__ if is_base(kind.__module__) else f"{kind.__module__}.{kind.__name__}":
        case "PyTreeDef":
            return [value.node_data(), value.children()]
        case "Device":
            return [value.platform, value.id]
        case "PjitFunction":  # the rest of it is what it compiled
            state = value.__getstate__()
            options = ("static_argnums", "static_argnames", "global_cache_key")
            return [value.__wrapped__, *(state[name] for name in options)]
        case "ndarray" | "ArrayImpl" if not value.dtype.hasobject:
            content = memoryview(value.__array__().ravel().view("uint8"))
            weak = getattr(value, "weak_type", False)
            return [str(value.dtype), value.shape, weak, digest_of(content)]
        case "ReferenceType":  # a weak one; numpyro's transforms hold them
            return [value()]
        case "flax.nnx.tracers.TraceState":  # where an object was made
            return []
    reduced = value.__reduce_ex__(4)
    if isinstance(reduced, str):
        if imported(f"{getattr(value, '__module__', kind.__module__)}:{reduced}") is not value:
            raise TypeError("an object without a name")
        return [kind, reduced]
    found = [*reduced]
    if not is_base(kind.__module__):  # a class's own __reduce__ may hide attributes
        at = 2 if _reduces(kind) == _reduces(object) else len(found)
        found[at : at + 1] = [_attributes(value)]
    return [list(part) if hasattr(part, "__next__") else part for part in found]


def is_base(module: object) -> bool:
    """Return whether a module is Python's or jax's: its functions read no variables that count."""
    return str(module).partition(".")[0] in _BASE_LIBRARIES


def _read(known: dict[str, Any], names: frozenset[str], attributes: frozenset[str]) -> list[Any]:
    """Return variables of a module, and attributes of modules among them, that code may read."""
    found: list[Any] = []
    for name in sorted(names):
        found.append([name, value := known[name]])
        if isinstance(value, types.ModuleType) and not is_base(value.__name__):
            more = attributes - {name}
            found += _read(vars(value), more & vars(value).keys(), more)
    return found


@lru_cache
def _globals_of(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of globals that code and the functions inside of it read, and all its names."""
    read = {each.argval for each in dis.get_instructions(code) if each.opname in _READS}
    inner = [_globals_of(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    names = frozenset(code.co_names)
    for globals_, more in inner:
        read, names = read | globals_, names | more
    return frozenset(read), names


def names_of(code: types.CodeType) -> frozenset[str]:
    """Return all names of globals and attributes in code and in the functions inside of it."""
    return _globals_of(code)[1]


def _is_by_fields(value: Any) -> bool:
    """Return whether an object is equal to others with equal fields: `dataclass` made its `__eq__`."""
    code = getattr(type(value).__eq__, "__code__", None)
    return dataclasses.is_dataclass(value) and getattr(code, "co_filename", "") == "<string>"


def _reduces(kind: type[Any]) -> list[Any]:
    """Return the methods by which a class tells pickle what an object is made of."""
    return [getattr(kind, name, None) for name in ("__reduce_ex__", "__reduce__", "__getstate__")]


def _attributes(value: Any) -> dict[str, Any]:
    """Return all attributes of an object itself: a class may hide some of them from pickle."""
    found = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        for name, each in vars(kind).items():
            if isinstance(each, types.MemberDescriptorType) and hasattr(value, name):
                found[name] = each.__get__(value)
    kind, kept = type(value), dict(found)
    cached = [n for n in found if isinstance(getattr(kind, n, None), cached_property)]
    if not cached or (asked := (get_ident(), id(value))) in _asked:  # part of its own value
        return {name: each for name, each in found.items() if name not in cached}
    _asked.add(asked)
    try:
        for name in cached:  # what the object would compute again counts as not asked for yet
            if same(encode(found[name]), encode(getattr(kind, name).func(value))):
                del kept[name]
    finally:
        _asked.remove(asked)
    return kept
