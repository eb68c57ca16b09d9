"""Refuse code of the user that reads a clock or draws random numbers without a seed while it is traced.

What it reads becomes a constant of the program, and two traces may agree by chance. A profile function of
Python sees each call of C code with its caller, however the user's code came to the function. Calls of the
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
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, final

import numpy as np

from prejit.compiler.lowering.user.inputs import is_installed
from prejit.runtime.errors import BuildError

_CLOCKS = (
    *("time", "monotonic", "perf_counter", "process_time", "thread_time", "clock_gettime"),
    *("time_ns", "monotonic_ns", "perf_counter_ns", "process_time_ns", "thread_time_ns"),
    *("clock_gettime_ns", "localtime", "gmtime", "ctime"),
)
_DRAWS = ("random", "getrandbits")
_READERS: Mapping[Any, str] = {
    **{getattr(time, name): f"time.{name}" for name in _CLOCKS},
    datetime.datetime.now: "datetime.now",
    datetime.datetime.utcnow: "datetime.utcnow",
    datetime.datetime.today: "datetime.today",
    datetime.date.today: "date.today",
    os.urandom: "os.urandom",
    os.getrandom: "os.getrandom",
    getattr(uuid, "_generate_time_safe", None): "uuid.uuid1",
}
"""Functions that return something else each time, by themselves, with their names."""
_NAMES = {*(name.__name__ for name in _READERS if name is not None), *_DRAWS, "seed"}
_GENERATORS = {module.__file__: module.__name__ for module in (random, secrets, uuid)}
"""Modules whose calls are those of their callers, by file."""
_SEEDED_LATER = re.compile(r"RandomState\(\s*[^)\s]")
"""A line that makes an older generator of NumPy with a seed. NumPy first draws one that it does not use."""
_SHOWN = 3
"""Maximum number of calls that an error names."""


@contextmanager
def refusing_chance(what: str) -> Iterator[None]:
    """Refuse clocks and random numbers in the block, which traces code of the user, in this thread.

    Under another profiler, such as cProfile, only NumPy's global generator is watched.

    Args:
        what: what is traced, with its place in the manifest, for the error.

    Raises:
        BuildError: the code called some; the error names each with its line.
    """
    watch, before = _Watch(), _global_state()
    is_free = sys.getprofile() is None
    if is_free:
        sys.setprofile(watch)
    try:
        yield
    finally:
        if is_free:
            sys.setprofile(None)
    found = [*watch.found]
    if _global_state() != before:
        found.append("the global generator of np.random")
    if found:
        more = f", and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise BuildError(
            f"{what}: expected a function that gives the same program each time, found "
            f"{', '.join(found[:_SHOWN])}{more}",
            hint="its value would be a constant of the program: take it as an argument, use jax.random with "
            "a key, or give a generator a seed, as np.random.default_rng(0); if the program does not depend "
            "on it, set `impure = true`",
        )


def _global_state() -> bytes:
    """Return the state of NumPy's global generator, to be compared."""
    return pickle.dumps(np.random.get_state(legacy=False))


@final
class _Watch:
    """A profile function that notes the calls of the user's code.

    Attributes:
        found: the calls, each with its line.
    """

    def __init__(self) -> None:
        self.found: dict[str, None] = {}
        self._seeded: dict[int, random.Random] = {}
        """Generators that got a seed in the trace, by identity: only then is the global one like others."""

    def __call__(self, frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call" and getattr(called, "__name__", None) in _NAMES:
            self._note(frame, called)

    def _note(self, frame: FrameType, called: Any) -> None:
        generator = called.__self__
        if isinstance(generator, random.Random):
            if called.__name__ == "seed":
                if frame.f_locals.get("a", frame) is not None:
                    self._seeded[id(generator)] = generator
                    return
            elif generator is not _of_module() or id(generator) in self._seeded:
                return
            name = f"random.{called.__name__}"
        elif (name := _READERS.get(called, "")) == "":
            return
        caller: FrameType | None = frame
        while caller is not None and (module := _GENERATORS.get(caller.f_code.co_filename)):
            function = caller.f_code.co_qualname.removesuffix(".__init__")
            name = f"{module}.{function.removeprefix('Random.')}"
            caller = caller.f_back
        if caller is None or not _is_users(file := caller.f_code.co_filename):
            return
        if not _SEEDED_LATER.search(linecache.getline(file, caller.f_lineno)):
            self.found[f"{name}() at {file}:{caller.f_lineno}"] = None


def _of_module() -> random.Random:
    """Return the generator of the functions of `random`."""
    generator: random.Random = random.random.__self__  # type: ignore[attr-defined]
    return generator


def _is_users(file: str) -> bool:
    """Return whether code is the user's. What is typed in has no file: `<stdin>`, `<python-input-0>`."""
    return not (file.startswith("<frozen") if file.startswith("<") else is_installed(file))
