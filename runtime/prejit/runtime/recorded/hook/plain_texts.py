"""Texts of Python's values that are the same in two processes whose values are equal."""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

_MAXIMUM_VALUES = 20_000
"""How many values one text looks at. What comes after them is left out, in every process alike."""
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis))


def text_of(value: Any, depth: int = 30) -> str:
    """Return a text of a value. Equal texts do not mean equal values: of what C holds it has the class alone.

    It has plain values, containers, arrays with their numbers, the attributes of objects, and functions with
    what they close over; of functions of the program itself also the globals that they name.
    """
    return _Writer().text(value, depth)


class _Writer:
    def __init__(self) -> None:
        self._left = _MAXIMUM_VALUES
        self._seen: dict[int, int] = {}

    def text(self, value: Any, depth: int) -> str:
        kind = type(value)
        if kind in _PLAIN:
            return repr(value)
        if isinstance(value, types.ModuleType):
            return value.__name__
        if isinstance(value, type):
            return self._class(value, depth)
        name = f"{kind.__module__}.{kind.__qualname__}"
        if isinstance(value, enum.Enum):
            return f"{name}.{value.name}"
        self._left -= 1
        if depth == 0 or self._left <= 0:
            return name
        if id(value) in self._seen:
            return f"#{self._seen[id(value)]}"
        self._seen[id(value)] = len(self._seen)
        if isinstance(value, (tuple, list)):
            return f"{name}[{self._all(value, depth)}]"
        if isinstance(value, dict):
            pairs = (
                f"{self.text(k, depth - 1)}: {self.text(v, depth - 1)}" for k, v in value.items()
            )
            return f"{name}{{{', '.join(pairs)}}}"
        if isinstance(value, (set, frozenset)):
            return f"{name}{{{', '.join(sorted(text_of(each, depth - 1) for each in value))}}}"
        if isinstance(value, functools.partial):
            return f"partial({self._all((value.func, value.args, value.keywords), depth)})"
        if inspect.ismethod(value):
            return f"method({self._all((value.__func__, value.__self__), depth)})"
        if inspect.isfunction(value):
            return self._function(value, depth)
        if hasattr(value, "__wrapped__"):  # of jax.jit and other wrappers
            return f"{name}({self.text(value.__wrapped__, depth - 1)})"
        if inspect.isroutine(value):
            owner = self.text(getattr(value, "__self__", None), depth - 1)
            return f"{value.__module__}.{value.__qualname__} of {owner}"
        if hasattr(value, "dtype") and hasattr(value, "shape"):
            return f"{name} {_array(value)}"
        attributes = attributes_of(value)
        held = self.text(attributes, depth - 1) if attributes else _repr_of(value)
        return f"{self._class(kind, depth)}{held}"

    def _all(self, values: Any, depth: int) -> str:
        return ", ".join(self.text(each, depth - 1) for each in values)

    def _class(self, kind: type, depth: int) -> str:
        name = f"{kind.__module__}.{kind.__qualname__}"
        if depth == 0 or id(kind) in self._seen or not is_of_program(kind.__module__):
            return name
        self._seen[id(kind)] = len(self._seen)
        held = {
            key: each
            for key, each in vars(kind).items()
            if not key.startswith("__") or key == "__call__"
        }
        return f"{name}({self.text(held, depth - 1)})" if held else name

    def _function(self, function: types.FunctionType, depth: int) -> str:
        held = [function.__defaults__, function.__kwdefaults__]
        for cell in function.__closure__ or ():
            try:
                held.append(cell.cell_contents)
            except ValueError:  # a function that is not defined yet
                held.append(None)
        code = function.__code__
        place = f"{function.__module__}.{function.__qualname__}:{code.co_firstlineno}"
        if not code.co_filename.startswith(_LIBRARY) and "site-packages" not in code.co_filename:
            place += f" {_code_digest(code)}"
            names = dict.fromkeys(_names(code))
            found = [function.__globals__[each] for each in names if each in function.__globals__]
            held += found
            for module in filter(inspect.ismodule, found):
                held += [_of_module(module, name) for name in names]
        return f"{place}({self._all(held, depth)})" if any(x is not None for x in held) else place


@functools.lru_cache(4096)
def _code_digest(code: types.CodeType) -> str:
    constants = [each for each in code.co_consts if not isinstance(each, types.CodeType)]
    inner = [_code_digest(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    return digest_of(repr((code.co_code, code.co_names, text_of(constants), inner)))


def _of_module(module: types.ModuleType, name: str) -> Any:
    """Return what a module has by a name that a function uses: somebody may have set it.

    Of functions and classes of a library the name is enough.
    """
    found = vars(module).get(name)
    if is_of_program(module.__name__) or type(found) in _PLAIN:
        return found
    return f"{getattr(found, '__module__', '')}.{getattr(found, '__qualname__', '')}"


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _names(each)


@functools.lru_cache(4096)
def is_of_program(module: str) -> bool:
    """Return whether a module is the program's own: no installed package, nor of Python."""
    file = getattr(sys.modules.get(module), "__file__", None)
    own = module == "__main__" or (file is not None and not file.startswith(_LIBRARY))
    return own and "site-packages" not in (file or "") and not module.startswith("prejit")


_LIBRARY = inspect.__file__.removesuffix("inspect.py")


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, those in slots included."""
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    found = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    attributes = getattr(value, "__dict__", None)
    return found | attributes if isinstance(attributes, dict) else found


def _repr_of(value: Any) -> str:
    """Return a digest of the repr of an object without attributes, if it tells more than a place."""
    has_own = "__repr__" in vars(type(value))
    if not has_own or is_of_program(type(value).__module__):
        return ""
    text = repr(value)
    return "" if " at 0x" in text else digest_of(text)


def _array(value: Any) -> str:
    """Return the type of an array, and a digest of its numbers if they are at hand."""
    text = f"{value.dtype}{list(value.shape)}"
    try:
        import numpy as np

        return f"{text} {digest_of(np.asarray(value).tobytes())}"
    except Exception:  # a tracer, a deleted array, random keys, or what only looks like an array
        return text


def digest_of(content: bytes | str) -> str:
    """Return 32 hexadecimal digits that tell contents apart."""
    content = content.encode(errors="surrogatepass") if isinstance(content, str) else content
    return hashlib.blake2b(content, digest_size=16).hexdigest()
