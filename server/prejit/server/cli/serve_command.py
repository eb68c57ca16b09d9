"""`prejit serve`: an HTTP server in front of bundles."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

import click

from prejit.runtime.base.process_facts import importing
from prejit.runtime.cli.command_options import (
    CHECK_FINITE,
    COUNT,
    FILE,
    PATH,
    SECONDS,
    SIZE,
    TRUST,
    VERBOSE,
    Number,
    on_mismatch_option,
)
from prejit.runtime.cli.output import warnings_on_stderr
from prejit.runtime.device.quick_start import import_numpy, read_library_ahead
from prejit.runtime.errors import UsageError
from prejit.runtime.ship.reference import is_reference, parse_reference


def _address(text: str) -> tuple[str, int] | str:
    """Return a host and port, or the path of a Unix socket."""
    if "/" in text and "://" not in text:
        return text
    host, _, port = text.rpartition(":")
    if not host or "/" in host or not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65_535:
        raise click.BadParameter(
            f"expected the path of a socket, with a slash, or HOST:PORT, found {text!r:.80}"
        )
    return host.removeprefix("[").removesuffix("]"), int(port)


def _origin(text: str) -> str:
    """Return the origin of a web page, or `*`."""
    if text != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s?#@]+", text):
        raise click.BadParameter(
            f"expected an origin such as https://app.example, without a path, or *, found {text!r:.80}"
        )
    return text.lower()  # as browsers send it


@click.command(
    epilog="Examples:\n\n\b\n  prejit serve artifacts/demo\n"
    "  prejit serve artifacts/assistant search=artifacts/encoder --keys keys.txt --log requests.jsonl\n"
    "  prejit serve artifacts/demo --host 0.0.0.0 --port 8080 --on-mismatch error\n"
    "  prejit serve oci://registry.example/models/demo:prod --follow 60"
)
@click.argument(
    "bundles",
    nargs=-1,
    required=True,
    metavar="[NAME=]BUNDLE...",
    help="A directory or a reference, and before it the name that clients give as their model "
    "(default: its own).",
)
@click.option(
    "--adapter",
    "adapters",
    multiple=True,
    metavar="[MODEL:]NAME=DIR",
    help="Load an adapter of PEFT, which requests choose as MODEL:NAME; may be repeated.",
)
@TRUST
@VERBOSE
@click.option("--host", default="127.0.0.1", metavar="HOST", help="Address to listen at.")
@click.option(
    "--port",
    type=click.IntRange(0, 65_535),
    default=8000,
    metavar="N",
    help="Port to listen at; 0 takes any free one.",
)
@click.option(
    "--admin",
    type=_address,
    metavar="PATH|HOST:PORT",
    help="Also listen at a Unix socket or another address for POST /drain, /undrain, /swap, /canary, /add, "
    "/remove, /sleep, /wake and /profile, which ask for no key (default: nowhere).",
)
@click.option(
    "--cors",
    type=_origin,
    multiple=True,
    metavar="ORIGIN",
    help="Let web pages of https://HOST:PORT, or of all with *, use the server; may be repeated.",
)
@click.option(
    "--slots",
    **COUNT,
    help="Generations that run at once (default: the largest batch of the bundle).",
)
@click.option(
    "--queue", **COUNT, help="Generations that may wait; more get status 429 (default: 256)."
)
@click.option(
    "--prefix-memory",
    **SIZE,
    help="Memory, such as 512M or 2G, for earlier texts of each bundle, so that prompts that begin like them "
    "compute only the rest; 0 keeps none (default: as much as the cache of the slots).",
)
@click.option(
    "--memory",
    **SIZE,
    help="Memory, such as 4G, that caches and programs of all bundles take together; weights do not count. "
    "Bundles sleep until a request wakes them. The least recently used one sleeps again when another needs "
    "memory (default: what is free, and none sleeps).",
)
@click.option("--clients", **COUNT, default=1024, help="Requests at once; more get status 503.")
@click.option(
    "--timeout",
    "timeout_seconds",
    **SECONDS,
    default=600.0,
    help="The longest time of a request, waiting included; then status 504.",
)
@click.option(
    "--drain-seconds",
    **SECONDS,
    default=30.0,
    help="After SIGTERM, how long running requests may go on.",
)
@click.option(
    "--max-body",
    "body_bytes",
    **SIZE,
    default="16M",
    help="The largest body of a request; then status 413.",
)
@click.option(
    "--max-tokens",
    **COUNT,
    help="The most new tokens that a request may ask for (default: what the context has room for).",
)
@click.option(
    "--ignore-unknown-fields",
    is_flag=True,
    help="Ignore fields of requests that the server does not know (without it, they are status 400).",
)
@click.option(
    "--keys",
    **FILE,
    help="Accept only requests with a key of FILE, one in a line: KEY or NAME: KEY, and its limits behind "
    "it; a FILE that changes is read again.",
)
@click.option(
    "--check-seconds",
    type=click.IntRange(min=1),
    metavar="SECONDS",
    help="Ask for golden answers again after so many seconds; the server is not ready while one is wrong "
    "(default: only after requests have failed).",
)
@click.option(
    "--follow",
    "follow_seconds",
    type=Number(1, 1e9),
    metavar="SECONDS",
    help="Look so often, and after SIGHUP, what tags and directories lead to, and let another bundle take "
    "the place of the one that is served, without a dropped request (default: never).",
)
@click.option(
    "--canary",
    type=PATH,
    metavar="NEW",
    help="Try this release beside the only bundle: it answers --share of the requests, and takes its place "
    "or is dropped by the limits of [slo].",
)
@click.option(
    "--share",
    default="5%",
    metavar="PERCENT",
    help="The share of requests that --canary answers, by key or else by request id.",
)
@click.option(
    "--share-prefixes",
    is_flag=True,
    help="Let prompts begin with what those of other keys have computed: who guesses a prompt then sees that "
    "it was sent.",
)
@click.option(
    "--log",
    **FILE,
    help="Append a JSON line for each request, with its body, for `prejit replay`; - is stdout.",
)
@CHECK_FINITE
@on_mismatch_option(
    "Where this machine matches no target: compile before the server is ready, or fail with exit status 3."
)
def serve(
    bundles: tuple[str, ...],
    adapters: tuple[str, ...],
    host: str,
    port: int,
    admin: tuple[str, int] | str | None,
    slots: int | None,
    queue: int | None,
    prefix_memory: int | None,
    memory: int | None,
    share_prefixes: bool,
    canary: str | None,
    share: str,
    check_finite: bool,
    keys: str | None,
    log: str | None,
    on_mismatch: str,
    **settings: Any,
) -> int:
    """Serve bundles over HTTP: OpenAI's API, the Open Inference Protocol, metrics, a page.

    A signal ends it.
    """
    if not settings["body_bytes"]:
        raise click.BadParameter("expected 1 or more, found 0", param_hint="'--max-body'")
    read_library_ahead()
    with importing():
        import_numpy()  # before any other thread runs: see there
    with warnings_on_stderr():
        from prejit.server.gate.server_settings import Settings
        from prejit.server.http.server_process import serve
        from prejit.server.served.served_loading import BundleSource, EngineOptions

        must_match = on_mismatch == "error"
        named = named_paths(bundles)
        if settings["follow_seconds"] is not None and all(_is_pinned(path) for _, path in named):
            raise click.BadParameter(
                "expected a directory or a tag, such as oci://HOST/REPOSITORY:prod, found digests only",
                param_hint="'--follow'",
            )
        tried: tuple[str, float] | None = None
        of_each = _adapters_of(adapters, named)
        sources = [
            BundleSource(path, name, tuple(of_each[place]))
            for place, (name, path) in enumerate(named)
        ]
        if keys is not None:
            from prejit.server.gate.api_keys import Keys
        if log is not None:
            from prejit.server.telemetry.requestlog import RequestLog

        if canary is not None:
            from prejit.server.releases.canary_runs import share_of

            if len(sources) > 1:
                found = f"found {len(sources)}; start canaries of several with POST /canary"
                raise click.BadParameter(f"expected one bundle, {found}", param_hint="'--canary'")
            tried = canary, share_of(share)
        limits = Settings(keys=None if keys is None else Keys(keys), **settings)
        engines = EngineOptions(
            slots, queue, prefix_memory, must_match, share_prefixes, memory, check_finite
        )
        requests = None if log is None else RequestLog(log)
        serve(sources, engines, limits, (host, port), requests, admin, tried)
    return 0


def _adapters_of(
    texts: Sequence[str], named: Sequence[tuple[str | None, str]]
) -> list[list[tuple[str, str]]]:
    """Return the adapters of each bundle, of texts `[MODEL:]NAME=DIR`."""
    found: list[list[tuple[str, str]]] = [[] for _ in named]
    names = [name for name, _ in named]
    for text in texts:
        whole, _, path = text.partition("=")
        model, colon, adapter = whole.rpartition(":")
        known = [name for name in names if name]
        problem = ""
        if not adapter or not path or not (colon or len(names) == 1):
            problem = f"expected {'NAME=DIR' if len(names) == 1 else 'MODEL:NAME=DIR'}"
        elif colon and model not in known:  # the own name of a bundle shows when it is loaded
            problem = f"expected a bundle that is given as {model or 'MODEL'}=BUNDLE"
        if problem:
            given = f" beside {', '.join(f'{name}=BUNDLE' for name in known)}" if known else ""
            raise click.BadParameter(
                f"{problem}, found {text!r:.80}{given}", param_hint="'--adapter'"
            )
        found[names.index(model) if colon else 0].append((adapter, path))
    return found


def _is_pinned(path: str) -> bool:
    """Return whether a path leads to one bundle for ever."""
    return is_reference(path) and bool(parse_reference(path).digest)


def named_paths(texts: Sequence[str]) -> list[tuple[str | None, str]]:
    """Return the name and the path of each `PATH` or `NAME=PATH`; None: it gives no name.

    Raises:
        UsageError: two have the same name.
    """
    from prejit.server.served.served_loading import MODEL_NAME  # its imports take time

    found: list[tuple[str | None, str]] = []
    for text in texts:
        name, _, path = text.partition("=")
        is_named = path and MODEL_NAME.fullmatch(name) and not os.path.exists(text)
        found.append((name, path) if is_named else (None, text))
    names = [name for name, _ in found if name is not None]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"expected each name once, found {name!r} twice")
    return found
