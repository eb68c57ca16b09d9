"""Servers in a thread of the tests' process."""

import contextlib
import json
import socket
import threading
from dataclasses import dataclass

import uvicorn
from tests.waiting import wait_for

from prejit.server.engine.engine import Engine
from prejit.server.http.app import make_app
from prejit.server.http.connections import WaitingConnections
from prejit.server.http.uvicorn_server import configure
from prejit.server.served.served import Served


def served(bundle, name=None, **options):
    """A bundle with an engine that has these options. Its `close` closes the engine."""
    return Served(name or bundle.name, bundle, Engine(bundle, **options), 1_700_000_000)


@dataclass(frozen=True)
class Running:
    """A server that answers at a port, and uvicorn's own."""

    port: int
    server: uvicorn.Server

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def connect(self, seconds=60):
        return socket.create_connection(("127.0.0.1", self.port), timeout=seconds)

    def send(self, path, body):
        """Send a request with a body of JSON, and return its connection without waiting for the answer."""
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
        connection = self.connect()
        connection.sendall(head.encode() + content)
        return connection

    def requests(self):
        """How many requests are answered now."""
        return len(self.server.server_state.tasks)


@contextlib.contextmanager
def running(models, settings, app=None):
    """A server on a free port; `app` takes the place of the one for the models."""
    config = configure(make_app(models, settings) if app is None else app)
    assert isinstance(config.http, WaitingConnections)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listening:
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            wait_for(lambda: server.started)
            yield Running(listening.getsockname()[1], server)
        finally:
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive()


def answer(connection):
    """All that a server sends until it closes."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)
