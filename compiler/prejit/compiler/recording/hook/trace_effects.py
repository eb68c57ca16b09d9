"""Find what a trace changes outside itself, which would not happen without the trace.

jax asks for functions without effects. This finds what people do nevertheless: they print, count, append,
set globals, attributes and settings. It compares what a function can reach in a step or two, and the globals
of the program's own modules.
"""

from __future__ import annotations

import atexit
import contextlib
import decimal
import functools
import gc
import inspect
import io
import logging
import random
import signal
import sys
import threading
import warnings
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping
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
        self._outputs = [*_outputs()]

    def found(self) -> str | None:
        """Return what the trace has changed; None: nothing was found. To be called once."""
        outputs, self._outputs = self._outputs, []
        done = [what for what, calls in outputs if calls.close()]
        if done:
            return f"its trace {done[0]}"
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


class _Calls:
    """Notes whether an attribute of an object is called, by any thread: it may be a trace's.

    Args:
        owner: the object.
        name: the attribute. It may be one that the class of `owner` has.
        counts: returns whether a call with these arguments counts.
    """

    def __init__(self, owner: Any, name: str, counts: Callable[..., bool]) -> None:
        self._owner, self._name, own = owner, name, vars(owner).get(name)
        if not hasattr(own, "calls"):
            setattr(owner, name, _counted(getattr(owner, name), own, counts))
        # Traces in other threads share it.
        self._call: Any = getattr(owner, name)
        self._call.users += 1
        self._before = self._call.calls

    def close(self) -> bool:
        """Return whether it was called. To be called once."""
        self._call.users -= 1
        if not self._call.users and vars(self._owner).get(self._name) is self._call:
            if self._call.own is None:
                delattr(self._owner, self._name)
            else:
                setattr(self._owner, self._name, self._call.own)
        return bool(self._call.calls > self._before)


def _counted(plain: Any, own: Any, counts: Callable[..., bool]) -> Any:
    """Return a function that counts its calls; `own` is what stands in its place if nobody counts."""

    def counted(*arguments: Any, **named: Any) -> Any:
        call.calls += counts(*arguments)
        return plain(*arguments, **named)

    call: Any = counted
    call.calls, call.users, call.own = 0, 0, own
    return call


def _is_free(stream: Any) -> bool:
    """Return whether `write` of a stream can be replaced: no program has set it on the stream itself."""
    own = getattr(stream, "__dict__", None)
    setter: object = type(stream).__setattr__  # tqdm's sets it elsewhere
    is_plain = setter is object.__setattr__
    return own is not None and is_plain and ("write" not in own or hasattr(own["write"], "calls"))


def _streams(name: str) -> list[Any]:
    """Return where a write to stdout or stderr may go first: a program may have set its own stream."""
    found = [getattr(sys, name), getattr(sys, f"__{name}__")]
    found += [getattr(each, "buffer", None) for each in found]
    return [*{id(each): each for each in found if _is_free(each)}.values()]


def _outputs() -> Iterator[tuple[str, _Calls]]:
    """Yield what tells whether a trace prints, logs or warns, by what it does."""
    for name in ("stdout", "stderr"):
        for stream in _streams(name):
            yield f"writes to {name}", _Calls(stream, "write", lambda *_: True)
    # Handlers write to files that are open, and keep records. jax itself logs that it traces.
    yield (
        "logs",
        _Calls(logging.Handler, "handle", lambda _, record: not record.name.startswith("jax.")),
    )
    # One who collects warnings sees them nowhere else, unless the trace itself collects them.
    shown = warnings.showwarning, vars(warnings).get("_showwarnmsg_impl")
    if hasattr(warnings, "_showwarnmsg"):
        yield (
            "warns",
            _Calls(
                warnings,
                "_showwarnmsg",
                lambda _: shown == (warnings.showwarning, vars(warnings).get("_showwarnmsg_impl")),
            ),
        )
    # Libraries that a trace imports have functions of their own for the exit.
    yield "registers a function for the exit", _Calls(atexit, "register", _is_called_by_program)


def _is_called_by_program(*_: Any) -> bool:
    return is_of_program(sys._getframe(2).f_globals.get("__name__", ""))


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


def _loggers() -> dict[str, Any]:
    """Return the settings of the loggers that have any: imports make others, which have none."""
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    return {
        each.name: (each.level, each.propagate, each.disabled, [*map(id, each.handlers)])
        for each in loggers
        if isinstance(each, logging.Logger)
        and (each.level or each.handlers or each.disabled or not each.propagate)
    }


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
        "sys.argv": [*sys.argv],
        "an attribute of sys": {name: id(value) for name, value in vars(sys).items()},
        "whether garbage is collected": gc.isenabled(),
        "the levels and handlers of loggers": _loggers(),
        "the filters of warnings": [*map(id, warnings.filters)],
        "the handlers of signals": [*map(signal.getsignal, signal.valid_signals())],
        "the limit of recursion": sys.getrecursionlimit(),
    }
