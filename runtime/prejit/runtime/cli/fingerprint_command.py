"""`prejit fingerprint`."""

from __future__ import annotations

import click

from prejit.runtime.base.typed_json import to_json
from prejit.runtime.machine.fingerprint import Fingerprint


@click.command(epilog="Examples:\n\n\b\n  prejit fingerprint > web-3.json")
def fingerprint() -> int:
    """Print the fingerprint of this machine as JSON."""
    print(to_json(Fingerprint.current()).decode())
    return 0
