"""`prejit schema`."""

from __future__ import annotations

import click

from prejit.runtime.cli.output import print_json


@click.command(
    epilog="Examples:\n\n\b\n  prejit schema > prejit.schema.json\n\n"
    "Editors with a TOML language server (taplo, Even Better TOML) complete and check a manifest whose first "
    "line is `#:schema prejit.schema.json`."
)
def schema() -> int:
    """Print the JSON Schema of manifests."""
    from prejit.compiler.manifest.manifest_schema import manifest_schema

    print_json(manifest_schema())
    return 0
