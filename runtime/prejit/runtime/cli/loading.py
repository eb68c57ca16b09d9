"""The bundle and the machine that a command's options name."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

from prejit.runtime.cli.output import warnings_on_stderr
from prejit.runtime.loader import load
from prejit.runtime.machine.fingerprint import Fingerprint

if TYPE_CHECKING:
    from prejit.runtime.bundle import Bundle


def load_bundle(options: Namespace, path: str | None = None) -> Bundle:
    """Load the bundle of the options, or the one at `path`, for the machine of the options.

    Raises:
        MismatchError, RejectError, StoreError, UsageError: see `prejit.runtime.load`.
    """
    with warnings_on_stderr():
        return load(
            options.bundle if path is None else path,
            on_mismatch=options.on_mismatch,
            fingerprint=machine_of(options),
        )


def machine_of(options: Namespace) -> Fingerprint | None:
    """Return the fingerprint in the file of `--fingerprint`; None: the option is not given.

    Raises:
        RejectError, StoreError: the file holds no fingerprint, or cannot be read.
    """
    return None if options.fingerprint is None else Fingerprint.read(options.fingerprint)
