"""`prejit sign`."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from prejit.compiler.cli.build_options import FILE, PATH
from prejit.runtime.cli.command_options import JSON, check_one
from prejit.runtime.cli.output import print_json

if TYPE_CHECKING:
    from prejit.compiler.signing.keyless import KeylessSigner
    from prejit.compiler.signing.private_key import PrivateKey


@click.command(
    epilog="Examples:\n\n\b\n  openssl ecparam -name prime256v1 -genkey -noout -out release.pem\n"
    "  prejit sign artifacts/demo --key release.pem\n  prejit sign artifacts/demo --keyless\n\n"
    "PREJIT_KEY_PASSWORD is the password of an encrypted key. Several people sign one after the other.\n\n"
    "PREJIT_IDENTITY_TOKEN is the identity token of --keyless where the CI offers none by itself."
)
@click.argument("bundle", type=PATH, metavar="BUNDLE", help="Directory of a bundle.")
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
    stays the same.
    """
    from prejit.compiler.progress import tell
    from prejit.compiler.signing.bundle_signing import sign as sign_bundle
    from prejit.runtime.errors import UsageError

    check_one(
        {"--key": key, "--keyless": keyless or None},
        required=True,
        hint="--key FILE signs with a private key (the examples of --help make one), --keyless as the "
        "identity of a CI",
    )
    if config is not None and not keyless:
        raise UsageError("expected --keyless beside --sigstore, found none")
    signed = sign_bundle(bundle, _keyless(config) if key is None else private_key(key))
    tell(
        f"signed {bundle}: attached {signed.added} signatures, wrote {signed.model_signature}, "
        f"{signed.digest[:19]}" + (f", as {signed.key}" if keyless else "")
    )
    if as_json:
        print_json({**asdict(signed), "model_signature": str(signed.model_signature)})
    return 0


def _keyless(config: Path | None) -> KeylessSigner:
    from prejit.compiler.signing.keyless import TOKEN_VARIABLE, keyless_signer

    return keyless_signer(os.environ.get(TOKEN_VARIABLE) or None, config)


def private_key(path: Path) -> PrivateKey:
    """Return the private key in a file; the environment has its password.

    Raises:
        UsageError, StoreError: it cannot be read, or is no key to sign with.
    """
    from prejit.compiler.signing.private_key import PASSWORD_VARIABLE, read_private_key

    return read_private_key(path, os.environ.get(PASSWORD_VARIABLE) or None)
