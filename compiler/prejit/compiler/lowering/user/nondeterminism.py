"""Refuse code of the user that reads a clock or draws random numbers without a seed: imported or traced.

What it reads becomes a constant of the program, and two traces may agree by chance. A profile function of
Python sees each call of C code with its caller, however the user's code came to the function. It does not see
what C code calls, such as a `functools.partial`: so the functions of `time` are replaced too. Calls of the
standard library and of installed packages do not count, such as the times of log records: but those of
`random`, `secrets` and `uuid` are calls of their own callers. NumPy's C code raises no event, so the state of
its global generator is compared.
"""

from __future__ import annotations

import datetime
import linecache
import os
import pickle
import random
import re
import secrets
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from types import FrameType
from typing import Any, final

import numpy as np

from prejit.compiler.lowering.user.trace_inputs import is_installed
from prejit.runtime.base.wording import few
from prejit.runtime.errors import BuildError

_CLOCKS = (
    *("time", "monotonic", "perf_counter", "process_time", "thread_time", "clock_gettime"),
    *("time_ns", "monotonic_ns", "perf_counter_ns", "process_time_ns", "thread_time_ns"),
    *("clock_gettime_ns", "localtime", "gmtime", "ctime", "asctime", "strftime"),
)
_GIVEN_TIME = {"localtime": 0, "gmtime": 0, "ctime": 0, "asctime": 0, "strftime": 1}
"""The place of the argument with which a function of `time` reads no clock."""
_DATES = ("now", "utcnow", "today")
_DRAWS = ("random", "getrandbits")
_READERS: Mapping[Any, str] = {
    **{getattr(time, name): f"time.{name}" for name in _CLOCKS if name not in _GIVEN_TIME},
    os.getpid: "os.getpid",
    os.urandom: "os.urandom",
    os.getrandom: "os.getrandom",
    getattr(uuid, "_generate_time_safe", None): "uuid.uuid1",
}
"""Functions that return something else each time, by themselves, with their names."""
_NAMES = {*(name.__name__ for name in _READERS if name is not None), *_DRAWS, *_DATES, "seed"}
_GENERATORS = {module.__file__: module.__name__ for module in (random, secrets, uuid)}
"""Modules whose calls are those of their callers, by file."""
_SEEDED_LATER = re.compile(r"RandomState\(\s*[^)\s]")
"""A line that makes an older generator of NumPy with a seed. NumPy first draws one that it does not use."""


@contextmanager
def refusing_nondeterminism(what: str) -> Iterator[None]:
    """Refuse clocks and random numbers in the block, which runs code of the user, in this thread.

    Under another profiler, such as cProfile, only `time` and NumPy's global generator are watched.

    Args:
        what: what is imported or traced, with its place in the manifest, for the error.

    Raises:
        BuildError: the code called some; the error names each with its line.
    """
    global _watch
    watch, outer = _Watch(), _watch
    is_free = sys.getprofile() is None
    functions = {name: getattr(time, name) for name in _CLOCKS}
    seed, _watch = np.random.seed, watch
    for name in _CLOCKS:
        setattr(time, name, _NOTING[name])
    np.random.seed = _seed
    if is_free:
        sys.setprofile(watch)
    try:
        yield
    finally:
        if is_free:
            sys.setprofile(None)
        for name, function in functions.items():
            setattr(time, name, function)
        np.random.seed, _watch = seed, outer
    found = [*watch.found]
    if watch.has_drawn():
        found.append("the global generator of np.random")
    if found:
        raise BuildError(
            f"{what}: expected a function that gives the same program each time, found {few(found)}",
            hint="its value would be a constant of the program: take it as an argument, use jax.random with "
            "a key, or give a generator a seed, as np.random.default_rng(0); if the program does not depend "
            "on it, set `impure = true`",
        )


def _global_state() -> bytes:
    """Return the state of NumPy's global generator, to be compared."""
    return pickle.dumps(np.random.get_state(legacy=False))


@final
class _Watch:
    """A profile function that notes the calls of the user's code, each with its line, in `found`."""

    def __init__(self) -> None:
        self.found: dict[str, None] = {}
        self._thread = threading.get_ident()
        self._numpy: bytes | None = _global_state()
        self._seeded: dict[int, random.Random] = {}
        """Generators that got a seed in the trace, by identity: only then is the global one like others."""

    def __call__(self, frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call" and getattr(called, "__name__", None) in _NAMES:
            self._note(frame, called)
        elif event == "call" and "datetime64" in frame.f_code.co_names:
            for each in ("now", "today"):
                if each in frame.f_code.co_consts:
                    self.note(f"np.datetime64[{each}]", frame)

    def note_seed(self, seed: Any) -> None:
        """Note that NumPy's global generator gets a seed: from then on it is like others."""
        if seed is not None and not self.has_drawn():
            self._numpy = None

    def has_drawn(self) -> bool:
        """Return whether NumPy's global generator was used without a seed."""
        return self._numpy not in (None, _global_state())

    def note(self, name: str, caller: FrameType | None) -> None:
        """Note a call, if its caller is the user's code and in the thread of the block."""
        if caller is None or threading.get_ident() != self._thread:
            return
        file = caller.f_code.co_filename
        if _is_users(file) and not _SEEDED_LATER.search(linecache.getline(file, caller.f_lineno)):
            self.found[f"{name}() at {file}:{caller.f_lineno}"] = None

    def _note(self, frame: FrameType, called: Any) -> None:
        generator = getattr(called, "__self__", None)
        if isinstance(generator, random.Random):
            if called.__name__ == "seed":
                if frame.f_locals.get("a", frame) is not None:
                    self._seeded[id(generator)] = generator
                    return
            elif generator is not _of_module() or id(generator) in self._seeded:
                return
            name = f"random.{called.__name__}"
        elif isinstance(generator, type) and issubclass(generator, datetime.date):
            kind = "datetime" if issubclass(generator, datetime.datetime) else "date"
            name = f"{kind}.{called.__name__}"
        elif (name := _READERS.get(called, "")) == "":
            return
        caller: FrameType | None = frame
        while caller is not None and (module := _GENERATORS.get(caller.f_code.co_filename)):
            function = caller.f_code.co_qualname.removesuffix(".__init__")
            name = f"{module}.{function.removeprefix('Random.')}"
            caller = caller.f_back
        self.note(name, caller)


def _noting(name: str) -> Callable[..., Any]:
    """Return a function of `time` that notes when it reads the clock."""
    call, place = getattr(time, name), _GIVEN_TIME.get(name)

    @wraps(call)
    def read(*args: Any) -> Any:
        if _watch is not None and (place is None or args[place : place + 1] in ((), (None,))):
            _watch.note(f"time.{name}", sys._getframe(1))
        return call(*args)

    return read


_NOTING = {name: _noting(name) for name in _CLOCKS}
_SEED = np.random.seed


def _seed(seed: Any = None) -> None:
    if _watch is not None:
        _watch.note_seed(seed)
    _SEED(seed)


_watch: _Watch | None = None


def _of_module() -> random.Random:
    """Return the generator of the functions of `random`."""
    return random.random.__self__  # type: ignore[attr-defined]


def _is_users(file: str) -> bool:
    """Return whether code is the user's. What is typed in has no file: `<stdin>`, `<python-input-0>`."""
    return not (file.startswith("<frozen") if file.startswith("<") else is_installed(file))
