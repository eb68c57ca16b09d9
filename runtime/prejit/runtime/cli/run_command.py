"""`prejit run`: start a program with the programs of a recorded bundle as jax's cache."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import click

from prejit.runtime.cli.command_options import (
    COMMAND,
    LOCAL_BUNDLE,
    TRUST,
    VERBOSE,
    on_mismatch_option,
    output,
)
from prejit.runtime.cli.output import print_text, warnings_on_stderr, write_text
from prejit.runtime.errors import MismatchError
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.recorded.hook.jax_texts import CALLS_PREFIX
from prejit.runtime.recorded.hook.watch import CACHE_DIRECTORY, Orders
from prejit.runtime.recorded.recorded_bundle import RecordedBundle, open_recorded
from prejit.runtime.recorded.run_report import report_of, telling, text
from prejit.runtime.recorded.watched_command import (
    become,
    cache_settings,
    environment_for,
    read_events,
    run_to_end,
)

MISMATCH = MismatchError.exit_code


@click.command(
    epilog="Examples:\n\n\b\n  prejit run artifacts/serve -- python serve.py\n"
    "  prejit run artifacts/serve --report -- python serve.py\n"
    "  prejit run artifacts/serve --require-aot -- gunicorn serve:app\n\n"
    "The exit status is that of COMMAND."
)
@LOCAL_BUNDLE
@COMMAND
@TRUST
@VERBOSE
@click.option(
    "--report",
    is_flag=True,
    help="Print on stderr at the end what was read and what was compiled, and why.",
)
@click.option(
    "--live", is_flag=True, help="Print on stderr what is compiled, and why, as soon as it happens."
)
@output("FILE.json", "Write the report as JSON.")
@click.option(
    "--require-aot",
    is_flag=True,
    help="Raise an error in the program where it would compile, and exit with status 3.",
)
@click.option(
    "--check-traces",
    type=click.FloatRange(0, 100),
    default=0.0,
    metavar="PERCENT",
    help="Of the calls that could start without a trace, trace so many and compare. 100: trace all.",
)
@on_mismatch_option(
    "Where this machine matches no target: run without the bundle, or fail with exit status 3."
)
def run(
    path: str,
    command: tuple[str, ...],
    report: bool,
    live: bool,
    output: str | None,
    require_aot: bool,
    check_traces: float,
    on_mismatch: str,
) -> int:
    """Start any JAX program with a recorded bundle as jax's cache."""
    with warnings_on_stderr():
        bundle = open_recorded(path)
    _check_match(bundle, path, must_match=require_aot or on_mismatch == "error")
    settings = {} if bundle.directory is None else cache_settings(bundle.directory, write=False)
    if settings and (own := os.environ.get(CACHE_DIRECTORY.upper())):
        _say(f"{CACHE_DIRECTORY.upper()}={own} is not used: jax reads {path} and writes nothing")
    serve = any(each.file.startswith(CALLS_PREFIX) for each in bundle.programs) and bool(settings)
    recorded = {name: text for each in bundle.programs for name, text in each.conditions.items()}
    plain = Orders(settings, recorded=recorded, serve=serve, checked=check_traces / 100)
    if not (report or live or output is not None or require_aot):
        sys.stdout.flush()
        nothing = bundle.directory is None
        become(command, os.environ if nothing else environment_for(plain, os.environ))
    with tempfile.TemporaryDirectory(prefix="prejit-run-") as directory:
        orders = replace(plain, events=directory, refuse=require_aot)
        with ExitStack() as stack:
            if live:
                machine = Fingerprint.current()
                tell = partial(print_text, file=sys.stderr)
                stack.enter_context(telling(Path(directory), bundle, machine, tell))
            status = run_to_end(command, environment_for(orders, os.environ))
        processes = read_events(Path(directory))
    found = report_of(bundle, processes, Fingerprint.current())
    if report or (require_aot and found.misses):
        print_text(text(found), file=sys.stderr)
    elif require_aot:
        for note in found.notes:  # what keeps --require-aot from seeing a compile
            _say(note)
    if output is not None:
        write_text(output, json.dumps(found.described(), indent=1) + "\n")
    compiled = found.misses or found.unwatched
    return MISMATCH if require_aot and compiled else status


def _check_match(bundle: RecordedBundle, path: str, *, must_match: bool) -> None:
    """Say on stderr that no target matches, or raise if one must."""
    if bundle.verdict.matches:
        return
    reason = (
        f"{path}: this machine matches none of the bundle's targets; closest is "
        f"{bundle.verdict.target}: {bundle.verdict.reason()}"
    )
    if must_match:
        raise MismatchError(
            reason,
            verdicts=(bundle.verdict,),
            hint=f"add a target on this machine with: prejit record -o {path} -- COMMAND",
        )
    _say(f"{reason}. The program runs without the bundle, and jax compiles.")


def _say(message: str) -> None:
    print_text(f"warning: {message}", file=sys.stderr)
