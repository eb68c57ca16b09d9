"""The command line: `prejit`, or `python -m prejit.runtime` where only the server side is installed.

The commands that read or run a bundle are functions in `prejit.runtime.cli`. Those that build one are in
`prejit.compiler.cli.run`, which need not be installed.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence

from prejit.runtime import first_line
from prejit.runtime.base import process
from prejit.runtime.cli.parser import BUILD_COMMANDS, COMMANDS, parse
from prejit.runtime.errors import PrejitError, StoreError, UsageError
from prejit.runtime.trust.sources import TRUST_VARIABLE

_BUILD_PACKAGES = {
    *("prejit", "click", "flax", "huggingface_hub", "orbax", "pydantic", "rich", "safetensors"),
    "transformers",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        The exit status: 0 ok, 1 build failed, 2 usage, 3 fingerprint mismatch, 4 integrity,
        5 signature or policy, 6 store, 7 network, 9 regression (`bench`).
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None:  # this process is the command, which has done nothing but import so far
        process.imports.append(process.span("imports", first_line))
    if argv is None and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may lack some letters
    try:
        if arguments and arguments[0] in BUILD_COMMANDS:
            return _build_side(arguments)
        options = parse(arguments)
        _apply_trust(options)
        with process.importing():
            module = importlib.import_module(f"prejit.runtime.cli.{COMMANDS[options.command]}")
        status: int = getattr(module, options.command)(options)
        if sys.stdout is not None:  # a daemon may have closed it
            sys.stdout.flush()
        return status
    except PrejitError as error:
        print(error.describe(), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _give_up_stdout()  # the reader of our output has gone
        return 141
    except OSError as error:  # a full disk behind stdout
        _give_up_stdout()
        found = StoreError(f"{error.filename or 'standard output'}: {error.strerror}")
        print(found.describe(), file=sys.stderr)
        return found.exit_code


def _apply_trust(options: argparse.Namespace) -> None:
    """Make the policy of `--trust` apply to this process and to those that it starts."""
    if (policy := getattr(options, "trust", None)) is not None:
        others = os.environ.get(TRUST_VARIABLE)
        path = os.path.abspath(policy)
        os.environ[TRUST_VARIABLE] = f"{others}{os.pathsep}{path}" if others else path


def _give_up_stdout() -> None:
    """Drop what is left for stdout: Python would report the broken pipe again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _build_side(arguments: Sequence[str]) -> int:
    """Run a command of the build side, imported by name: the server must not depend on it."""
    try:
        return int(importlib.import_module("prejit.compiler.cli.run").run(arguments))
    except ModuleNotFoundError as error:  # at the import, or later in a command
        if (error.name or "").partition(".")[0] not in _BUILD_PACKAGES:
            raise
        raise UsageError(
            f"`prejit {arguments[0]}` needs the build side, and {error.name} is not installed",
            hint="pip install 'prejit[compiler]'",
        ) from error


if __name__ == "__main__":
    sys.exit(main())
