"""Small HTTP servers of tests, on a free port of this machine."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class QuietHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def handle(self) -> None:
        try:
            super().handle()
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def content(self) -> bytes:
        return self.rfile.read(int(self.headers.get("content-length", 0)))

    def reply(self, status: int, content: bytes = b"", /, **headers: str) -> None:
        """Answer. An underscore in a header's name stands for a hyphen."""
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextmanager
def serving(
    handler: type[QuietHandler], address: str = "127.0.0.1", tls: ssl.SSLContext | None = None
) -> Iterator[str]:
    """Serve requests on a free port. Yields `host:port`."""
    with ThreadingHTTPServer((address, 0), handler) as server:
        server.daemon_threads = True
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"{address}:{server.server_port}"
        finally:
            server.shutdown()
