"""Arguments and options that commands of the build side share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from prejit.runtime.cli.command_options import Attributes

PATH = click.Path(path_type=Path, readable=False)


class _BundleHere(click.Path):
    """The directory of a bundle that a command changes or compares, so that no reference will do."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path. As `click.Path.convert`."""
        from prejit.runtime.errors import UsageError
        from prejit.runtime.ship.reference import is_reference

        if is_reference(value):
            raise UsageError(
                f"{value}: expected a directory on this machine, found a reference",
                hint=f"copy it first: prejit copy {value} DIRECTORY",
            )
        return super().convert(value, param, ctx)


BUNDLE_HERE = _BundleHere(path_type=Path, readable=False)
FILE: Attributes = {"type": PATH, "metavar": "FILE"}
DIR: Attributes = {"type": PATH, "metavar": "DIR"}
CACHE = click.option(
    "--cache", **DIR, help="Build cache (default: $PREJIT_CACHE or ~/.cache/prejit/build)."
)
