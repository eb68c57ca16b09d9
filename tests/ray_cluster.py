"""A Ray cluster on this machine, in processes of its own, whose nodes can be killed."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_PATIENCE_SECONDS = 180


class Node:
    def __init__(self, environ: dict[str, str], *arguments: str) -> None:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *arguments]
        command += ["--object-store-memory=80000000"]
        self._process = subprocess.Popen(
            command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def kill(self) -> tuple[int, ...]:
        """End it at once, as when a machine loses its power; return the processes that it had."""
        found = (*descendants(self._process.pid), self._process.pid)
        for each in found:
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        self._process.wait()
        return found

    def compiles(self) -> bool:
        return any("prejit.compiler.compile.worker" in each for each in self._commands())

    def _commands(self) -> list[str]:
        found = []
        for each in descendants(self._process.pid):
            with suppress(OSError):
                found.append(Path(f"/proc/{each}/cmdline").read_text().replace("\0", " "))
        return found


@dataclass(frozen=True)
class Cluster:
    """A cluster whose head node compiles nothing."""

    address: str
    environ: dict[str, str]
    logs: Path

    def wait(self) -> None:
        host, _, port = self.address.partition(":")
        for _ in range(_PATIENCE_SECONDS):
            with suppress(OSError):
                socket.create_connection((host, int(port)), 1).close()
                return
            time.sleep(1)
        raise SystemExit(f"expected a head node at {self.address}, found none")

    def join(self) -> Node:
        return Node(self.environ, f"--address={self.address}", "--num-cpus=1")


@contextmanager
def ray_cluster(directory: Path, port: int, client_port: int) -> Iterator[Cluster]:
    """Run the head node of a cluster."""
    environ = os.environ | {"PREJIT_CACHE": str(directory), "RAY_USAGE_STATS_ENABLED": "0"}
    # Nodes of a busy machine would end after 30 s.
    environ["RAY_agent_register_timeout_ms"] = "300000"
    temporary = Path(f"/tmp/r{os.getpid()}")  # short: the path of a socket may have 107 characters
    head = Node(
        environ,
        *("--head", "--num-cpus=0", f"--port={port}", f"--ray-client-server-port={client_port}"),
        "--include-dashboard=false",
        f"--temp-dir={temporary}",
    )
    try:
        yield Cluster(f"127.0.0.1:{port}", environ, temporary / "session_latest" / "logs")
    finally:
        head.kill()
        shutil.rmtree(temporary, ignore_errors=True)


def descendants(parent: int) -> list[int]:
    """Return all processes that a process and its children started and that live."""
    children: dict[int, list[int]] = {}
    for each in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (each / "stat").read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(each.name))
    found, left = list[int](), [parent]
    while left:
        some = children.get(left.pop(), [])
        found += some
        left += some
    return found
