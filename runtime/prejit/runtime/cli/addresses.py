"""Addresses and origins on the command line."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError


def address(text: str) -> tuple[str, int] | str:
    """Return a host and port, or the path of a Unix socket.

    Raises:
        ArgumentTypeError: it is neither.
    """
    if "/" in text:
        return text
    host, _, port = text.rpartition(":")
    if not host or not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65_535:
        raise ArgumentTypeError(
            f"expected the path of a socket, with a slash, or HOST:PORT, found {text!r:.80}"
        )
    return host.removeprefix("[").removesuffix("]"), int(port)


def origin(text: str) -> str:
    """Return the origin of a web page, or `*`.

    Raises:
        ArgumentTypeError: it is neither.
    """
    if text != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s?#@]+", text):
        raise ArgumentTypeError(
            f"expected an origin such as https://app.example, without a path, or *, found {text!r:.80}"
        )
    return text.lower()  # as browsers send it
