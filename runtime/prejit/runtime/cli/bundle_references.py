"""The bundle that a command's argument names: a directory, or a reference to one elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal

import click

from prejit.runtime.base.process_facts import policy_paths
from prejit.runtime.cli.output import progress, warnings_on_stderr
from prejit.runtime.format.layout import Layout, LayoutFiles
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.ship.reference import is_reference, parse_reference

if TYPE_CHECKING:
    from prejit.runtime.bundle import Bundle
    from prejit.runtime.ship.shipping import Report, TransferProgress


def local_bundle(path: str, *, every: bool) -> str:
    """Return the directory of a bundle. One elsewhere is fetched into this machine's store, with progress.

    Args:
        path: a directory, which is returned as it is, or a reference.
        every: whether all targets are fetched, or that of this machine.
    """
    if not is_reference(path):
        return path
    reference = parse_reference(path)
    if not reference.is_remote:  # of an installed wheel
        return reference.place
    from prejit.runtime.ship.machine_store import machine_store
    from prejit.runtime.ship.pulling import Wanted, pull

    with progress() as show:
        store, arrivals = machine_store(), reporting(show)
        wanted = Wanted(None if every else Fingerprint.current())
        return str(pull(reference, store, wanted, policy_paths(), arrivals).path)


@contextlib.contextmanager
def bundle_files(path: str) -> Iterator[LayoutFiles]:
    """Give the small files of a bundle. Of one elsewhere no others are fetched, and none is kept."""
    if is_reference(path):
        from prejit.runtime.ship.shipping import open_repository

        reference = parse_reference(path)
        yield open_repository(reference).open(reference.tag, reference.digest)
    else:
        with Layout(path) as layout:
            yield layout


def of_this_machine(_: click.Context, __: click.Parameter, path: str) -> str:
    """Return the directory of the bundle that an argument names, with the target of this machine."""
    return local_bundle(path, every=False)


def with_all_targets(_: click.Context, __: click.Parameter, path: str) -> str:
    """Return the directory of the bundle that an argument names, with all its targets."""
    return local_bundle(path, every=True)


def reporting(show: Callable[[str], None]) -> Report:
    """Return a function that shows how far a transfer is, with its rate and the time that is left."""
    began = time.monotonic()
    shown = began + 0.9  # what takes less than a second shows nothing

    def report(at: TransferProgress) -> None:
        nonlocal shown
        now = time.monotonic()
        if at.moved == at.missing:
            show("")
        if now - shown < 0.1 or not 0 < at.moved < at.missing:
            return
        shown = now
        rate = at.moved / max(now - began, 1e-3)
        left = (at.missing - at.moved) / max(rate, 1.0)
        show(
            f"{at.moved / 1e6:,.1f} of {at.missing / 1e6:,.1f} MB, {rate / 1e6:,.1f} MB/s, "
            f"{left:.0f} s left"
        )

    return report


def load_bundle(path: str, on_mismatch: Literal["jit", "error"], fingerprint: str | None) -> Bundle:
    """Load a bundle for this machine, or for the one whose fingerprint is in a file.

    Raises:
        MismatchError, RejectError, StoreError, UsageError: see `prejit.runtime.load`.
    """
    from prejit.runtime.loader import load

    with warnings_on_stderr():
        machine = None if fingerprint is None else Fingerprint.read(fingerprint)
        with progress() as show:
            return load(
                path, on_mismatch=on_mismatch, fingerprint=machine, on_transfer=reporting(show)
            )
