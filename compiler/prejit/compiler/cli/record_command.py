"""`prejit record`."""

from __future__ import annotations

import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from prejit.compiler.cli.shared_options import FILE, PATH
from prejit.runtime.cli.command_options import COMMAND, JSON, VERBOSE
from prejit.runtime.cli.output import print_json

if TYPE_CHECKING:
    from prejit.compiler.recording.jax_cache_packing import Recording
    from prejit.compiler.recording.untraced_calls import RecordedCalls


@click.command(
    epilog="Examples:\n\n\b\n  prejit record -- python serve.py\n"
    "  prejit record -o artifacts/serve -- gunicorn serve:app\n"
    "  prejit record --manifest serve.toml -- python serve.py\n\n"
    "End a server with Ctrl-C or SIGTERM; the bundle is written then. `prejit run` gives it to the program. "
    "The exit status is that of COMMAND."
)
@COMMAND
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
    help="Write a manifest of the functions and shapes that the program called, for `prejit build`. A Python "
    "file beside it makes arguments that TOML cannot write.",
)
@click.option(
    "--untraced",
    is_flag=True,
    help="Record the calls of jitted functions as well. After two such recordings `prejit run` starts them "
    "without tracing while the command and what the process reads are the same.",
)
@VERBOSE
@JSON
def record(
    command: tuple[str, ...],
    output: Path | None,
    manifest: Path | None,
    untraced: bool,
    as_json: bool,
) -> int:
    """Run COMMAND and pack what jax compiles for it into a bundle."""
    from prejit.compiler.progress import tell
    from prejit.compiler.recording.jax_cache_packing import default_name
    from prejit.compiler.recording.jax_cache_packing import record as record_run

    output = Path("artifacts", default_name(command)) if output is None else output
    if manifest is not None:
        _check_new(manifest)
    _check_place(output)
    recording = record_run(command, output, untraced=untraced)
    if manifest is not None:
        _write_manifest(manifest, recording)
    for line in recording.left_out:
        tell(f"left out {line}")
    tell(
        f"recorded {recording.added} programs: {recording.path} has {recording.programs} for "
        f"{', '.join(recording.targets)}, {recording.digest[:19]}"
    )
    for calls in recording.calls if untraced else ():
        _tell_calls(calls)
    if as_json:
        described = {**asdict(recording), "path": str(recording.path)}
        print_json(
            {name: value for name, value in described.items() if name not in ("requests", "calls")}
        )
    return recording.status


def _tell_calls(calls: RecordedCalls) -> None:
    """Say how many calls of a command start without a trace, and why the others do not."""
    from prejit.compiler.base.suggestions import counted
    from prejit.compiler.progress import tell

    command = " ".join(calls.content["command"][1:])
    number = calls.count(confirmed=True)
    tell(
        f"{command}: {counted(number, 'call')} without a trace, {calls.count(confirmed=False)} with one"
    )
    for reason, names in calls.reasons().items():
        some = ", ".join(dict.fromkeys(names[:5])) + (", ..." if len(names) > 5 else "")
        tell(f"  {counted(len(names), 'call')} ({some}): {reason}")


def _check_place(output: Path) -> None:
    """Raise StoreError before the run if the bundle cannot be written after it."""
    from prejit.runtime.base.files import store_errors

    hint = "nothing was recorded: give -o a place where this user may write"
    with store_errors(output, "write a bundle", hint=hint):
        output.parent.mkdir(parents=True, exist_ok=True)
        for directory in filter(Path.exists, (output.parent, output)):
            tempfile.TemporaryFile(dir=directory).close()


def _check_new(manifest: Path) -> None:
    """Raise UsageError if a manifest cannot be written, or if it would replace other people's work."""
    from prejit.compiler.recording.manifest_text import examples_path
    from prejit.runtime.errors import UsageError

    if not manifest.parent.is_dir():
        raise UsageError(
            f"--manifest: expected a file in a directory that exists, found {manifest}; nothing was recorded",
            hint=f"make the directory {manifest.parent}",
        )
    for path in (manifest, examples_path(manifest)):
        if path.exists():
            raise UsageError(
                f"--manifest: expected the name of a new file, found {path}; nothing was recorded",
                hint="remove it, or name another file",
            )


def _write_manifest(path: Path, recording: Recording) -> None:
    from prejit.compiler.base.suggestions import counted
    from prejit.compiler.progress import tell
    from prejit.compiler.recording.imported_anew import CALLS, compared
    from prejit.compiler.recording.manifest_text import (
        code_of_calls,
        examples_path,
        recorded_manifest,
        with_troubles,
    )
    from prejit.runtime.cli.output import write_text

    requests = with_troubles(recording.requests)
    requests, needs_x64 = compared(requests, code_of_calls(requests, CALLS), path.parent)
    made = recorded_manifest(recording.name, requests, path, needs_x64=needs_x64)
    if made.programs:
        write_text(os.fspath(path), made.text)
        if made.examples:
            write_text(os.fspath(examples_path(path)), made.examples)
        tell(f"wrote {path}: {counted(made.programs, 'program')}")
    else:
        tell(f"did not write {path}: it would have no program")
    if needs_x64:
        tell(
            f"{path}: build it with JAX_ENABLE_X64=1: the program sets jax_enable_x64 after the import"
        )
    for line in made.left_out:
        tell(f"{path}: left out {line}")
    here = path.absolute().parent
    for home in sorted(made.homes):
        if not home.samefile(here):
            tell(
                f"{path}: its functions are in {home}, where a build does not look: move the manifest there, "
                f"or build with PYTHONPATH={home}"
            )
