"""The options that several commands of the build side have."""

from __future__ import annotations

from pathlib import Path

import click

from prejit.runtime.cli.command_options import COUNT, Attributes

PATH = click.Path(path_type=Path, readable=False)
FILE: Attributes = {"type": PATH, "metavar": "FILE"}
DIR: Attributes = {"type": PATH, "metavar": "DIR"}
TARGETS = click.option(
    "--target", "targets", multiple=True, metavar="NAME", help="Only this target; may be repeated."
)
CACHE = click.option(
    "--cache", **DIR, help="Build cache (default: $PREJIT_CACHE or ~/.cache/prejit/build)."
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
    **FILE,
    help="A table of measured forms, as builds keep it in the build cache (forms.json).",
)
JOBS = click.option("--jobs", **COUNT, help="Compile processes side by side (default: cores).")
TIMEOUT = click.option(
    "--timeout",
    type=click.IntRange(min=1),
    metavar="SECONDS",
    default=3600,
    help="Give up on a program that takes longer to compile, or to measure.",
)
