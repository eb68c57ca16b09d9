"""The options that several commands of the build side have, and how they print JSON."""

from __future__ import annotations

import json
from pathlib import Path

import click

PATH = click.Path(path_type=Path)
TARGETS = click.option(
    "--target", "targets", multiple=True, metavar="NAME", help="Only this target; may be repeated."
)
CACHE = click.option(
    "--cache",
    type=PATH,
    metavar="DIR",
    help="Build cache (default: $PREJIT_CACHE or ~/.cache/prejit/build).",
)
SHARED = click.option(
    "--store",
    "shared",
    metavar="URL",
    help="A store that many machines share: http(s)://, s3://, gs://, az://, oci://, a directory, or a TOML "
    "file with several (default: $PREJIT_STORE).",
)
FORMS = click.option(
    "--forms",
    type=PATH,
    metavar="FILE",
    help="A table of measured forms, as builds keep it in the build cache (forms.json).",
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")


def print_json(value: object) -> None:
    """Print JSON on stdout, for programs."""
    click.echo(json.dumps(value, indent=2))
