"""`prejit wheel`."""

from __future__ import annotations

from pathlib import Path

import click

from prejit.compiler.cli.shared_options import DIR
from prejit.runtime.cli.command_options import JSON, WHOLE_BUNDLE
from prejit.runtime.cli.output import print_json, print_text


@click.command(
    epilog="Examples:\n\n\b\n  prejit wheel artifacts/demo -o dist\n"
    "  prejit wheel artifacts/demo --version 1.2.0"
)
@WHOLE_BUNDLE
@click.option("-o", "--output", **DIR, default=Path("dist"), help="Directory of wheels.")
@click.option(
    "--version",
    metavar="VERSION",
    help="Version of the wheel (default: 0 and the first digits of the bundle's digest).",
)
@JSON
def wheel(path: str, output: Path, version: str | None, as_json: bool) -> int:
    """Write a wheel with a bundle in it, which `load("wheel:NAME-bundle")` finds once it is installed."""
    from prejit.compiler.pipeline.bundle_wheel import write_wheel

    written = write_wheel(path, output, version)
    if as_json:
        print_json({"path": str(written), "bytes": written.stat().st_size})
    else:
        print_text(str(written))
    return 0
