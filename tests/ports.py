"""Ports for processes that bind them later than a test chooses them."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from pathlib import Path

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """Return a free port of this machine, which no connection gets by chance until it is bound."""
    above = int(_EPHEMERAL.read_text().split()[0])
    for port in random.SystemRandom().sample(range(max(1024, above - 10_000), above), 100):
        with suppress(OSError), socket.socket() as free:
            free.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port of 100 is free")
