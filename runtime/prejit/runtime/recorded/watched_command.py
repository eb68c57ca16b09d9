"""Run a program's command with jax's settings for a cache and with the hook that watches jax."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
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
