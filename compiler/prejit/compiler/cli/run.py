"""The commands of the build side, and how one is run.

Each command has a module of its own here: it reads its options, calls one function of the build side and
prints what that returns.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import click

from prejit.compiler.cli.build import build
from prejit.compiler.cli.channel import channel
from prejit.compiler.cli.check_model import check_model
from prejit.compiler.cli.diff import diff
from prejit.compiler.cli.gc import gc
from prejit.compiler.cli.plan import plan
from prejit.compiler.cli.rebuild import rebuild
from prejit.compiler.cli.record import record
from prejit.compiler.cli.schema import schema
from prejit.compiler.cli.sign import sign
from prejit.compiler.cli.suggest import suggest
from prejit.compiler.cli.targets import targets


@click.group()
def commands() -> None:
    """Compile JAX models ahead of time and package them."""


for _each in (
    *(plan, build, check_model, targets, suggest, diff, schema),
    *(rebuild, record, sign, channel, gc),
):
    commands.add_command(_each)


def run(arguments: Sequence[str]) -> int:
    """Run a command. The caller prints the errors of prejit, and handles a closed stdout.

    Returns:
        The exit status.
    """
    _open_closed_streams()
    try:
        # Not `commands.main`, which turns a closed stdout into exit status 1.
        with commands.make_context("prejit", list(arguments)) as context:
            return commands.invoke(context) or 0
    except click.exceptions.Exit as done:  # --help
        return done.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return 130


def _open_closed_streams() -> None:
    """Open stdin, stdout and stderr if they are closed, or a file of ours would get their number."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
