"""Two network namespaces with a link of a limited rate between them: a server in one, a client in the other.

    sudo python -m benchmarks.ship.limited_link 1 0.02      1 Gbit/s and 20 ms: what curl gets of it

The rate is that of the kernel's token bucket (tc-tbf) on both ends of a veth pair. The round trip is that of
tc-netem. A kernel without netem gets a relay beside the server, which holds each piece for half of the round
trip in each direction, and each new connection for all of it: TCP itself sees a short one, and starts faster.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.ports import free_port

SERVER, CLIENT = "10.231.7.1", "10.231.7.2"
_BURST = "512kb"
_PIECE_BYTES = 256 << 10
_HELD_PIECES = 400
"""Pieces that the relay holds at most: 100 MB, four times what is on the way at 10 Gbit/s and 20 ms."""
_SERVE = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("content-length", str(300 << 20))
        self.end_headers()
        for _ in range(300):
            self.wfile.write(bytes(1 << 20))
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@dataclass(frozen=True)
class Link:
    """A link that exists.

    Attributes:
        name: of its namespaces, which are NAME-server and NAME-client.
        round_trip: seconds.
        has_netem: whether the kernel makes the round trip; else `relayed` does.
    """

    name: str
    round_trip: float
    has_netem: bool

    def in_server(self, command: Sequence[str]) -> tuple[str, ...]:
        """Return a command that runs where the server is."""
        return "ip", "netns", "exec", f"{self.name}-server", *command

    def in_client(self, command: Sequence[str]) -> tuple[str, ...]:
        """Return a command that runs where the client is."""
        return "ip", "netns", "exec", f"{self.name}-client", *command

    @contextlib.contextmanager
    def relayed(self, port: int) -> Iterator[str]:
        """Give `host:port` by which the client reaches a server on a port of 127.0.0.1 in its namespace."""
        reached = free_port()
        delay = 0.0 if self.has_netem else self.round_trip / 2
        words = (__spec__.name, "relay", str(reached), str(port), str(delay))
        process = subprocess.Popen(self.in_server((sys.executable, "-m", *words)))
        try:
            time.sleep(0.5)
            yield f"{SERVER}:{reached}"
        finally:
            process.kill()
            process.wait()


def missing() -> str:
    """Return why this machine can make no link; empty: it can."""
    if os.geteuid():
        return "only root makes network namespaces"
    return "" if shutil.which("tc") and shutil.which("ip") else "iproute2 is not installed"


@contextlib.contextmanager
def limited_link(gigabits: float, round_trip: float) -> Iterator[Link]:
    """Make a link, and remove it in the end.

    Args:
        gigabits: a second, in each direction.
        round_trip: seconds.

    Raises:
        OSError: `missing` says why.
    """
    if reason := missing():
        raise OSError(reason)
    name = f"pj{os.getpid() % 100_000}"
    server, client = f"{name}-server", f"{name}-client"
    try:
        for space in (server, client):
            _run("ip", "netns", "add", space)
        _run(
            "ip",
            "link",
            "add",
            f"{name}s",
            "netns",
            server,
            *("type", "veth"),
            "peer",
            "name",
            f"{name}c",
        )
        _run("ip", "link", "set", f"{name}c", "netns", client)
        has_netem = True
        for space, device, address in ((server, f"{name}s", SERVER), (client, f"{name}c", CLIENT)):
            inside = ("ip", "netns", "exec", space)
            _run(*inside, "ip", "addr", "add", f"{address}/24", "dev", device)
            for each in (device, "lo"):
                _run(*inside, "ip", "link", "set", each, "up")
            tc = (*inside, "tc", "qdisc", "add", "dev", device)
            limit = ("rate", f"{gigabits}gbit", "burst", _BURST, "limit", "32mb")
            _run(*tc, "root", "handle", "1:", "tbf", *limit)
            netem = (
                *tc,
                "parent",
                "1:",
                "netem",
                "delay",
                f"{round_trip * 500}ms",
                "limit",
                "100000",
            )
            has_netem = has_netem and not subprocess.run(netem, capture_output=True).returncode
        yield Link(name, round_trip, has_netem)
    finally:
        for space in (server, client):
            subprocess.run(("ip", "netns", "del", space), capture_output=True)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


def relay(port: int, target: int, delay: float) -> None:
    """Take connections on a port and pass them to a port of 127.0.0.1, each piece after a delay."""
    with socket.create_server((SERVER, port), backlog=128) as listening:
        while True:
            taken, _ = listening.accept()
            threading.Thread(target=_connect, args=(taken, target, delay), daemon=True).start()


def _connect(taken: socket.socket, target: int, delay: float) -> None:
    time.sleep(2 * delay)
    try:
        onward = socket.create_connection(("127.0.0.1", target))
    except OSError:
        taken.close()
        return
    for source, sink in ((taken, onward), (onward, taken)):
        sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pieces: queue.Queue[tuple[float, bytes]] = queue.Queue(_HELD_PIECES)
        threading.Thread(target=_receive, args=(source, pieces, delay), daemon=True).start()
        threading.Thread(target=_send, args=(sink, pieces), daemon=True).start()


def _receive(source: socket.socket, pieces: queue.Queue[tuple[float, bytes]], delay: float) -> None:
    piece = b"begin"
    while piece:
        try:
            piece = source.recv(_PIECE_BYTES)
        except OSError:
            piece = b""
        pieces.put((time.monotonic() + delay, piece))


def _send(sink: socket.socket, pieces: queue.Queue[tuple[float, bytes]]) -> None:
    is_open = True
    while True:
        due, piece = pieces.get()
        time.sleep(max(0.0, due - time.monotonic()))
        try:
            if is_open and piece:
                sink.sendall(piece)
            elif is_open:
                sink.shutdown(socket.SHUT_WR)
        except OSError:
            is_open = False  # the other side is gone: what still comes is dropped
        if not piece:
            return


def main(words: Sequence[str]) -> None:
    """Relay, or show what curl gets of a link."""
    if words[:1] == ["relay"]:
        relay(int(words[1]), int(words[2]), float(words[3]))
    gigabits, round_trip = map(float, words)
    with limited_link(gigabits, round_trip) as link:
        port = free_port()
        server = subprocess.Popen(
            link.in_server((sys.executable, "-c", _SERVE, str(port))), stderr=subprocess.DEVNULL
        )
        try:
            time.sleep(1)
            with link.relayed(port) as at:
                said = "first byte %{time_starttransfer} s, %{speed_download} bytes/s\\n"
                curl = ("curl", "-sS", "-o", "/dev/null", "-w", said, f"http://{at}/")
                for _ in range(3):
                    subprocess.run(link.in_client(curl), check=True)
        finally:
            server.kill()
            server.wait()
        print("round trip by", "netem" if link.has_netem else "the relay")


if __name__ == "__main__":
    main(sys.argv[1:])
