"""Run a program's command with jax's settings for a cache and with the hook, and read what the hook wrote."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from prejit.runtime.base.files import store_errors
from prejit.runtime.errors import UsageError
from prejit.runtime.recorded.hook import ENVIRONMENT
from prejit.runtime.recorded.hook.watch import CACHE_DIRECTORY, Orders

_SITE = str(Path(__file__).parent / "site")
"""The directory of the sitecustomize that starts the hook."""

_OF_TERMINAL = (signal.SIGINT, signal.SIGQUIT)
"""Signals that a terminal sends to all processes in its foreground, so to the command as well."""
_FORWARDED = (*_OF_TERMINAL, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
"""Signals that Python ignores. An ignored signal stays ignored in the command, which does not expect it."""
HIT = "hit"
"""The outcome of a program that jax read from its cache."""
REFUSED = "refused"
"""The outcome of a program that `--require-aot` kept from compiling."""
UNCACHED = "uncached"
"""The outcome of a program that jax compiled without a look into its cache."""
UNTRACED = "untraced"
"""The outcome of a call that ran without a trace."""


def cache_settings(directory: Path, *, write: bool) -> dict[str, Any]:
    """Return jax's public settings by name for a cache in a directory.

    `write`: whether jax writes every program that it compiles; if not, it only reads.
    """
    return {
        CACHE_DIRECTORY: str(directory),
        # jax has no setting that forbids writing. No compile takes 31 years.
        "jax_persistent_cache_min_compile_time_secs": 0.0 if write else 1e9,
        "jax_persistent_cache_min_entry_size_bytes": -1,
        # XLA's own caches would put the path of the directory into every key.
        "jax_persistent_cache_enable_xla_caches": "none",
        # With a limit each read would write the time of the access.
        "jax_compilation_cache_max_size": -1,
        "jax_compilation_cache_check_contents": False,
    }


def environment_for(orders: Orders, base: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a command whose processes shall follow these orders.

    Args:
        orders: for the hook in each process. jax's settings are in the environment too, for processes that
            the hook does not reach, such as `python -I`.
        base: the environment to add to.
    """
    path = base.get("PYTHONPATH")
    fixed = {}
    if (orders.calls or orders.serve) and not base.get("PYTHONHASHSEED", "").isdigit():
        fixed["PYTHONHASHSEED"] = "0"  # the order of sets of texts, which may decide a trace
    return {
        **base,
        **fixed,
        **{name.upper(): str(value) for name, value in orders.settings.items()},
        "PYTHONPATH": f"{_SITE}{os.pathsep}{path}" if path else _SITE,
        ENVIRONMENT: json.dumps(asdict(orders)),
    }


def become(command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Replace this process by a command.

    Raises:
        UsageError: the command cannot be started.
    """
    for number in _IGNORED_BY_PYTHON:
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(command[0], list(command), dict(environment))  # noqa: S606 (the user's command)
    except OSError as error:
        raise _cannot_start(command, error) from error


def run_to_end(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command to its end, and pass on the signals that this process gets.

    Returns:
        Its exit status; of a command that a signal ended 128 and the signal's number, as shells have it.

    Raises:
        UsageError: the command cannot be started.
    """
    started: list[int] = []
    early: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        if number in _OF_TERMINAL and _is_in_foreground():
            return
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)
        if not started:
            early.append(number)

    # What this process ignores, such as SIGHUP below nohup, the command ignores too.
    handled = [number for number in _FORWARDED if signal.getsignal(number) != signal.SIG_IGN]
    handlers = {**dict.fromkeys(handled, forward), signal.SIGCHLD: lambda *_: None}
    with _woken_by_signals() as woken:
        before = [(number, signal.signal(number, each)) for number, each in handlers.items()]
        try:
            try:
                child = os.posix_spawnp(
                    command[0], list(command), dict(environment), setsigdef=_IGNORED_BY_PYTHON
                )
            except OSError as error:
                raise _cannot_start(command, error) from error
            started.append(child)
            for number in early:
                os.kill(child, number)
            while not (ended := os.waitpid(child, os.WNOHANG))[0]:
                os.read(woken, 4096)
            code = os.waitstatus_to_exitcode(ended[1])
            return code if code >= 0 else 128 - code
        finally:
            for number, handler in before:
                signal.signal(number, handler)


@contextlib.contextmanager
def _woken_by_signals() -> Iterator[int]:
    """Yield a pipe in which each signal leaves a byte, so that a read of it ends.

    Python handles a signal between two steps of its own. If one comes just before a wait begins, only this
    byte ends the wait.
    """
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    before = signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    try:
        yield woken
    finally:
        signal.set_wakeup_fd(before)
        os.close(woken)
        os.close(wakes)


def _is_in_foreground() -> bool:
    """Return whether a terminal sends its signals to this process, and so to the command as well."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def _cannot_start(command: Sequence[str], error: OSError) -> UsageError:
    return UsageError(
        f"{command[0]}: cannot start the command: {error.strerror}",
        hint="give the command as a shell takes it, behind --",
    )


def make_directory(path: Path) -> Path:
    """Make a directory that only this user can read, and return it.

    Raises:
        StoreError: it cannot be made.
    """
    with store_errors(
        path,
        "make this directory",
        hint="set PREJIT_RUNTIME_CACHE to a directory that can be written",
    ):
        path.mkdir(parents=True, mode=0o700, exist_ok=True)
    return path


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
