"""Values of options on the command line: each function returns one, or raises ArgumentTypeError."""

from __future__ import annotations

import contextlib
import math
import re
from argparse import ArgumentTypeError


def address(text: str) -> tuple[str, int] | str:
    """Return a host and port, or the path of a Unix socket."""
    if "/" in text and "://" not in text:
        return text
    host, _, number = text.rpartition(":")
    if not host or "/" in host or not _is_port(number):
        raise ArgumentTypeError(
            f"expected the path of a socket, with a slash, or HOST:PORT, found {text!r:.80}"
        )
    return host.removeprefix("[").removesuffix("]"), int(number)


def origin(text: str) -> str:
    """Return the origin of a web page, or `*`."""
    if text != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s?#@]+", text):
        raise ArgumentTypeError(
            f"expected an origin such as https://app.example, without a path, or *, found {text!r:.80}"
        )
    return text.lower()  # as browsers send it


def count(text: str) -> int:
    """Return a number from 1."""
    if not re.fullmatch("[0-9]{1,18}", text) or int(text) < 1:
        raise ArgumentTypeError(f"expected 1 or more, found {text!r:.40}")
    return int(text)


def size(text: str) -> int:
    """Return a number of bytes."""
    if (match := re.fullmatch("([0-9]{1,15})([KMGT]?)", text)) is None:
        raise ArgumentTypeError(
            f"expected a number of bytes, or one with K, M, G or T behind it, found {text!r:.40}"
        )
    return int(match[1]) << 10 * " KMGT".index(match[2] or " ")


def seconds(text: str) -> float:
    """Return a number of seconds."""
    number = math.nan
    with contextlib.suppress(ValueError):
        number = float(text)
    if not 0 <= number < 1e9:  # NaN is no number of seconds either
        raise ArgumentTypeError(f"expected a number of seconds, found {text!r:.40}")
    return number


def port(text: str) -> int:
    """Return a port."""
    if not _is_port(text):
        raise ArgumentTypeError(f"expected a port, 0 to 65535, found {text!r:.40}")
    return int(text)


def _is_port(text: str) -> bool:
    return re.fullmatch("[0-9]{1,5}", text) is not None and int(text) <= 65_535
