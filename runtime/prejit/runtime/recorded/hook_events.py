"""The lines that the hook wrote in the processes of a program."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HIT = "hit"
"""The outcome of a program that jax read from its cache."""
REFUSED = "refused"
"""The outcome of a program that `--require-aot` kept from compiling."""
UNCACHED = "uncached"
"""The outcome of a program that jax compiled without a look into its cache."""
UNTRACED = "untraced"
"""The outcome of a call that ran without a trace."""


@dataclass(frozen=True, slots=True)
class JaxRequest:
    """One program that jax compiled or read from its cache.

    Attributes:
        name: jax's name of the program, `jit_score`.
        key: its key; None: not known.
        outcome: `hit`, `miss`, `refused` or `uncached`.
        seconds: the time for it.
        saved_seconds: the time that compiling it once took, in whole seconds as jax keeps them, without the
            time of reading it; None: not a hit.
        arguments: its arguments as `float32[8,128]`; None: not known.
        ingredients: digests of the ingredients of its key, by jax's names; empty: the program hid them.
        conditions: what lies behind some of them, by name, for people.
        where: the line of the program that asked for it.
        not_kept: why jax did not write it to the cache; None: it did, or was not asked to.
        traced: why its call was traced in a run of a bundle with calls; None: it was not, or not such a run.
        call: the call that asked for it, as `outer_call` of the compiler describes it; None: not
            known, or one of jax's own functions.
    """

    name: str
    key: str | None
    outcome: str
    seconds: float
    saved_seconds: float | None
    arguments: tuple[str, ...] | None
    ingredients: dict[str, str]
    conditions: dict[str, str]
    where: str
    not_kept: str | None
    traced: str | None = None
    call: dict[str, Any] | None = None

    @property
    def function(self) -> str | None:
        """The name by which its function can be imported; None: not known."""
        return None if self.call is None else self.call["name"]


@dataclass(frozen=True, slots=True)
class StartParts:
    """How long a process took until it had its last program, in parts.

    Attributes:
        total_seconds: all of it, from the start of the process. The others add up to it.
        imports_seconds: imports of its first thread.
        before_seconds: the rest of the time before its first program: Python itself, and data.
        comparing_seconds: comparing the inputs of calls that run untraced, and loading what they run.
        tracing_seconds: tracing and lowering.
        compiling_seconds: compiling programs, or reading them from the cache.
        rest_seconds: running them, and what the program does itself between them.
    """

    total_seconds: float
    imports_seconds: float
    before_seconds: float
    comparing_seconds: float
    tracing_seconds: float
    compiling_seconds: float
    rest_seconds: float


@dataclass(frozen=True, slots=True)
class WatchedProcess:
    """A process of the program that used jax.

    Attributes:
        versions: of `jax`, `jaxlib` and `python`.
        found_directory: the cache that the program set for itself and did not get; None: it set none.
        requests: what it asked of jax, in order.
        failure: why the hook could not watch all of them; None: it did.
        start: where the time went; None: it asked for nothing.
    """

    versions: dict[str, str]
    found_directory: str | None
    requests: tuple[JaxRequest, ...]
    failure: str | None = None
    start: StartParts | None = None


def read_events(directory: Path) -> tuple[WatchedProcess, ...]:
    """Return the processes that wrote lines into a directory, in the order of their first line."""
    files = sorted(directory.glob("*.jsonl"), key=lambda path: (path.stat().st_mtime_ns, path.name))
    return tuple(process for path in files if (process := _read(path)) is not None)


def _read(path: Path) -> WatchedProcess | None:
    versions: dict[str, str] | None = None
    directory, failure = None, None
    asked: list[dict[str, Any]] = []
    for line in _lines(path):
        if "process" in line:
            versions = line["versions"]
        elif "found_directory" in line:
            directory = line["found_directory"]
        elif "failure" in line:
            failure = line["failure"]
        elif "outcome" in line:
            asked.append(line)
    if versions is None:
        return None
    return WatchedProcess(
        versions, directory, tuple(map(_request, asked)), failure, _start(asked) if asked else None
    )


def _start(asked: list[dict[str, Any]]) -> StartParts:
    first, last = asked[0]["start"], asked[-1]["start"]
    comparing = sum(each["seconds"] for each in asked if each["outcome"] == UNTRACED)
    compiling = sum(each["seconds"] for each in asked) - comparing
    before = first["seconds"] - first["imports"] - first["tracing"] - asked[0]["seconds"]
    parts = max(0.0, before), comparing, last["tracing"], compiling
    others = last["seconds"] - sum(parts)
    imports = min(last["imports"], others)  # some import a module that calls jax
    return StartParts(last["seconds"], imports, *parts, others - imports)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for text in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):  # a process that was killed wrote half a line
            yield json.loads(text)


def _request(line: dict[str, Any]) -> JaxRequest:
    arguments = line.get("arguments")
    return JaxRequest(
        name=line.get("name") or _module_name(line["function"]),
        key=line.get("key"),
        outcome=line["outcome"],
        seconds=line["seconds"],
        saved_seconds=line.get("saved_seconds"),
        arguments=None if arguments is None else tuple(arguments),
        ingredients=line.get("ingredients", {}),
        conditions=line.get("conditions", {}),
        where=line["where"],
        not_kept=line.get("not_kept"),
        traced=line.get("traced"),
        call=line.get("call"),
    )


def _module_name(function: str) -> str:
    """Return `jit_score` for `jit(score)`: the name that jax's keys have."""
    return function.replace("(", "_").rstrip(")")
