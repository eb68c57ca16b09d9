"""`prejit serve`: an HTTP server in front of bundles."""

from __future__ import annotations

import importlib.util
import os
import re
from argparse import Namespace
from collections.abc import Sequence

from prejit.runtime.base.process import importing
from prejit.runtime.cli.output import warnings_on_stderr
from prejit.runtime.device.start import import_numpy, read_library_ahead
from prejit.runtime.errors import UsageError

_PACKAGES = ("starlette", "uvicorn", "httptools", "msgspec", "prometheus_client")
_NAMED = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*)=(?P<path>.+)", re.DOTALL)


def serve(options: Namespace) -> int:
    """Serve bundles until a signal ends the process."""
    read_library_ahead()
    with importing():
        import_numpy()  # before any other thread runs: see there
    check_server_packages("serve")
    with warnings_on_stderr():
        from prejit.runtime.server.loading import BundleSource, EngineOptions
        from prejit.runtime.server.process import serve
        from prejit.runtime.server.settings import Settings

        sources = [BundleSource(path, name) for name, path in named_paths(options.bundles)]
        keys, log = None, None
        if options.keys is not None:
            from prejit.runtime.server.keys import read_keys

            keys = read_keys(options.keys)
        if options.log is not None:
            from prejit.runtime.server.requestlog import RequestLog

            log = RequestLog(options.log)
        settings = Settings(
            body_bytes=options.max_body,
            max_tokens=options.max_tokens,
            timeout_seconds=options.timeout,
            clients=options.clients,
            drain_seconds=options.drain_seconds,
            check_seconds=options.check_seconds,
            keys=keys,
            cors=tuple(options.cors),
            ignore_unknown_fields=options.ignore_unknown_fields,
        )
        must_match = options.on_mismatch == "error"
        engines = EngineOptions(
            options.slots, options.queue, options.prefix_memory, must_match, options.share_prefixes
        )
        serve(sources, engines, settings, (options.host, options.port), log, options.admin)
    return 0


def check_server_packages(command: str) -> None:
    """Check, before anything begins, that the packages of the server are installed.

    Args:
        command: the command that needs them.

    Raises:
        UsageError: some are missing.
    """
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"`prejit {command}`: expected the packages of the server, found no {', '.join(missing)}",
            hint="pip install 'prejit[server]'",
        )


def named_paths(texts: Sequence[str]) -> list[tuple[str | None, str]]:
    """Return the name and the path of each `PATH` or `NAME=PATH`; None: it gives no name.

    Raises:
        UsageError: two have the same name.
    """
    found: list[tuple[str | None, str]] = []
    for text in texts:
        match = None if os.path.exists(text) else _NAMED.fullmatch(text)
        found.append((match["name"], match["path"]) if match else (None, text))
    names = [name for name, _ in found if name is not None]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"expected each name once, found {name!r} twice")
    return found
