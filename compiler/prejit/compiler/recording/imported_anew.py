"""Compare what recorded calls compiled with what their functions give when their modules are imported anew.

A build imports the modules. What the program set before a call, such as a global, an environment variable or
a setting of jax, is not set then, and the function would compute something else.

    recorded calls -> a file of Python that makes their arguments -> a new process lowers each -> digests
"""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from prejit.runtime.base.child_process import last_line, run_child
from prejit.runtime.recorded.hook.jax_texts import COMPUTATION, INGREDIENT, KEY_LOGGER
from prejit.runtime.recorded.hook.watch import Orders
from prejit.runtime.recorded.watched_command import JaxRequest, cache_settings, environment_for

CALLS = "recorded_calls"
"""The module that makes the arguments of the calls: `args_0()`, `fixed_0()`, ..."""
_X64 = "jax_enable_x64"
_SECONDS = 900
"""Longest time for importing the modules and lowering all calls."""


def compared(
    requests: Sequence[JaxRequest], code: str, directory: Path
) -> tuple[tuple[JaxRequest, ...], bool]:
    """Return requests with the trouble of calls that a build would not see as they were.

    Args:
        requests: the programs of a run.
        code: the module CALLS, for the requests with a call that has no trouble, by their places.
        directory: the directory of the manifest, where a build looks for modules.

    Returns:
        The requests, and whether a build needs JAX_ENABLE_X64=1.
    """
    given = {
        str(place): {**request.call, "is": request.ingredients.get(COMPUTATION, "")}
        for place, request in enumerate(requests)
        if request.call is not None and not request.call["trouble"]
    }
    if not given:
        return tuple(requests), False
    found = _in_new_process(given, code, directory)
    wants_x64 = any(call["lowering"]["x64"] for call in given.values())
    needs_x64 = wants_x64 and not found.get(_X64, False)

    def checked(place: int, request: JaxRequest) -> JaxRequest:
        if (call := given.get(str(place))) is None:
            return request
        trouble = found.get(str(place), found.get("trouble", ""))
        if wants_x64 and not call["lowering"]["x64"]:
            trouble = f"it was called without {_X64}, and the manifest is built with it"
        return replace(request, call={**(request.call or {}), "trouble": trouble})

    return tuple(checked(*each) for each in enumerate(requests)), needs_x64


def _in_new_process(
    calls: Mapping[str, Mapping[str, Any]], code: str, directory: Path
) -> dict[str, Any]:
    """Return the trouble of calls by their places, or of all of them as `trouble`."""
    with TemporaryDirectory(prefix="prejit-record-") as scratch:
        here = Path(scratch)
        (here / f"{CALLS}.py").write_text(code, encoding="utf-8")
        (here / "calls.json").write_text(json.dumps(calls), encoding="utf-8")
        homes = {call["home"] for call in calls.values()} - {None}
        path = [
            scratch,
            str(directory.absolute()),
            *sorted(homes),
            os.environ.get("PYTHONPATH", ""),
        ]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
        orders = Orders(cache_settings(here / "cache", write=False))
        status, _, errors = run_child(
            [sys.executable, "-m", __name__, scratch],
            env=environment_for(orders, environment),
            seconds=_SECONDS,
        )
        if status is None:
            return {"trouble": f"importing its module anew took more than {_SECONDS} seconds"}
        try:
            found: dict[str, Any] = json.loads((here / "found.json").read_text(encoding="utf-8"))
        except OSError:
            last = last_line(errors) or f"status {status}"
            return {"trouble": f"its module cannot be imported anew: {last}"}
        return found


def main(directory: str) -> None:
    """Compare the calls that `compared` wrote into a directory, in this new process."""
    import jax

    calls = json.loads(Path(directory, "calls.json").read_text(encoding="utf-8"))
    made = importlib.import_module(CALLS)  # imports the modules of all functions
    found: dict[str, Any] = {_X64: jax.config.jax_enable_x64}
    for place, call in calls.items():
        jax.config.update(_X64, call["lowering"]["x64"])
        try:
            found[place] = _trouble(call, place, made)
        except Exception as error:  # of the user's code
            found[place] = f"imported anew, it cannot be lowered: {type(error).__name__}: {error}"
    Path(directory, "found.json").write_text(json.dumps(found), encoding="utf-8")


def _trouble(call: Mapping[str, Any], place: str, made: Any) -> str:
    import jax

    if not call["is"]:
        return "jax's log, which says what it compiled, was off"
    module, _, attribute = call["name"].partition(":")
    function: Any = importlib.import_module(module)
    for name in attribute.split("."):
        function = getattr(function, name)
    example = jax.eval_shape(getattr(made, f"args_{place}"))
    values = call["static"] | getattr(made, f"fixed_{place}")()
    static = [*values]
    if call["by_place"]:
        args = [*example]
    else:
        values |= example
        args = [values.pop(name) for name in call["lowering"]["placed"]]
    for lower in _lowerings(function, call, static):
        with _digests() as digests:
            lower(*args, **values).compile()
        if digests == [call["is"]]:
            return ""
    return (
        "imported anew, it compiles to another program: a global, the environment or a setting of jax was "
        "changed before the call, or its arrays are on several devices"
    )


def _lowerings(function: Any, call: Mapping[str, Any], static: Sequence[str]) -> Iterator[Any]:
    """Yield what lowers a function: its own jax.jit, and one with the options of the call."""
    import jax

    inner = getattr(function, "__func__", function)
    if hasattr(inner, "lower"):
        owner = [function.__self__] if inspect.ismethod(function) else []
        yield partial(inner.lower, *owner)
        if owner:
            return
        function = inner.__wrapped__
    options: dict[str, Any] = {"donate_argnames": call["donated"]}
    if call["by_place"]:
        names = [name for name, _ in call["arguments"]]
        options = {"donate_argnums": [names.index(name) for name in call["donated"]]}
    options["keep_unused"] = call["lowering"]["keep_unused"]
    yield jax.jit(function, static_argnames=static, **options).lower


class _FoundError(Exception):
    """Ends a compile as soon as jax has logged the digest of the program."""


class _Digests(logging.Handler):
    """Keeps the digest that jax logs of a program, and ends its compile."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Take a message of jax."""
        arguments: Any = record.args
        if record.msg == INGREDIENT and arguments[0] == COMPUTATION:
            self.found.append(arguments[1])
            raise _FoundError


@contextmanager
def _digests() -> Iterator[list[str]]:
    """Give the digests of what the block compiles, which ends with the first one."""
    logger, handler = logging.getLogger(KEY_LOGGER), _Digests()
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield handler.found
    except _FoundError:
        pass
    finally:
        logger.removeHandler(handler)


if __name__ == "__main__":
    main(sys.argv[1])
