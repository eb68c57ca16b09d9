"""`prejit observe init`: files for those who watch servers."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

from prejit.runtime.cli.output import print_text
from prejit.runtime.observe import files


def observe(options: Namespace) -> int:
    """Write dashboards, alert rules and runbooks, and print their paths."""
    directory = Path(options.directory)
    for path in files.write(directory, runbooks=options.runbooks, force=options.force):
        print_text(str(directory / path))
    print_text(f"read {directory / 'README.md'} first", file=sys.stderr)
    return 0
