"""The process of a server: it binds at once and loads bundles beside the imports of the HTTP stack."""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import gc
import os
import signal
import socket
import stat
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, cast

from prejit.runtime.base.threads_and_forks import start_thread
from prejit.runtime.errors import StoreError
from prejit.server.gate.server_settings import BACKLOG, Settings
from prejit.server.served.answer_checks import AnswerChecks
from prejit.server.served.process_upkeep import (
    allow_many_connections,
    say,
    use_few_arenas,
    use_small_pages,
)
from prejit.server.served.served import Models
from prejit.server.served.served_loading import (
    BundleSource,
    EngineOptions,
    Loading,
    MakeServed,
    Wrap,
)
from prejit.server.served.work_threads import ADMIN
from prejit.server.telemetry.otel_setup import start as start_telemetry
from prejit.server.telemetry.watched_engine import EngineCall, Watch, WatchedEngine, Watcher

if TYPE_CHECKING:
    from prejit.server.engine.engine import Engine
    from prejit.server.telemetry.requestlog import RequestLog
    from prejit.server.telemetry.spans import Telemetry

_SWITCH_SECONDS = 5e-4
"""How long one thread may run Python while another one waits to. A step of an engine gives Python up and
takes it again several times, and may wait so long each time: with Python's 5 ms, tokens waited."""
_FIRST_LISTEN_FD = 3
"""The first file that systemd passes (SD_LISTEN_FDS_START)."""

Address = tuple[str, int] | str
"""A host and port (0: any that is free), or the path of a Unix socket."""


def serve(
    sources: Sequence[BundleSource],
    engines: EngineOptions,
    settings: Settings,
    address: tuple[str, int],
    log: RequestLog | None = None,
    admin: Address | None = None,
    canary: tuple[str, float] | None = None,
) -> None:
    """Serve bundles until a signal ends the process, or a bundle cannot be loaded.

    Args:
        sources: the bundles.
        engines: the options of their engines.
        settings: the limits.
        address: the host and port to listen at; port 0: any that is free. A socket from systemd counts
            instead of it.
        log: where requests are recorded.
        admin: where those listen who run the server; None: nowhere.
        canary: a release of the only bundle, and the share of requests that it answers; None: there is none.

    Raises:
        StoreError: the address cannot be bound, systemd passed no usable socket, or a bundle cannot be read.
        MismatchError, RejectError, UsageError: as `load`.
    """
    _set_up_process()
    inherited = _inherited()
    if inherited is not None:
        address = inherited.getsockname()[:2]
    with inherited or _bind(address) as listening, _admin_socket(admin) as of_admin:
        models = Models()
        url = _shown(listening, address)
        telemetry = start_telemetry()
        make = MakeServed(engines, len(sources), _wrapper(telemetry), models.odd_runs)
        started = None
        if log is not None:
            started = partial(log.start, models, max_tokens=settings.max_tokens)
        loading = Loading(sources, make, models, url, started)
        loading.start()
        checks = AnswerChecks(models, settings.check_seconds)
        # The stack is imported while the bundles are loaded: neither waits for the other.
        from prejit.server.gate.request_clients import Origins, is_loopback
        from prejit.server.http.admin import make_admin
        from prejit.server.http.app import make_app
        from prejit.server.http.uvicorn_server import run
        from prejit.server.releases.canary_runs import Canaries
        from prejit.server.served.bundle_swaps import BundleFollowing, BundleSwaps

        swaps = BundleSwaps(models, make, settings.timeout_seconds, started)
        canaries = Canaries(models, swaps, make_app, log)
        if canary is not None:
            start_thread(partial(canaries.start_when_ready, *canary), "prejit-canary")
        following = None
        if settings.follow_seconds is not None:
            following = BundleFollowing(
                models, swaps, settings.follow_seconds, must_match=engines.must_match
            )
        origins = None
        if settings.keys is None and is_loopback(listening.getsockname()[0]):
            hint = "allow it with --cors, or ask for keys with --keys"
            origins = Origins(address[0], settings.cors, hint)
        guards = None if not isinstance(admin, tuple) else Origins(admin[0])
        admin_app = make_admin(models, settings, swaps, canaries, guards)

        def look_again() -> None:
            if log is not None:
                log.reopen()
            if following is not None:
                following.look()

        try:
            run(
                models,
                replace(settings, log=log, origins=origins, tap=canaries.tap),
                listening,
                loading,
                admin=None if of_admin is None else (of_admin, admin_app),
                reopen=(lambda: None) if log is None else log.reopen,
                look_again=look_again,
                telemetry=telemetry,
            )
        finally:
            closing = (checks, canaries, *(() if following is None else (following,)))
            has_ended = all([each.close() for each in closing])
    if loading.error is not None:
        raise loading.error
    models.close()
    if telemetry is not None:
        telemetry.close()
    if log is not None:
        log.close()
    is_working = any(one.name == ADMIN for one in threading.enumerate())
    # A load cannot be stopped, nor a check, nor a network that stalls.
    if loading.is_alive() or not has_ended or is_working:
        sys.stderr.flush()
        os._exit(0)


