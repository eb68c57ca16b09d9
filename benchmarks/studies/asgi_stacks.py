"""Compare HTTP stacks for `prejit serve`: what their start costs, and what a streamed token costs.

    python -m benchmarks.studies.asgi_stacks [--turns 7]

Each stack serves the same application in a process of its own. The stacks take turns, and each turn measures

- the time of importing the stack, in a fresh interpreter;
- the time from exec to the first answer of a server whose process imports nothing else;
- for 8 clients that each read an event stream of 1,000 pieces: the CPU time of the server's processes for a
  piece, and pieces a second. The clients are threads of this process that read sockets and parse nothing.

The generator yields to the loop after each piece, as a stream of tokens does. Least times and best rates are
printed, because others disturb a turn; of CPU times the medians.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

CLIENTS, PIECES = 8, 1000
PIECE = (
    b'data: {"id":"cmpl-0","object":"text_completion","choices":[{"index":0,"text":" word"}]}\n\n'
)
GET = b"GET /%s HTTP/1.1\r\nHost: x\r\n\r\n"
HEADERS = [(b"content-type", b"text/event-stream")]
MODULE = "benchmarks.studies.asgi_stacks"


@dataclass(frozen=True)
class Stack:
    """A server and how it is used.

    Attributes:
        name: shown in the table.
        imports: the modules that its process needs.
        app: name of the application in this module.
        serve: serves the application at a port, in the child.
    """

    name: str
    imports: tuple[str, ...]
    app: str
    serve: Callable[[str, int], None]


@dataclass(frozen=True)
class Figures:
    """The figures of one turn of a stack: seconds, microseconds, pieces a second."""

    import_seconds: float
    start_seconds: float
    piece_microseconds: float
    pieces_per_second: float


async def bare(scope: Any, receive: Any, send: Any) -> None:
    """Answer without a framework."""
    if scope["type"] == "lifespan":
        while True:
            message = await receive()
            await send({"type": message["type"] + ".complete"})
            if message["type"].endswith("shutdown"):
                return
    await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
    if scope["path"] == "/stream":
        async for piece in pieces():
            await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def pieces() -> AsyncIterator[bytes]:
    """Yield the pieces of a stream."""
    for _ in range(PIECES):
        await asyncio.sleep(0)
        yield PIECE


def starlette() -> Any:
    """Return the application of Starlette."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Route

    async def stream(request: Request) -> Response:
        return StreamingResponse(pieces(), media_type="text/event-stream")

    async def hello(request: Request) -> Response:
        return Response(b"")

    return Starlette(routes=[Route("/stream", stream), Route("/hello", hello)])


def application(name: str) -> Any:
    """Return an application of this module."""
    return bare if name == "bare" else starlette()


def __getattr__(name: str) -> Any:
    # Granian imports its application by name.
    if name == "made_starlette":
        return starlette()
    raise AttributeError(name)


def by_uvicorn(loop: Any) -> Callable[[str, int], None]:
    """Return how uvicorn serves with httptools and a loop."""

    def serve(app: str, port: int) -> None:
        import uvicorn

        uvicorn.run(
            application(app),
            port=port,
            http="httptools",
            ws="none",
            loop=loop,
            lifespan="off",
            log_config=None,
            access_log=False,
        )

    return serve


def by_hypercorn(app: str, port: int) -> None:
    """Serve with hypercorn."""
    from hypercorn.asyncio import serve
    from hypercorn.config import Config

    config = Config()
    config.bind = [f"127.0.0.1:{port}"]
    config.errorlog = None
    asyncio.run(serve(application(app), config))


def by_granian(app: str, port: int) -> None:
    """Serve with granian, which has a process for the sockets and one for the application."""
    from granian import Granian
    from granian.constants import Interfaces

    name = "bare" if app == "bare" else "made_starlette"
    target = f"{MODULE}:{name}"
    Granian(target, port=port, interface=Interfaces.ASGI, log_enabled=False).serve()


