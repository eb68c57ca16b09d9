"""`prejit replay`: run the requests of a server's log again."""

from __future__ import annotations

from dataclasses import asdict

import click

from prejit.runtime.cli.command_options import JSON, PATH, TRUST, VERBOSE
from prejit.runtime.cli.output import print_json, print_text, progress, warnings_on_stderr
from prejit.server.cli.serve_command import named_paths


@click.command(
    epilog="Examples:\n\n\b\n  prejit replay requests.jsonl\n"
    "  prejit replay requests.jsonl --bundle demo=artifacts/demo-after\n\n"
    "Exit status: 1 one of the requests gives something else."
)
@click.argument("log", type=PATH, metavar="LOG", help="File that `prejit serve --log` wrote.")
@click.option(
    "--bundle",
    "bundles",
    multiple=True,
    metavar="[NAME=]BUNDLE",
    help="A bundle in place of the one with this name in the log; may be repeated.",
)
@TRUST
@VERBOSE
@JSON
def replay(log: str, bundles: tuple[str, ...], as_json: bool) -> int:
    """Run the requests of a log of `prejit serve` again, and compare."""
    with warnings_on_stderr(), progress() as show:
        from prejit.server.http import log_replay as replaying

        report = replaying.replay(log, named_paths(bundles), show)
    if as_json:
        print_json(asdict(report))
    else:
        for note in report.notes:
            print_text(f"note: {note}")
        for each in report.differences:
            print_text(f"{each.id}  {each.path}  {each.reason}")
        print_text(
            f"{report.equal} equal, {report.rounded} differ by rounding, "
            f"{len(report.differences)} differ, {report.skipped} skipped"
        )
    return 1 if report.differences else 0