def _set_up_process() -> None:
    """Set what is true of the whole process: signals until the server runs, garbage, threads and memory."""
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, _end_early)
    for each in (signal.SIGHUP, signal.SIGUSR1):  # the files were opened just now
        signal.signal(each, signal.SIG_IGN)
    if sys.stderr is not None:  # a daemon may have closed it
        faulthandler.enable()  # native code that crashes shows where each thread was
    gc.disable()  # imports and loads make many objects and no garbage
    sys.setswitchinterval(_SWITCH_SECONDS)
    use_few_arenas()
    use_small_pages()
    allow_many_connections()


def _end_early(number: int, frame: FrameType | None) -> None:
    """End before the server answers, when nothing runs yet. The server replaces this handler."""
    sys.stderr.flush()
    os._exit(0)


def _wrapper(telemetry: Telemetry | None) -> Wrap:
    """Return what wraps engines, so that a log, a canary and telemetry see what they give."""

    def watch(call: EngineCall) -> Watch | None:
        # It imports the HTTP stack: not before the first request.
        from prejit.server.telemetry.requestlog import record

        return record(call)

    watchers: list[Watcher] = [watch]  # the first one: it may change the seed
    if telemetry is not None:
        watchers.append(telemetry.watch)
    return lambda name, engine: cast("Engine", WatchedEngine(name, engine, *watchers))


def _inherited() -> socket.socket | None:
    """Return the socket that systemd opened for this process, if it did (sd_listen_fds(3))."""
    count, process = os.environ.pop("LISTEN_FDS", ""), os.environ.pop("LISTEN_PID", "")
    # It may be meant for the process that started this one.
    if not count or process != str(os.getpid()):
        return None
    hint = "give the .socket unit one ListenStream=, with a port"
    if count != "1":
        raise StoreError(
            f"LISTEN_FDS: expected 1 socket from systemd, found {count:.20}", hint=hint
        )
    try:
        found = socket.socket(fileno=_FIRST_LISTEN_FD)
    except OSError as error:
        raise StoreError(f"LISTEN_FDS: file 3 is no socket: {error.strerror}", hint=hint) from error
    accepts = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if found.family not in (socket.AF_INET, socket.AF_INET6) or not accepts:
        raise StoreError("LISTEN_FDS: systemd's socket does not listen at a TCP port", hint=hint)
    found.set_inheritable(False)
    found.setblocking(False)
    return found


def _bind(address: Address, option: str = "--host or --port") -> socket.socket:
    """Return a socket that listens. Clients that connect now wait in its queue until the server runs.

    Args:
        address: where. A Unix socket is for its owner alone.
        option: what has the address, for errors.
    """
    try:
        if isinstance(address, str):
            listening = _unix_socket(address)
        else:
            family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
            listening = socket.create_server(address, family=family, backlog=BACKLOG)
    except OSError as error:
        shown = address if isinstance(address, str) else f"{address[0]}:{address[1]}"
        raise StoreError(
            f"{shown}: cannot listen: {error.strerror or error}",
            hint=f"another server may listen there, or there is no such place here: give another {option}",
        ) from error
    listening.setblocking(False)
    return listening


@contextlib.contextmanager
def _admin_socket(address: Address | None) -> Iterator[socket.socket | None]:
    """Give a socket that listens at the admin address, if there is one."""
    if address is None:
        yield None
        return
    with _bind(address, "--admin") as listening:
        say(f"admin: {_shown(listening, address)}")
        try:
            yield listening
        finally:
            if isinstance(address, str):
                with contextlib.suppress(OSError):
                    os.unlink(address)


def _unix_socket(path: str) -> socket.socket:
    """Return a Unix socket that listens. It takes the place of one whose server has died."""
    listening = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        if _is_left_behind(path):
            os.unlink(path)
        listening.bind(path)
        listening.listen(BACKLOG)
    except BaseException:
        listening.close()
        raise
    finally:
        os.umask(before)
    return listening


def _is_left_behind(path: str) -> bool:
    with contextlib.suppress(FileNotFoundError), socket.socket(socket.AF_UNIX) as client:
        if stat.S_ISSOCK(os.stat(path).st_mode):
            return client.connect_ex(path) == errno.ECONNREFUSED
    return False


def _shown(listening: socket.socket, address: Address) -> str:
    """Return where a socket listens, as a person reads it."""
    if isinstance(address, str):
        return address
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    return f"http://{host}:{listening.getsockname()[1]}"
