"""The bundle and the machine that a command's options name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from prejit.runtime.cli.bundle_references import reporting
from prejit.runtime.cli.output import progress, warnings_on_stderr
from prejit.runtime.loader import load
from prejit.runtime.machine.fingerprint import Fingerprint

if TYPE_CHECKING:
    from prejit.runtime.bundle import Bundle


def load_bundle(path: str, on_mismatch: Literal["jit", "error"], fingerprint: str | None) -> Bundle:
    """Load a bundle for this machine, or for the one whose fingerprint is in a file.

    Raises:
        MismatchError, RejectError, StoreError, UsageError: see `prejit.runtime.load`.
    """
    with warnings_on_stderr():
        machine = None if fingerprint is None else Fingerprint.read(fingerprint)
        with progress() as show:
            return load(
                path, on_mismatch=on_mismatch, fingerprint=machine, on_transfer=reporting(show)
            )
