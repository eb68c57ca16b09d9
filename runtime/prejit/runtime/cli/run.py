"""`prejit run`: start a program with the programs of a recorded bundle as jax's cache."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path

from prejit.runtime.cli.output import print_text, warnings_on_stderr, write_text
from prejit.runtime.errors import MismatchError
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.recorded.child import become, cache_settings, environment_for, run_command
from prejit.runtime.recorded.events import read_events
from prejit.runtime.recorded.hook.watch import CACHE_DIRECTORY, Orders
from prejit.runtime.recorded.live import telling
from prejit.runtime.recorded.opening import RecordedBundle, open_recorded
from prejit.runtime.recorded.report import report_of, text

MISMATCH = MismatchError.exit_code


def run(options: Namespace) -> int:
    """Run a command with a recorded bundle as jax's cache. Its exit status is that of the command."""
    with warnings_on_stderr():
        bundle = open_recorded(options.bundle)
    _check_match(bundle, options)
    settings = {} if bundle.directory is None else cache_settings(bundle.directory, write=False)
    if settings and (own := os.environ.get(CACHE_DIRECTORY.upper())):
        _say(
            f"{CACHE_DIRECTORY.upper()}={own} is not used: jax reads {options.bundle} and writes nothing"
        )
    watched = options.report or options.live or options.output is not None or options.require_aot
    if not watched:
        sys.stdout.flush()
        plain = bundle.directory is None
        become(
            options.child, os.environ if plain else environment_for(Orders(settings), os.environ)
        )
    with tempfile.TemporaryDirectory(prefix="prejit-run-") as directory:
        orders = Orders(settings, events=directory, refuse=options.require_aot)
        with ExitStack() as stack:
            if options.live:
                machine = Fingerprint.current()
                stack.enter_context(telling(Path(directory), bundle, machine, _tell))
            status = run_command(options.child, environment_for(orders, os.environ))
        processes = read_events(Path(directory))
    report = report_of(bundle, processes, Fingerprint.current())
    if options.report or (options.require_aot and report.misses):
        print_text(text(report), file=sys.stderr)
    elif options.require_aot:
        for note in report.notes:  # what keeps --require-aot from seeing a compile
            _say(note)
    if options.output is not None:
        write_text(options.output, json.dumps(report.described(), indent=1) + "\n")
    compiled = report.misses or report.unwatched
    return MISMATCH if options.require_aot and compiled else status


def _check_match(bundle: RecordedBundle, options: Namespace) -> None:
    """Say on stderr that no target matches, or raise if the options allow no compile.

    Raises:
        MismatchError: no target matches, and --on-mismatch error or --require-aot is given.
    """
    if bundle.verdict.matches:
        return
    reason = (
        f"{options.bundle}: this machine matches none of the bundle's targets; closest is "
        f"{bundle.verdict.target}: {bundle.verdict.reason()}"
    )
    if options.require_aot or options.on_mismatch == "error":
        raise MismatchError(
            reason,
            verdicts=(bundle.verdict,),
            hint=f"add a target on this machine with: prejit record -o {options.bundle} -- COMMAND",
        )
    _say(f"{reason}. The program runs without the bundle, and jax compiles.")


def _tell(paragraph: str) -> None:
    print_text(paragraph, file=sys.stderr)


def _say(message: str) -> None:
    print_text(f"warning: {message}", file=sys.stderr)
