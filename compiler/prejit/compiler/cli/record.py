"""`prejit record`."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

import click

from prejit.compiler.cli.options import FILE, PATH
from prejit.runtime.cli.options import JSON
from prejit.runtime.cli.output import print_json


@click.command(
    epilog="Examples:\n\n\b\n  prejit record -- python serve.py\n"
    "  prejit record -o artifacts/serve -- gunicorn serve:app\n"
    "  prejit record --manifest serve.toml -- python serve.py\n\n"
    "End a server with Ctrl-C or SIGTERM; the bundle is written then. `prejit run` gives it to the program. "
    "The exit status is that of COMMAND."
)
@click.argument(
    "command",
    nargs=-1,
    required=True,
    type=click.UNPROCESSED,
    metavar="-- COMMAND...",
    help="The program's command and its arguments.",
)
@click.option(
    "-o",
    "--output",
    type=PATH,
    metavar="BUNDLE",
    help="Directory of the bundle; one that is there gets the recording in addition (default: artifacts/ "
    "and the name of the program).",
)
@click.option(
    "--manifest",
    **FILE,
    help="Write a manifest of the functions and shapes that the program called.",
)
@JSON
def record(
    command: tuple[str, ...], output: Path | None, manifest: Path | None, as_json: bool
) -> int:
    """Run COMMAND and pack what jax compiles for it into a bundle."""
    from prejit.compiler.progress import tell
    from prejit.compiler.recording.manifest_text import manifest_text
    from prejit.compiler.recording.recorder import default_name
    from prejit.compiler.recording.recorder import record as record_command
    from prejit.runtime.cli.output import write_text

    output = Path("artifacts", default_name(command)) if output is None else output
    recording = record_command(command, output)
    if manifest is not None:
        write_text(os.fspath(manifest), manifest_text(recording.name, recording.requests))
    for line in recording.left_out:
        tell(f"left out {line}")
    tell(
        f"recorded {recording.added} programs: {recording.path} has {recording.programs} for "
        f"{', '.join(recording.targets)}, {recording.digest[:19]}"
    )
    if as_json:
        described = {**asdict(recording), "path": str(recording.path)}
        print_json({name: value for name, value in described.items() if name != "requests"})
    return recording.status
