"""`prejit sign` and `prejit channel`."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from prejit.compiler.cli.shared_options import BUNDLE_HERE, FILE
from prejit.runtime.cli.command_options import COUNT, JSON, check_one
from prejit.runtime.cli.output import print_json

if TYPE_CHECKING:
    from prejit.compiler.signing.bundle_signing import Signer


@click.command(
    epilog="Examples:\n\n\b\n  openssl ecparam -name prime256v1 -genkey -noout -out release.pem\n"
    "  prejit sign artifacts/demo --key release.pem\n  prejit sign artifacts/demo --keyless\n\n"
    "PREJIT_KEY_PASSWORD is the password of an encrypted key. Several people sign one after the other.\n\n"
    "PREJIT_IDENTITY_TOKEN is the identity token of --keyless where the CI offers none by itself."
)
@click.argument(
    "bundle",
    type=BUNDLE_HERE,
    metavar="BUNDLE",
    help="Directory of a bundle, or of an adapter of PEFT.",
)
@click.option("--key", **FILE, help="Private key in PEM: ECDSA on P-256, P-384 or P-521.")
@click.option(
    "--keyless",
    is_flag=True,
    help="Sign as the identity that the CI vouches for, by sigstore, over the network. Its public log keeps "
    "the identity and digests for ever.",
)
@click.option(
    "--sigstore",
    "config",
    **FILE,
    help="Client configuration of another sigstore than the public one, for --keyless.",
)
@JSON
def sign(bundle: Path, key: Path | None, keyless: bool, config: Path | None, as_json: bool) -> int:
    """Attach signatures to BUNDLE and to each of its targets, and write BUNDLE.sig.

    The whole bundle is verified first: damage is an error (exit 4), and nothing is signed. cosign and trust
    policies verify the signatures, and the OpenSSF's model_signing verifies BUNDLE.sig. The bundle's digest
    stays the same. An adapter gets adapter.sig beside its files.
    """
    from prejit.compiler.progress import tell
    from prejit.compiler.signing.bundle_signing import is_adapter, sign_adapter
    from prejit.compiler.signing.bundle_signing import sign as sign_bundle
    from prejit.compiler.signing.signers import TOKEN_VARIABLE, keyless_signer, read_private_key
    from prejit.runtime.errors import UsageError

    check_one(
        {"--key": key, "--keyless": keyless or None},
        required=True,
        hint="--key FILE signs with a private key (the examples of --help make one), --keyless as the "
        "identity of a CI",
    )
    if config is not None and not keyless:
        raise UsageError("expected --keyless beside --sigstore, found none")
    if key is None:
        signer: Signer = keyless_signer(os.environ.get(TOKEN_VARIABLE) or None, config)
    else:
        signer = read_private_key(key)
    if is_adapter(bundle):
        adapter = sign_adapter(bundle, signer)
        tell(f"signed the adapter {bundle}, {adapter.digest[:19]}: wrote {adapter.signatures}")
        if as_json:
            print_json({"digest": adapter.digest, "signatures": str(adapter.signatures)})
        return 0
    signed = sign_bundle(bundle, signer)
    tell(
        f"signed {bundle}: attached {signed.added} signatures, wrote {signed.model_signature}, "
        f"{signed.digest[:19]}" + (f", as {signed.key}" if keyless else "")
    )
    if as_json:
        print_json({**asdict(signed), "model_signature": str(signed.model_signature)})
    return 0


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
@click.argument("bundle", type=BUNDLE_HERE, metavar="BUNDLE", help="Directory of a bundle.")
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
    from prejit.compiler.signing.channels import other_files, release_bundle
    from prejit.compiler.signing.signers import read_private_key

    version = release_bundle(file, bundle, name, [*map(read_private_key, keys)], days)
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
    from prejit.compiler.signing.channels import rotate_keys
    from prejit.compiler.signing.signers import read_private_key

    private = [*map(read_private_key, keys)]
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
    from prejit.compiler.signing.channels import is_listed, sign_channel
    from prejit.compiler.signing.signers import read_private_key

    private = read_private_key(key)
    signed = sign_channel(file, private)
    tell(f"signed version {signed.version} of channel {signed.name}: wrote {file}")
    if not is_listed(signed, private):
        tell(
            f"cannot check that {key} is one of the channel's first keys: only the policies of the servers "
            "have these"
        )
    return 0
