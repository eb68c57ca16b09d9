"""Texts of Python's values that are the same in two processes whose values are equal."""

from __future__ import annotations

import contextlib
import enum
import functools
import gc
import hashlib
import inspect
import logging
import os
import random
import re
import sys
import threading
import types
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np

from prejit.runtime.recorded.hook.kept_shardings import NotKeptError, sharding_json

_MAXIMUM_VALUES = 20_000
"""How many values one text looks at. What comes after them is left out, in every process alike."""
_DEPTH = 30
_MAXIMUM_LENGTH = 200
"""Characters of the text of an inner value; a longer one is a digest."""
_LEAST_PLACE = 1 << 32
_MESHES = ("jax._src.mesh.Mesh", "jax._src.mesh.AbstractMesh")
_JITTED = "jaxlib._jax.PjitFunction"
_JAXPRS = ("jax._src.core.Jaxpr", "jax._src.core.ClosedJaxpr")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis))
_BUILTIN = (tuple, list, dict, set, frozenset, int, float, complex, str, bytes)


def text_of(value: Any, *, without_libraries: bool = False) -> str:
    """Return a text of a value. Equal texts do not mean equal values: of most that C holds it has the class.

    It has plain values, containers, arrays with their numbers, the attributes of objects, and functions with
    what they close over; of functions of the program itself also the globals that they name.
    `without_libraries` leaves out numbers and arrays of the closures of other functions, such as optax's:
    they keep there what they have found out.

    Raises:
        NotKeptError: it holds an iterator of C, such as of itertools, which does not tell where it is.
    """
    writer = _Writer(without_libraries, frozenset())
    text = writer.text(value, _DEPTH)
    # `id` of a value or module, as keys of caches and absl.flags have it
    if writer.may_hold_places:
        places = writer.texts.keys() | set(map(id, [*sys.modules.values()]))
        text = _Writer(without_libraries, places).text(value, _DEPTH)
    return text


