"""Find what a trace changes outside itself, which would not happen without the trace.

jax asks for functions without effects. This finds what people do nevertheless: they print, count, append,
set globals, attributes and settings. It compares what a function can reach in a step or two, and the globals
of the program's own modules.
"""

from __future__ import annotations

import contextlib
import decimal
import functools
import inspect
import io
import random
import sys
import threading
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import numpy as np

from prejit.runtime.recorded.hook.plain_texts import is_of_program, random_state


class TraceEffects:
    """The state before a trace of a function."""

    def __init__(self, function: Any) -> None:
        self._roots = dict(_roots(function))
        self._before = {name: _state(root) for name, root in self._roots.items()}
        self._settings = _settings()
        self._streams = {name: _Stream(name) for name in ("stdout", "stderr")}

    def found(self) -> str | None:
        """Return what the trace has changed; None: nothing was found. To be called once."""
        streams, self._streams = self._streams, {}
        written = [name for name, stream in streams.items() if stream.close()]
        if written:
            return f"its trace writes to {written[0]}"
        settings = _settings()
        for name, before in self._settings.items():
            if settings[name] != before:
                return f"its trace changes {name}"
        for name, root in self._roots.items():
            after, before = _state(root), self._before[name]
            for key in {**before, **after}:
                if before.get(key) != after.get(key):
                    return f"its trace changes {key} of {name}"
        return None


class _Stream:
    """Notes whether something is written to a stream of Python, by any thread: it may be a trace's."""

    def __init__(self, name: str) -> None:
        self._stream: Any = getattr(sys, name)
        is_text = isinstance(self._stream, io.TextIOBase)
        if is_text and "write" not in vars(self._stream):
            self._stream.write = _CountedWrite(self._stream.write)
        # Traces in other threads share it.
        self._write = getattr(self._stream, "write", None)
        if isinstance(self._write, _CountedWrite):
            self._write.users += 1
            self._before = self._write.count

    def close(self) -> bool:
        """Return whether something was written. To be called once."""
        if not isinstance(self._write, _CountedWrite):
            return False
        self._write.users -= 1
        if not self._write.users:
            vars(self._stream).pop("write", None)
        return self._write.count > self._before


class _CountedWrite:
    """The `write` of a stream, and how often it was called."""

    def __init__(self, write: Any) -> None:
        self._write = write
        self.count = self.users = 0

    def __call__(self, text: Any) -> Any:
        self.count += 1
        return self._write(text)


def _roots(function: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield names and dictionaries of what a trace of a function may change."""
    seen: set[int] = set()
    waiting: list[tuple[Any, str, int, bool]] = []
    for name, module in [*sys.modules.items()]:
        if is_of_program(name):
            yield name, vars(module)
            waiting += [(each, f"{name}.{key}", 2, False) for key, each in _parts(vars(module))]
    waiting.append((function, "the function", 3, True))  # first: more of what it holds counts
    while waiting:
        value, name, depth, of_function = waiting.pop()
        if depth == 0 or id(value) in seen:
            continue
        seen.add(id(value))
        if inspect.getattr_static(value, "__wrapped__", None) is not None:
            value = value.__wrapped__
        held: Mapping[str, Any] | None = None
        if inspect.ismethod(value):
            parts: tuple[Any, ...] = (value.__self__, value.__func__)
            waiting += [(each, name, depth, of_function) for each in parts]
        elif isinstance(value, functools.partial):
            parts = (value.func, *value.args, *value.keywords.values())
            waiting += [(each, name, depth, of_function) for each in parts]
        elif inspect.isfunction(value):
            name, held = f"{name} {value.__qualname__}", _held(value)
            yield f"the attributes of {name}", vars(value)
        elif isinstance(value, dict):
            held = value
        elif isinstance(value, type):
            held = vars(value) if is_of_program(value.__module__) else None
        elif type(value).__dictoffset__ and not inspect.ismodule(value):
            # Objects of other packages fill caches of their own: only those that the function holds count.
            kind = type(value)
            if of_function or is_of_program(kind.__module__) or kind is SimpleNamespace:
                name, held = f"{name} ({kind.__qualname__})", vars(value)
        if held is not None:
            yield name, held
            waiting += [
                (each, f"{name} {key}", depth - 1, of_function) for key, each in _parts(held)
            ]


_MOST_PARTS = 1000
"""Maximum parts of a value that are looked into."""


def _parts(held: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return what is looked into, too. Names with two underscores are Python's own."""
    parts = [*held.items()][:_MOST_PARTS]
    return [(key, each) for key, each in parts if not str(key).startswith("__")]


def _held(function: Any) -> dict[str, Any]:
    """Return what a function holds: variables of its closure, and defaults."""
    held = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # a function that is not defined yet
            held[name] = cell.cell_contents
    defaults = {f"default {n}": each for n, each in enumerate(function.__defaults__ or ())}
    return {**held, **defaults, **(function.__kwdefaults__ or {})}


def _state(root: Mapping[str, Any]) -> dict[str, Any]:
    return {
        str(key): _marks(value)
        for key, value in [*root.items()]
        # Python notes there, beside the version of its filters, warnings that it has shown.
        if key != "__warningregistry__" or {*value} - {"version"}
    }


def _marks(value: Any) -> Any:
    """Return what tells whether a value was set or changed, without reading all that it holds."""
    if isinstance(value, dict):
        return id(value), hash(tuple(map(id, value))), hash(tuple(map(id, value.values())))
    if isinstance(value, (list, set, deque)):
        return id(value), hash(tuple(map(id, value)))
    if inspect.isgenerator(value):
        return id(value), value.gi_frame and value.gi_frame.f_lasti
    with contextlib.suppress(Exception):  # of a class of the program
        if isinstance(value, ContextVar):
            return id(value), id(value.get(None))
        if isinstance(value, threading.local):
            return id(value), _marks(vars(value))
        if isinstance(value, io.IOBase):
            return id(value), value.tell()
        if isinstance(value, (np.ndarray, array, bytearray)):
            content = memoryview(value)
            return id(value), content.nbytes <= _MOST_BYTES and hash(content.tobytes())
        if state := random_state(value):
            return id(value), state
        if isinstance(value, Iterator):
            return id(value), _position(value)
    return id(value)


def _position(value: Any) -> tuple[Any, ...]:
    """Return where an iterator is, and those inside it, as those of `zip`."""
    reduced = value.__reduce__()
    inner = reduced[1] if isinstance(reduced[1], tuple) else ()
    return repr(reduced), *(_position(each) for each in inner if isinstance(each, Iterator))


_MOST_BYTES = 1 << 20
"""Maximum size of an array whose content is compared."""


def _settings() -> dict[str, Any]:
    """Return what functions set in places that all code shares."""
    import jax

    return {
        "a setting of jax": dict(jax.config.values),
        "the state of numpy.random": repr(np.random.get_state()),
        "the state of random": random.getstate(),
        "numpy's errors": np.geterr(),
        "how numpy prints": repr(np.get_printoptions()),
        "the precision of decimals": (decimal.getcontext().prec, decimal.getcontext().rounding),
        "sys.path": [*sys.path],
    }
