"""`prejit fingerprint` and `tune`: what this machine is, and what XLA measures on its GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from prejit.runtime.base.typed_json import to_json
from prejit.runtime.cli.command_options import LOCAL_BUNDLE, TRUST, VERBOSE, output
from prejit.runtime.cli.output import print_text
from prejit.runtime.machine.fingerprint import Fingerprint


@click.command(epilog="Examples:\n\n\b\n  prejit fingerprint > web-3.json")
def fingerprint() -> int:
    """Print the fingerprint of this machine as JSON."""
    print(to_json(Fingerprint.current()).decode())
    return 0


@click.command(epilog="Examples:\n\n\b\n  prejit tune artifacts/demo -o h200.json")
@LOCAL_BUNDLE
@TRUST
@VERBOSE
@output("FILE", "File to write; name it as `tuning` of a [[target]].", required=True)
def tune(path: str, output: str) -> int:
    """Compile a bundle on this machine's GPU and record what XLA measures, for builds elsewhere."""
    from prejit.runtime.device import tuning

    measured = tuning.tune(path, lambda line: print_text(line, file=sys.stderr))
    tuning.write(measured, Path(output))
    print_text(
        f"wrote {output} for {measured.machine.device_kind}; name it in the manifest:\n"
        f'  [[target]]\n  tuning = "{output}"',
        file=sys.stderr,
    )
    return 0