class _Writer:
    def __init__(self, without_libraries: bool, places: Collection[int]) -> None:
        self._without_libraries = without_libraries
        self._places = places
        self.may_hold_places = False
        self._left = _MAXIMUM_VALUES
        self.texts: dict[int, tuple[Any, str]] = {}

    def text(self, value: Any, depth: int) -> str:
        kind = type(value)
        if kind is int and value > _LEAST_PLACE:
            self.may_hold_places = True
            return "the place of a value" if value in self._places else repr(value)
        if kind in _PLAIN:
            return repr(value)
        if isinstance(value, types.ModuleType):
            return value.__name__
        name = _name(kind)
        if isinstance(value, enum.Enum) and not is_of_program(kind.__module__):
            return f"{name}.{value.name}"
        known = self.texts.get(id(value))
        if known is not None:
            return known[1]
        self._left -= 1
        if depth == 0 or self._left <= 0:
            return name
        self.texts[id(value)] = value, f"{name} that holds itself"
        text = self._text(value, name, depth - 1) + random_state(value)
        if len(text) > _MAXIMUM_LENGTH and depth < _DEPTH:
            text = f"{name} {digest_of(text)}"
        self.texts[id(value)] = value, text
        return text

    def _text(self, value: Any, name: str, depth: int) -> str:
        if isinstance(value, type):
            return self._class(value, depth)
        if isinstance(value, _BUILTIN):
            kind = type(value)
            beside = self._beside(value, depth) if kind.__module__ != "builtins" else ""
            return f"{name}{self._builtin(value, depth)}{beside}"
        if isinstance(value, functools.partial):
            return f"partial({self._all((value.func, value.args, value.keywords), depth)})"
        if inspect.ismethod(value):
            return f"method({self._all((value.__func__, value.__self__), depth)})"
        if inspect.isfunction(value):
            return self._function(value, depth)
        if hasattr(value, "__wrapped__"):  # of jax.jit and other wrappers
            is_jit = name == _JITTED
            beside = jit_text(value._jit_info) if is_jit else self._beside(value, depth)
            return f"{name}({self.text(value.__wrapped__, depth)}){beside}"
        if inspect.isroutine(value) and hasattr(value, "__qualname__"):  # no cached_property
            owner = self.text(getattr(value, "__self__", None), depth)
            return f"{getattr(value, '__module__', '')}.{value.__qualname__} of {owner}"
        if name in _MESHES:  # what it keeps in attributes comes and goes
            devices = [*map(str, value.devices.flat)] if name == _MESHES[0] else []
            return f"{name} {value!r} {digest_of(repr(devices))}"
        if all(hasattr(value, each) for each in ("dtype", "shape", "__array__")):
            if value.dtype == object:  # whose bytes are places in memory
                return f"{name} {value.shape}[{self._all(np.asarray(value).flat, depth)}]"
            of_class = isinstance(value, np.ndarray) and type(value) is not np.ndarray
            return f"{name} {_array(value)}{self._beside(value, depth) if of_class else ''}"
        if name in _JAXPRS:  # its variables are numbered over all traces of the process
            plain = _ADDRESS.sub("", str(value))
            return f"{name} {plain} {self.text(getattr(value, 'consts', None), depth)}"
        if isinstance(value, np.ufunc):  # that of np.frompyfunc calls a function
            return f"{name} {value.__name__}({self._all(gc.get_referents(value), depth)})"
        if isinstance(value, property):
            return f"{name}({self._all((value.fget, value.fset), depth)})"
        if value is os.environ:  # it has the orders of `prejit record` and `run`, too
            return name
        # It holds all others, and the hook reads those of jax.
        if isinstance(value, logging.Logger):
            return f"{name} {value.name} {value.getEffectiveLevel()} {value.disabled}"
        attributes = attributes_of(value)
        if not is_of_program(type(value).__module__):
            attributes = {k: each for k, each in attributes.items() if k not in _CACHED}
        held = self.text(attributes, depth) if attributes else _repr_of(value)
        if not held and (state := _state_of(value)) is not None:
            held = self.text(state, depth)
        if not held and isinstance(value, Iterator) and not is_of_program(type(value).__module__):
            raise NotKeptError(f"it holds a {name}, an iterator that does not tell where it is")
        return f"{self.text(type(value), depth)}{held}"

    def _builtin(self, value: Any, depth: int) -> str:
        """Return what Python's own classes hold, of an object of one of them or of a class made of one."""
        if isinstance(value, (tuple, list)):
            return f"[{self._all(value, depth)}]"
        if isinstance(value, dict):
            pairs = (f"{self.text(k, depth)}: {self.text(v, depth)}" for k, v in value.items())
            return f"{{{', '.join(pairs)}}}"
        if isinstance(value, (set, frozenset)):
            return f"{{{', '.join(sorted(self.text(each, depth) for each in value))}}}"
        plain: Any = next(kind for kind in type(value).__mro__ if kind in _PLAIN)
        return f"({plain.__repr__(value)})"

    def _beside(self, value: Any, depth: int) -> str:
        """Return the attributes of an object that wraps another, or whose class is made of a builtin one."""
        kind, held = type(value), attributes_of(value)
        held.pop("__wrapped__", None)
        if is_of_program(kind.__module__):
            held["of the class"] = kind
        else:
            held = {name: each for name, each in held.items() if name not in _CACHED}
        if isinstance(value, defaultdict):
            held["default_factory"] = value.default_factory
        return self.text(held, depth) if held else ""

    def _all(self, values: Any, depth: int) -> str:
        return ", ".join(self.text(each, depth) for each in values)

    def _class(self, kind: type, depth: int) -> str:
        if not is_of_program(kind.__module__):
            return _name(kind)
        held = {
            key: each
            for base in reversed(kind.__mro__)
            if is_of_program(base.__module__)
            for key, each in vars(base).items()
            if not key.startswith("__")
            or key == "__call__"
            or inspect.isfunction(each)
            or hasattr(each, "__wrapped__")
        }
        if issubclass(kind, enum.Enum):
            held.pop("_value2member_map_", None)  # flags note there what code has combined
        if is_of_program(type(kind).__module__):
            held["of the metaclass"] = type(kind)
        return f"{_name(kind)}({self.text(held, depth)})"

    def _function(self, function: types.FunctionType, depth: int) -> str:
        held: list[Any] = [function.__defaults__, function.__kwdefaults__]
        for cell in function.__closure__ or ():
            try:
                held.append(cell.cell_contents)
            except ValueError:  # a function that is not defined yet
                held.append(None)
        if not is_of_program(function.__module__):
            if (function.__module__ or "").startswith("optax."):
                # A trace makes a float of the number of steps that a schedule holds.
                held = [int(x) if type(x) is float and x and x.is_integer() else x for x in held]
            if self._without_libraries:
                held = [x for x in held if callable(x) or isinstance(x, (tuple, list, dict))]
        code = function.__code__
        place = f"{function.__module__}.{function.__qualname__}:{code.co_firstlineno}"
        if not code.co_filename.startswith(_LIBRARY) and "site-packages" not in code.co_filename:
            place += f" {_code_digest(code)}"
            names = dict.fromkeys(_names(code))
            found = [function.__globals__[each] for each in names if each in function.__globals__]
            held += found
            held += [{k: v for k, v in vars(function).items() if k != "__wrapped__"} or None]
            # Not those that it imports itself: a call without a trace leaves them unimported.
            modules = [*filter(inspect.ismodule, held)]
            for module in modules:
                read = [_of_module(module, name) for name in names]
                held += read
                modules += [x for x in filter(inspect.ismodule, read) if x not in modules]
        return f"{place}({self._all(held, depth)})" if any(x is not None for x in held) else place


def random_state(value: Any) -> str:
    """Return a digest of the state of a generator of random numbers; empty: it is none.

    Those of the modules `random` and `numpy.random` are none: libraries hold them, and most programs give
    them no seed. A trace that draws from them is found by the effect.
    """
    if value is _OF_RANDOM or value is _OF_NUMPY:
        return ""
    if isinstance(value, random.Random):
        return digest_of(repr(value.getstate()))
    of_numpy = isinstance(value, (np.random.Generator, np.random.RandomState))
    return digest_of(repr(value._bit_generator.state)) if of_numpy else ""


