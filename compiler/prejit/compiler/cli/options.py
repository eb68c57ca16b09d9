"""The options that several commands of the build side have."""

from __future__ import annotations

from pathlib import Path

import click

from prejit.runtime.cli.options import COUNT

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
JOBS = click.option(
    "--jobs", type=COUNT, metavar="N", help="Compile processes side by side (default: cores)."
)
TIMEOUT = click.option(
    "--timeout",
    type=COUNT,
    default=3600,
    metavar="SECONDS",
    help="Give up on a program that takes longer to compile, or to measure.",
)
