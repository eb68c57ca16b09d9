"""The command line: `prejit`, or `python -m prejit.runtime` where only the server side is installed."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

from prejit.runtime import first_line
from prejit.runtime.base import process_facts
from prejit.runtime.cli.commands import run
from prejit.runtime.cli.output import print_text
from prejit.runtime.errors import PrejitError, StoreError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        The exit status: 0 ok, 1 build failed, 2 usage, 3 fingerprint mismatch, 4 integrity,
        5 signature or policy, 6 store, 7 network, 9 regression (`bench`).
    """
    if argv is None:  # this process is the command, which has done nothing but import so far
        process_facts.imports.append(process_facts.span("imports", first_line))
        _open_closed_streams()
    if argv is None and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may lack some letters
    try:
        status = run(sys.argv[1:] if argv is None else argv)
        if sys.stdout is not None:  # a daemon may have closed it
            sys.stdout.flush()
        return status
    except PrejitError as error:
        print_text(error.describe(), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _give_up_stdout()  # the reader of our output has gone
        return 141
    except OSError as error:  # a full disk behind stdout, or the current directory was removed
        _give_up_stdout()
        where = "current directory" if isinstance(error, FileNotFoundError) else "standard output"
        found = StoreError(f"{error.filename or where}: {error.strerror}")
        print_text(found.describe(), file=sys.stderr)
        return found.exit_code


def _open_closed_streams() -> None:
    """Open stdin, stdout and stderr if they are closed, or a file of ours would get their number."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            setattr(sys, name, os.fdopen(descriptor, "w" if descriptor else "r", closefd=False))


def _give_up_stdout() -> None:
    """Drop what is left for stdout: Python would report the broken pipe again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
