"""`prejit tune`: record what XLA measures on this machine's GPU."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

from prejit.runtime.cli.output import print_text
from prejit.runtime.device import tuning


def tune(options: Namespace) -> int:
    """Compile the bundle on this machine's GPU and write what XLA measured to a file."""
    measured = tuning.tune(options.bundle, lambda line: print_text(line, file=sys.stderr))
    tuning.write(measured, Path(options.output))
    print_text(
        f"wrote {options.output} for {measured.machine.device_kind}; name it in the manifest:\n"
        f'  [[target]]\n  tuning = "{options.output}"',
        file=sys.stderr,
    )
    return 0
