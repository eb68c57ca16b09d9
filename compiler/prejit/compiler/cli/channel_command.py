"""`prejit channel`."""

from __future__ import annotations

from pathlib import Path

import click

from prejit.compiler.cli.build_options import FILE, PATH
from prejit.compiler.cli.sign_command import private_key
from prejit.runtime.cli.command_options import COUNT

_FILE = click.argument("file", **FILE, help="File of the channel.")
_channel_name = click.option("--name", required=True, metavar="NAME", help="Name of the channel.")
_signing_keys = click.option(
    "--key",
    "keys",
    **FILE,
    multiple=True,
    required=True,
    help="Private key in PEM; may be repeated.",
)


@click.group()
def channel() -> None:
    """Say which bundle is the current one, so that no machine goes back to an older one."""


@channel.command(
    epilog="Examples:\n\n\b\n"
    "  prejit channel release stable.json artifacts/demo --name stable --key release.pem --days 30"
)
@_FILE
@click.argument("bundle", type=PATH, metavar="BUNDLE", help="Directory of a bundle.")
@_channel_name
@_signing_keys
@click.option(
    "--days",
    **COUNT,
    default=90,
    help="How long this is known to be the current bundle. Release again before.",
)
def release(file: Path, bundle: Path, name: str, keys: tuple[Path, ...], days: int) -> int:
    """Make BUNDLE the current one of the channel in FILE, with the next version.

    To go back to an older bundle, release that one.
    """
    from prejit.compiler.progress import tell
    from prejit.compiler.signing.channel_file import other_files, release_bundle

    version = release_bundle(file, bundle, name, [private_key(key) for key in keys], days)
    tell(f"released {bundle} as version {version} of channel {name}: wrote {file}")
    if version == 1:
        others = ", ".join(map(str, other_files(file, name)))
        tell(
            f"{file} was not there: a new channel {name} begins in it"
            + (
                f", beside that of {others}. If you meant that file, delete {file}"
                if others
                else ""
            )
        )
    return 0


@channel.command(
    epilog="Examples:\n\n\b\n  prejit channel rotate stable.json --name stable --public new.pub.pem "
    "--key old.pem --key new.pem"
)
@_FILE
@_channel_name
@click.option(
    "--public",
    "publics",
    **FILE,
    multiple=True,
    required=True,
    help="Public key of the next version, in PEM; repeat it for each key.",
)
@_signing_keys
@click.option("--threshold", **COUNT, default=1, help="How many of the public keys must sign.")
@click.option("--days", **COUNT, default=365, help="How long the keys count. Rotate again before.")
def rotate(
    file: Path,
    name: str,
    publics: tuple[Path, ...],
    keys: tuple[Path, ...],
    threshold: int,
    days: int,
) -> int:
    """Give the channel in FILE other keys, signed by the old ones and by the new ones."""
    from prejit.compiler.progress import tell
    from prejit.compiler.signing.channel_file import rotate_keys

    private = [private_key(key) for key in keys]
    version = rotate_keys(file, name, publics, threshold, private, days)
    tell(f"channel {name} has version {version} of its keys: wrote {file}")
    return 0


@channel.command(
    "add-signature",
    epilog="Examples:\n\n\b\n  prejit channel add-signature stable.json --key second.pem",
)
@_FILE
@click.option("--key", **FILE, required=True, help="Private key in PEM.")
def add_signature(file: Path, key: Path) -> int:
    """Sign the release and the newest keys of the channel in FILE with another key, to reach a threshold."""
    from prejit.compiler.progress import tell
    from prejit.compiler.signing.channel_file import sign_channel
    from prejit.compiler.signing.channels import is_listed

    private = private_key(key)
    signed = sign_channel(file, private)
    tell(f"signed version {signed.version} of channel {signed.name}: wrote {file}")
    if not is_listed(signed, private):
        tell(
            f"cannot check that {key} is one of the channel's first keys: only the policies of the servers "
            "have these"
        )
    return 0
