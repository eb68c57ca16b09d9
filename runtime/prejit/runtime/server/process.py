"""The process of a server: it binds at once and loads bundles beside the imports of the HTTP stack."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, cast, final

from prejit.runtime.base.process import seconds_since_exec
from prejit.runtime.errors import StoreError, printable
from prejit.runtime.loader import load
from prejit.runtime.server.served import Models, Served, State
from prejit.runtime.server.settings import BACKLOG, Settings
from prejit.runtime.server.telemetry import start as start_telemetry

if TYPE_CHECKING:
    from prejit.runtime.bundle import Bundle
    from prejit.runtime.engine.engine import Engine
    from prejit.runtime.server.requestlog import RequestLog
    from prejit.runtime.server.spans import Telemetry

_MAX_FILES = 65_536


@dataclass(frozen=True, slots=True)
class Source:
    """A bundle to serve.

    Attributes:
        path: its directory.
        name: the name that it is served under; None: its own.
    """

    path: str
    name: str | None = None


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of the engines; None leaves the engine's own default.

    Attributes:
        slots: how many generations run at once.
        queue: how many more may wait.
        must_match: whether a machine that matches no target is an error instead of a compile.
    """

    slots: int | None = None
    queue: int | None = None
    must_match: bool = False


def serve(
    sources: Sequence[Source],
    engines: EngineOptions,
    settings: Settings,
    address: tuple[str, int],
    log: RequestLog | None = None,
) -> None:
    """Serve bundles until a signal ends the process, or a bundle cannot be loaded.

    Args:
        sources: the bundles.
        engines: the options of their engines.
        settings: the limits.
        address: the host and port to listen at; port 0: any that is free.
        log: where requests are recorded.

    Raises:
        StoreError: the address cannot be bound, or a bundle cannot be read.
        MismatchError, RejectError, UsageError: as `load`.
    """
    gc.disable()  # imports and loads make many objects and no garbage
    _allow_many_connections()
    with _bind(*address) as listening:
        models = Models()
        url = _url(listening, address[0])
        telemetry = start_telemetry()
        wrap = _wrapper(log, telemetry)
        loading = _Loading(sources, engines, models, url, wrap)
        if log is not None:
            loading.when_loaded = partial(log.start, models, max_tokens=settings.max_tokens)
        loading.start()
        # The stack is imported while the bundles are loaded: neither waits for the other.
        from prejit.runtime.server.uvicorn_server import run

        run(models, replace(settings, log=log), listening, loading.when_failed, telemetry)
    if loading.error is not None:
        raise loading.error
    models.close()
    if telemetry is not None:
        telemetry.close()
    if log is not None:
        log.close()
    if loading.is_alive():  # a signal came while a bundle was loaded, which cannot be stopped
        sys.stderr.flush()
        os._exit(0)


@final
class _Loading(threading.Thread):
    """Loads the bundles and makes the server ready.

    Attributes:
        when_loaded: takes the path of each bundle by its name, before the server is ready.
        error: why it failed, or None.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        engines: EngineOptions,
        models: Models,
        url: str,
        wrap: Wrap,
    ) -> None:
        super().__init__(name="prejit-load", daemon=True)
        self._sources = sources
        self._paths = [source.path for source in sources]
        self._engines = engines
        self._models = models
        self._url = url
        self._wrap = wrap
        self._lock = threading.Lock()
        self._on_failure: Callable[[], object] | None = None
        self.when_loaded: Callable[[dict[str, str]], object] | None = None
        self.error: BaseException | None = None

    def when_failed(self, call: Callable[[], object]) -> None:
        """Call this, in any thread, when a bundle cannot be loaded; at once if that has happened."""
        with self._lock:
            self._on_failure = call
            failed = self.error is not None
        if failed:
            call()

    def run(self) -> None:
        """Load, compile what no target holds, and say that the server is ready."""
        try:
            bundles = [self._load(source) for source in self._sources]
            before: State = "loading"
            if any(not bundle.matched for bundle, _ in bundles):
                self._models.change(before, "compiling")
                before = "compiling"
                for bundle, _ in bundles:
                    bundle.prepare()
            if self.when_loaded is not None:
                self.when_loaded(
                    {name: path for (_, name), path in zip(bundles, self._paths, strict=True)}
                )
            gc.freeze()
            gc.enable()
            if self._models.change(before, "ready"):
                names = ", ".join(name for _, name in bundles)
                text = f"{self._url}  {names}  ready in {seconds_since_exec():.2f} s"
                print(printable(text), file=sys.stderr, flush=True)
        except BaseException as error:
            with self._lock:
                self.error = error
                call = self._on_failure
            if call is not None:
                call()

    def _load(self, source: Source) -> tuple[Bundle, str]:
        bundle = load(source.path, on_mismatch="error" if self._engines.must_match else "jit")
        options = {"slots": self._engines.slots, "queue": self._engines.queue}
        engine: Engine = bundle.engine(**{k: v for k, v in options.items() if v is not None})
        name = source.name or bundle.name
        engine = self._wrap(name, engine)
        self._models.add(Served(name, bundle, engine, int(time.time())))
        return bundle, name


Wrap = Callable[[str, "Engine"], "Engine"]
"""Takes the name of a bundle and its engine; returns the engine that requests use."""


def _wrapper(log: RequestLog | None, telemetry: Telemetry | None) -> Wrap:
    """Return what wraps engines, so that the log and telemetry see what they give."""

    def wrap(name: str, engine: Engine) -> Engine:
        if telemetry is not None:
            engine = telemetry.engine(name, engine)
        if log is not None:
            from prejit.runtime.server.requestlog import RecordedEngine

            engine = cast("Engine", RecordedEngine(name, engine))
        return engine

    return wrap


def _bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens. Clients that connect now wait in its queue until the server runs.

    Raises:
        StoreError: it cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise StoreError(
            f"{host}:{port}: cannot listen: {error.strerror or error}",
            hint="another server may have the port: give another --port",
        ) from error
    listening.setblocking(False)
    return listening


def _url(listening: socket.socket, host: str) -> str:
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{listening.getsockname()[1]}"


def _allow_many_connections() -> None:
    """Raise the soft limit of open files: every connection is one, and the default is often 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