_OF_RANDOM, _OF_NUMPY = (
    getattr(each, "__self__", None) for each in (random.random, np.random.random)
)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


@functools.lru_cache(4096)
def _code_digest(code: types.CodeType) -> str:
    constants = [each for each in code.co_consts if not isinstance(each, types.CodeType)]
    inner = [_code_digest(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    own = code.co_code, code.co_names, code.co_flags, code.co_argcount, code.co_kwonlyargcount
    return digest_of(repr((*own, text_of(constants), inner)))


def _of_module(module: types.ModuleType, name: str) -> Any:
    """Return what a module has by a name that a function uses: somebody may have set it.

    A function or class of a library is compared by its name alone.
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
    found = sys.modules.get(module)
    file = getattr(found, "__file__", None)
    if file is None and isinstance(found, types.ModuleType):  # a namespace package
        file = next(iter(vars(found).get("__path__", ())), None)
    own = module == "__main__" or (file is not None and not file.startswith(_LIBRARY))
    return own and "site-packages" not in (file or "") and not module.startswith("prejit")


_LIBRARY = inspect.__file__.removesuffix("inspect.py")


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, those in slots included.

    What a class of a library caches is left out: it comes and goes, and the other attributes tell it.
    """
    found = {
        name: getattr(value, name)
        for kind in type(value).__mro__
        if "__slots__" in vars(kind)
        for name, slot in vars(kind).items()  # private names are mangled
        if isinstance(slot, types.MemberDescriptorType) and hasattr(value, name)
    }
    attributes = getattr(value, "__dict__", None)
    if not isinstance(attributes, dict):
        return found
    if isinstance(value, threading.Thread):
        attributes = {k: each for k, each in attributes.items() if k not in _OF_THREAD}
    kind = type(value)
    if is_of_program(kind.__module__):
        return found | attributes
    cached = functools.cached_property
    return found | {
        name: each
        for name, each in attributes.items()
        if not isinstance(getattr(kind, name, None), cached)
    }


_CACHED = ("_hash", "__weakref__")
"""Attributes of a library's objects that come and go, and differ in each process: a SingleDeviceSharding of
jax keeps the hash of a place in memory there."""

_OF_THREAD = vars(threading.Thread()).keys()
"""Attributes of a thread that are not of the program: numbers of the system among them."""


def _repr_of(value: Any) -> str:
    """Return a digest of the repr of an object without attributes, if it tells more than a place."""
    has_own = "__repr__" in vars(type(value)) and not isinstance(value, threading.Thread)
    if not has_own or is_of_program(type(value).__module__):
        return ""
    text = repr(value)
    return "" if " at 0x" in text else digest_of(text)


def _state_of(value: Any) -> Any:
    """Return the state of an object of Python's own classes that neither attributes nor a repr tell."""
    if inspect.isgenerator(value):
        frame = value.gi_frame
        place = frame and (frame.f_lasti, dict(frame.f_locals))
        return value.gi_code.co_qualname, place
    with contextlib.suppress(Exception):
        if isinstance(value, ContextVar):
            return value.get(None)
        if isinstance(value, types.MappingProxyType):
            return dict(value)
        if isinstance(value, memoryview) or type(type(value)).__module__ == "_ctypes":
            content = memoryview(value)
            return content.tobytes() if content.nbytes <= _MOST_BYTES else None
        if type(value).__module__ in ("builtins", "_io"):  # an iterator, an exception, a StringIO
            _, *state = value.__reduce_ex__(4)
            return state
    return None


_MOST_BYTES = 1 << 20
"""Maximum size of memory that is read."""


def jit_text(info: Any) -> str:
    """Return what jax.jit was given beside the function."""
    names = [name for name in info._fields if name not in ("fun_sourceinfo", "fun_signature")]
    return _options_text(tuple((name, getattr(info, name)) for name in names))


@functools.lru_cache(4096)
def _options_text(options: tuple[tuple[str, Any], ...]) -> str:
    parts = []
    for name, value in options:
        if name.endswith("_treedef"):
            value = str(value)
        elif name.endswith("shardings_leaves"):
            value = [_text_of_sharding(each) for each in value]
        elif name.endswith("layouts_leaves"):
            value = [str(each) for each in value]
        parts.append(f"{name}={text_of(value)}")
    return ", ".join(parts)


def _text_of_sharding(value: Any) -> str:
    try:
        return str(sharding_json(value))
    except NotKeptError:
        return str(value)


def _array(value: Any) -> str:
    """Return the type of an array, and a digest of its numbers if they are at hand."""
    text = f"{value.dtype}{list(value.shape)}{' weak' * bool(getattr(value, 'weak_type', False))}"
    try:
        plain = getattr(value, "_base_array", value)  # of random keys
        return f"{text} {digest_of(np.asarray(plain).tobytes())}"
    except Exception:  # a tracer, a deleted array, or what only looks like an array
        return text


def digest_of(content: bytes | str) -> str:
    """Return 32 hexadecimal digits that tell contents apart."""
    content = content.encode(errors="surrogatepass") if isinstance(content, str) else content
    return hashlib.blake2b(content, digest_size=16).hexdigest()
