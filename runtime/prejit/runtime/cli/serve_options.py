"""The options of `prejit serve`."""

from __future__ import annotations

import argparse

from prejit.runtime.cli.option_values import address, count, origin, port, seconds, size


def add_serving(command: argparse.ArgumentParser) -> None:
    """Add the options of `prejit serve`."""
    command.add_argument(
        "bundles",
        metavar="[NAME=]BUNDLE",
        nargs="+",
        help="directory of a bundle, and the name that clients give as their model (default: its own)",
    )
    command.add_argument(
        "--host", default="127.0.0.1", help="address to listen at (default 127.0.0.1: this machine)"
    )
    command.add_argument(
        "--port", type=port, default=8000, metavar="N", help="0 takes any free one (default 8000)"
    )
    command.add_argument(
        "--admin",
        type=address,
        metavar="PATH|HOST:PORT",
        help="also listen at a Unix socket or another address for POST /drain and /undrain, which ask for no "
        "key (default: nowhere)",
    )
    command.add_argument(
        "--cors",
        type=origin,
        action="append",
        default=[],
        metavar="ORIGIN",
        help="let web pages of https://HOST:PORT, or of all with *, use the server; may be repeated",
    )
    command.add_argument(
        "--slots",
        type=count,
        metavar="N",
        help="generations that run at once (default: the largest batch of the bundle)",
    )
    command.add_argument(
        "--queue",
        type=count,
        metavar="N",
        help="generations that may wait; more get status 429 (default 256)",
    )
    command.add_argument(
        "--prefix-memory",
        type=size,
        metavar="SIZE",
        help="bytes, or 512M or 2G, for earlier texts of each bundle, so that prompts that begin like them "
        "compute only the rest; 0 keeps none (default: as much as the cache of the slots)",
    )
    command.add_argument(
        "--clients",
        type=count,
        default=1024,
        metavar="N",
        help="requests at once; more get status 503 (default 1024)",
    )
    command.add_argument(
        "--timeout",
        type=seconds,
        default=600.0,
        metavar="S",
        help="the longest time of a request, waiting included; then status 504 (default 600)",
    )
    command.add_argument(
        "--drain-seconds",
        type=seconds,
        default=30.0,
        metavar="S",
        help="after SIGTERM, how long running requests may go on (default 30)",
    )
    command.add_argument(
        "--max-body",
        type=count,
        default=16 << 20,
        metavar="BYTES",
        help=f"the largest body of a request; then status 413 (default {16 << 20})",
    )
    command.add_argument(
        "--max-tokens",
        type=count,
        metavar="N",
        help="the most new tokens that a request may ask for (default: what the context has room for)",
    )
    command.add_argument(
        "--ignore-unknown-fields",
        action="store_true",
        help="ignore fields of requests that the server does not know (without it, they are status 400)",
    )
    command.add_argument(
        "--keys",
        metavar="FILE",
        help="accept only requests with a key of FILE, one in a line: KEY or NAME: KEY, and its limits "
        "behind it; a FILE that changes is read again",
    )
    command.add_argument(
        "--check-seconds",
        type=count,
        metavar="N",
        help="ask for golden answers again every N seconds; the server is not ready while one is wrong "
        "(default: only after requests have failed)",
    )
    command.add_argument(
        "--share-prefixes",
        action="store_true",
        help="let prompts begin with what those of other keys have computed: who guesses a prompt then sees "
        "that it was sent",
    )
    command.add_argument(
        "--log",
        metavar="FILE",
        help="append a JSON line for each request, with its body, for `prejit replay`; - is stdout",
    )
    command.add_argument(
        "--on-mismatch",
        choices=("jit", "error"),
        default="jit",
        help="where this machine matches no target: compile before the server is ready, or fail with exit "
        "status 3 (default jit)",
    )
