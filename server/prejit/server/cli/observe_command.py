"""`prejit observe`: files for those who watch servers."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import click

from prejit.runtime.cli.command_options import DIR
from prejit.runtime.cli.output import print_text
from prejit.runtime.errors import UsageError
from prejit.server.telemetry import monitoring_files

_IN_DIR = "runbooks"
"""The directory of the runbooks among the files that are written."""


@click.group()
def observe() -> None:
    """Write dashboards of Grafana, alert rules of Prometheus and runbooks for servers."""


@observe.command(
    epilog="Examples:\n\n\b\n  prejit observe init watch\n"
    "  prejit observe init watch --runbooks https://wiki.example/runbooks --force"
)
@click.argument("directory", **DIR, help="Directory for the files.")
@click.option(
    "--runbooks",
    default=_IN_DIR,
    metavar="URL",
    help="Where people on call find the runbooks; alerts link there. The default is in DIR.",
)
@click.option("--force", is_flag=True, help="Overwrite files that have other content.")
def init(directory: str, runbooks: str, force: bool) -> int:
    """Write the files, and print their paths."""
    if runbooks != _IN_DIR and not re.match("https?://[^/]", runbooks):
        place = runbooks if runbooks and ":" not in runbooks else "HOST/PATH"
        raise UsageError(
            f"--runbooks: expected a URL that begins with https:// or http://, found {runbooks!r}",
            hint=f"write https://{place}, or leave it out: alerts then link to the files in DIR",
        )
    root = Path(directory)
    for path in monitoring_files.write(root, runbooks=runbooks, force=force):
        print_text(str(root / path))
    print_text(f"read {root / 'README.md'} first", file=sys.stderr)
    return 0
