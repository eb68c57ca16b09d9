"""`prejit gate`: judge a release. `prejit replay`: run the requests of a log again."""

from __future__ import annotations

from dataclasses import asdict

import click

from prejit.runtime.cli.command_options import (
    DIR,
    FILE,
    JSON,
    PATH,
    SECONDS,
    TRUST,
    VERBOSE,
    local_bundle,
    page,
    writes,
)
from prejit.runtime.cli.output import (
    print_json,
    print_text,
    progress,
    warnings_on_stderr,
    write_text,
)
from prejit.server.cli.serve_command import named_paths

GATE_FAILED = 9


@click.command(
    epilog="Examples:\n\n\b\n"
    "  prejit gate oci://registry.example/demo:prod artifacts/demo --requests requests.jsonl\n"
    "  prejit gate releases/1.4/demo artifacts/demo --fleet saved/ --markdown comment.md\n\n"
    "Exit status: 9 the release is stopped."
)
@click.argument(
    "old", metavar="[NAME=]OLD", help="The bundle that serves now: a directory or a reference."
)
@click.argument("new", metavar="NEW", help="The bundle that is to take its place.")
@click.option(
    "--requests",
    "log",
    **FILE,
    help="Play the requests of this log of `prejit serve --log` too, beside seeded ones of the gate's own.",
)
@click.option("--fleet", "directory", **DIR, help="Say which of these fingerprints would compile.")
@click.option(
    "--seconds",
    **SECONDS,
    default=60.0,
    help="How long times may be measured; it ends earlier when more would change nothing.",
)
@click.option(
    "--seed", type=click.IntRange(0, 2**32), default=0, help="Seed of the gate's own requests."
)
@page("Write the verdict as a page.")
@writes("--markdown", metavar="FILE", help="Write the verdict as a comment for a pull request.")
@TRUST
@VERBOSE
@JSON
def gate(
    old: str,
    new: str,
    log: str | None,
    directory: str | None,
    seconds: float,
    seed: int,
    page: str | None,
    markdown: str | None,
    as_json: bool,
) -> int:
    """Judge by the limits of [slo] whether a bundle may take the place of another one.

    Both play the same requests in processes of their own, in turns.
    """
    with warnings_on_stderr():
        from prejit.runtime.machine.fleet_machines import Fleet, read_fleet, unread
        from prejit.server.releases.gate_run import (
            GateOptions,
            requests_of,
            run_gate,
            verdict_json,
            verdict_line,
            verdict_markdown,
            verdict_page,
            verdict_table,
        )
        from prejit.server.telemetry.requestlog import log_lines

        [(name, path)] = named_paths([old])
        fleet = Fleet(()) if directory is None else read_fleet(directory)
        if fleet.unreadable:  # one of them may be the machine that would compile
            raise unread(fleet.unreadable, len(fleet.machines) + len(fleet.unreadable))
        lines, model, limit = (
            ([], name or "model", None) if log is None else requests_of(log, log_lines(log), name)
        )
        paths = [local_bundle(each, every=True) for each in (path, new)]
        options = GateOptions(lines, model, limit, fleet.machines, seconds, seed=seed)
        with progress() as show:
            verdict = run_gate(paths[0], paths[1], options, show)
    if as_json:
        print_json(verdict_json(verdict))
    else:
        print_text(verdict_table(verdict))
        print_text(verdict_line(verdict))
    if page is not None:
        write_text(page, verdict_page(verdict))
    if markdown is not None:
        write_text(markdown, verdict_markdown(verdict))
    return 0 if verdict.passed else GATE_FAILED


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