UVICORN = ("uvicorn", "uvicorn.protocols.http.httptools_impl")
STARLETTE = ("starlette.applications", "starlette.routing", "starlette.responses")
HYPERCORN = ("hypercorn.asyncio", "hypercorn.config")
STACKS = (
    Stack("uvicorn, no framework", UVICORN, "bare", by_uvicorn("asyncio")),
    Stack("uvicorn + Starlette", (*UVICORN, *STARLETTE), "starlette", by_uvicorn("asyncio")),
    Stack(
        "uvicorn + Starlette on uvloop",
        (*UVICORN, *STARLETTE, "uvloop"),
        "starlette",
        by_uvicorn("uvloop"),
    ),
    Stack("granian, no framework", ("granian",), "bare", by_granian),
    Stack("granian + Starlette", ("granian", *STARLETTE), "starlette", by_granian),
    Stack("hypercorn, no framework", HYPERCORN, "bare", by_hypercorn),
    Stack("hypercorn + Starlette", (*HYPERCORN, *STARLETTE), "starlette", by_hypercorn),
)


def import_seconds(modules: Sequence[str]) -> float:
    """Return the time of importing modules in a fresh interpreter."""
    code = (
        "import sys, time; started = time.perf_counter()\n"
        + "".join(f"import {module}\n" for module in modules)
        + "print(time.perf_counter() - started)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout)


@contextmanager
def process(stack: Stack) -> Iterator[tuple[int, int, float]]:
    """Run a server, and yield its port, its session, and the seconds from exec to its first answer."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", MODULE, "--serve", stack.name, "--port", str(port)]
    started = time.perf_counter()
    child = subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while not answers(port):
            if child.poll() is not None:
                raise SystemExit(f"{stack.name}: the server ended with status {child.returncode}")
            time.sleep(0.001)
        yield port, child.pid, time.perf_counter() - started
    finally:
        child.terminate()
        child.wait(30)


def answers(port: int) -> bool:
    """Return whether a server answers."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            connection.sendall(GET % b"hello")
            return connection.recv(1000).startswith(b"HTTP/1.1 200")
    except ConnectionError:
        return False


def cpu_seconds(session: int) -> float:
    """Return the CPU time of all processes of a session."""
    ticks = 0
    for name in os.listdir("/proc"):
        try:
            with open(f"/proc/{name}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
        except (OSError, NotADirectoryError):
            continue
        if int(fields[3]) == session:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def read_stream(port: int) -> None:
    """Read one stream to its end."""
    received, tail = 0, b""
    with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
        connection.sendall(GET % b"stream")
        while not tail.endswith(b"0\r\n\r\n"):
            part = connection.recv(1 << 16)
            if not part:
                raise SystemExit(f"the stream ended after {received} bytes")
            received += len(part)
            tail = (tail + part)[-5:]
    if received < PIECES * len(PIECE):
        raise SystemExit(f"expected {PIECES * len(PIECE)} bytes or more, found {received}")


def measure(stack: Stack) -> Figures:
    """Measure one turn of a stack."""
    imports = import_seconds(stack.imports)
    with process(stack) as (port, session, start):
        read_stream(port)  # the first one compiles nothing and is slower all the same
        before, began = cpu_seconds(session), time.perf_counter()
        rounds = 3
        for _ in range(rounds):
            threads = [threading.Thread(target=read_stream, args=(port,)) for _ in range(CLIENTS)]
            for each in threads:
                each.start()
            for each in threads:
                each.join()
        seconds, used = time.perf_counter() - began, cpu_seconds(session) - before
    count = rounds * CLIENTS * PIECES
    return Figures(imports, start, used / count * 1e6, count / seconds)


def main(argv: Sequence[str] | None = None) -> None:
    """Print a table, or serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=7, help="turns of each stack (default 7)")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.serve is not None:
        stack = next(each for each in STACKS if each.name == options.serve)
        stack.serve(stack.app, options.port)
        return
    found: dict[str, list[Figures]] = {stack.name: [] for stack in STACKS}
    for turn in range(options.turns):
        for stack in STACKS if turn % 2 else STACKS[::-1]:
            found[stack.name].append(measure(stack))
    print(
        "| stack | import, ms | exec to first answer, ms | CPU for a piece, us | pieces a second |"
    )
    print("| --- | ---: | ---: | ---: | ---: |")
    for name, turns in found.items():
        imports = min(each.import_seconds for each in turns)
        starts = min(each.start_seconds for each in turns)
        costs = statistics.median(each.piece_microseconds for each in turns)
        rates = max(each.pieces_per_second for each in turns)
        print(f"| {name} | {imports * 1e3:.0f} | {starts * 1e3:.0f} | {costs:.1f} | {rates:,.0f} |")


if __name__ == "__main__":
    main()
