"""uvicorn as this project runs it: our connections, our signals, none of its logs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, final

import uvicorn

from prejit.server.gate.server_settings import BACKLOG, Settings
from prejit.server.http.admin import drain
from prejit.server.http.app import make_app
from prejit.server.http.connections import HEAD_SECONDS, WaitingConnections
from prejit.server.served.process_upkeep import say, trim
from prejit.server.served.served import Models
from prejit.server.served.served_loading import Loading

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from prejit.server.telemetry.spans import Telemetry

FLUSH_SECONDS = 5
"""How long clients have to read what is buffered, after the last request is finished."""
_TRIM_SECONDS = 10
"""How often free memory is given back, if no request runs then."""


def run(
    models: Models,
    settings: Settings,
    listening: socket.socket,
    loading: Loading,
    *,
    admin: tuple[socket.socket, ASGIApp] | None,
    reopen: Callable[[], object],
    look_again: Callable[[], object],
    telemetry: Telemetry | None = None,
) -> None:
    """Answer requests until a signal comes or loading fails.

    Args:
        models: the served bundles.
        settings: the limits.
        listening: a socket that listens.
        loading: what loads the bundles.
        admin: a socket that listens for those who run the server, and what answers them; None: there is
            none.
        reopen: opens the files again that another program may have moved, after SIGUSR1.
        look_again: does that, and looks what followed paths lead to now, after SIGHUP.
        telemetry: what traces requests; None: nothing does.
    """
    app: Any = make_app(models, settings)
    if telemetry is not None:
        app = telemetry.app(app)
    config = configure(app)
    server = _Server(config, models, settings, loading.answers, admin, reopen, look_again)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loading.when_failed(lambda: loop.call_soon_threadsafe(server.stop))
        await server.serve([listening])

    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(main())


def configure(app: Any) -> uvicorn.Config:
    """Return how uvicorn answers requests with an ASGI application."""
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # garbage of clients is no news
    return uvicorn.Config(
        app,
        http=WaitingConnections(),  # type: ignore[arg-type]  # uvicorn only calls it
        # Beside a model that decodes, asyncio's own loop takes a quarter more CPU time for a token.
        loop="uvloop",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=HEAD_SECONDS,
        timeout_graceful_shutdown=FLUSH_SECONDS,
    )


@final
class _Server(uvicorn.Server):
    """uvicorn's server, which drains before it ends."""

    def __init__(
        self,
        config: uvicorn.Config,
        models: Models,
        settings: Settings,
        when_answering: Callable[[], None],
        admin: tuple[socket.socket, ASGIApp] | None = None,
        reopen: Callable[[], object] = lambda: None,
        look_again: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(config)
        self._admin = admin
        self._reopen, self._look_again = reopen, look_again
        self._has_terminal = os.isatty(0)
        self._when_answering = when_answering
        self._models = models
        self._settings = settings
        self._ending: asyncio.Task[None] | None = None
        self._exits = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take the signals that end a server, and those after which it looks at files again."""
        loop = asyncio.get_running_loop()
        for one in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(one, self._on_signal, one)
        loop.add_signal_handler(signal.SIGUSR1, self._reopen)
        loop.add_signal_handler(signal.SIGHUP, self._on_hangup)
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections."""
        await super().startup(sockets)
        if self._admin is not None:
            self.servers.append(await self._listen(*self._admin))
        self._when_answering()

    async def _listen(self, admin: socket.socket, app: ASGIApp) -> asyncio.Server:
        """Answer at the admin address, with connections that end with the others."""
        loop = asyncio.get_running_loop()
        is_unix = admin.family == socket.AF_UNIX
        create: Any = loop.create_unix_server if is_unix else loop.create_server
        config = configure(app)
        connections: Any = config.http
        make = partial(connections, config, self.server_state, {})
        server: asyncio.Server = await create(make, sock=admin, backlog=BACKLOG)
        return server

    async def main_loop(self) -> None:
        """Set the date of responses each second, until the server ends, and give memory back at rest.

        uvicorn's own loop looks ten times a second whether it is to end.
        """
        for second in itertools.count(1):
            if await self.on_tick(0):
                return
            if second % _TRIM_SECONDS == 0 and not self.server_state.tasks:
                trim()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._exits.wait(), 1)

    def stop(self) -> None:
        """End soon, without waiting for requests."""
        self.should_exit = True
        self._exits.set()

    def _on_hangup(self) -> None:
        # Somebody has closed it, and cannot press Ctrl-C.
        if self._has_terminal and not os.isatty(0):
            self._on_signal(signal.SIGHUP)
        else:
            self._look_again()

    def _on_signal(self, number: signal.Signals) -> None:
        if self._ending is not None:
            _end_at_once(number, None)
        loop = asyncio.get_running_loop()
        for one in (signal.SIGTERM, signal.SIGINT):
            # The loop may wait for an engine's step by then, or have ended.
            loop.remove_signal_handler(one)
            signal.signal(one, _end_at_once)
        self._ending = loop.create_task(self._end(number))

    async def _end(self, number: signal.Signals) -> None:
        """Finish what runs, for a limited time, and end."""
        seconds = self._settings.drain_seconds
        say(f"{number.name}: finishing what runs, for at most {seconds:g} seconds")
        await drain(self._models, seconds, ends=True)
        self._models.close()  # what is left fails, so that its clients get an answer
        self.stop()


def _end_at_once(number: int, frame: FrameType | None) -> None:
    try:
        say(f"{signal.Signals(number).name} came again: ending at once")
    finally:  # it may have interrupted another message
        os._exit(128 + number)
