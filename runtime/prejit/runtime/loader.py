"""`load`: from the directory of a bundle to programs that run, in a fixed order.

    open -> index -> fingerprint -> manifests -> digests of all blobs -> config -> kernels -> map -> run

Two families of failure are never mixed. MISMATCH (this machine is none of the targets) falls back to
compiling the portable programs, with a warning that names the axis, or is an error where the caller wants
that. REJECT (damaged, forged, oversized) is always an error.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from typing import TYPE_CHECKING, Literal

from prejit.runtime.base import arguments
from prejit.runtime.device.start import quickly
from prejit.runtime.errors import FallbackWarning, KernelError, PrejitWarning
from prejit.runtime.fallback import (
    closest_verdict,
    expiry_notice,
    fallback_warning,
    fallbacks,
    fallbacks_lock,
    mismatch,
)
from prejit.runtime.format.blobs import Blobs, check_blobs, read_whole
from prejit.runtime.format.layer_checks import check_kernels
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.names import KERNELS_MEDIA_TYPE
from prejit.runtime.format.opening import Target, check_config_blob, match, read_manifests
from prejit.runtime.format.schema import Config, Index, Manifest
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.store.receipts import Receipts
from prejit.runtime.verdict import Axis

if TYPE_CHECKING:
    from prejit.runtime.bundle import Bundle
    from prejit.runtime.device.kernels import Library

_CALLER = 3
"""Of a warning in `load`: behind the frame of its decorator."""


@quickly()
def load(
    path: str | os.PathLike[str],
    *,
    on_mismatch: Literal["jit", "error"] = "jit",
    while_compiling: Literal["wait", "smaller"] = "wait",
    on_fallback: Callable[[Axis], object] | None = None,
    fingerprint: Fingerprint | None = None,
) -> Bundle:
    """Loads a bundle: checks this machine, verifies every file and maps the weights.

    Args:
        path: directory of the bundle.
        on_mismatch: what to do where this machine is none of the bundle's targets: `jit` compiles the
            portable programs, with a FallbackWarning; `error` raises.
        while_compiling: what a request does meanwhile. `wait`: until the programs that serve it best are
            compiled. `smaller`: it is served with what is ready, a long prompt through a smaller prefill
            bucket in more chunks, or in a larger batch or context bucket, and those compile
            in the background, the smallest first; it waits only where nothing that is ready can serve.
            Its tokens are the same. `call` always waits: its arguments fit one bucket.
        on_fallback: called once for each axis of the closest target that caused a fallback, say to count
            it: `lambda axis: counter.labels(axis.name).inc()`. See also `fallback_counts`.
        fingerprint: what to take this machine for; None: what it is. It loads executables only where
            this machine fits as well.

    Returns:
        The bundle. Its programs get ready when they are first wanted.

    Raises:
        StoreError: the directory cannot be opened.
        RejectError: the bundle is damaged.
        MismatchError: this machine is no target, and on_mismatch is `error`.
    """
    from prejit.runtime.bundle import Bundle

    started = time.perf_counter()
    path = arguments.path("path", path)
    arguments.choice("on_mismatch", on_mismatch, ("jit", "error"))
    arguments.choice("while_compiling", while_compiling, ("wait", "smaller"))
    arguments.function("on_fallback", on_fallback)
    if fingerprint is not None:
        arguments.instance("fingerprint", fingerprint, Fingerprint)
    machine = Fingerprint.current()

    def open_targets(
        layout: Layout, index: Index, digest: str
    ) -> tuple[Layout, str, tuple[Target, ...], dict[str, Manifest], Blobs]:
        """The manifests and blobs are of those targets that may be served."""
        targets = match(layout, index, machine)
        if fingerprint is not None:
            # Code still runs here: a declared machine may lack what this one has, but cannot lend it
            # instructions. Those would end in SIGILL.
            here = {target.name: target for target in targets}
            declared = match(layout, index, fingerprint)
            targets = tuple(t if not t.verdict.matches else here[t.name] for t in declared)
        if on_mismatch == "error" and not any(target.verdict.matches for target in targets):
            raise mismatch(layout, targets)
        # Every byte of every target is checked; the program table is read of the one that is served.
        manifests = read_manifests(layout, targets)
        fitting = [target for target in targets if target.verdict.matches]
        served = {t.name: manifests[t.name] for t in fitting or [closest_verdict(targets)]}
        receipts = Receipts(layout.path)
        blobs = check_blobs(layout, manifests.values(), receipts, keep=served.values())
        return layout, digest, targets, served, blobs

    layout, digest, targets, manifests, blobs = read_whole(path, open_targets)
    library: Library | None = None
    while chosen := next((target for target in targets if target.verdict.matches), None):
        manifest = manifests[chosen.name]
        config = check_config_blob(layout, chosen, manifest, blobs.read(manifest.config))
        try:
            library = _load_kernels(layout, config, manifest, blobs)
            break
        except KernelError as error:
            targets = _without(targets, chosen, config, error)
    if chosen is None and on_mismatch == "error":
        raise mismatch(layout, targets)
    served = chosen or closest_verdict([target for target in targets if target.name in manifests])
    manifest = manifests[served.name]
    if chosen is None:
        config = check_config_blob(layout, served, manifest, blobs.read(manifest.config))
        for axis in served.verdict.mismatches:
            with fallbacks_lock:
                fallbacks[axis.name] += 1
            if on_fallback is not None:
                on_fallback(axis)
        warnings.warn(fallback_warning(layout, served), FallbackWarning, stacklevel=_CALLER)
        notice = expiry_notice(config.portable, machine.jaxlib, date.today())
        if notice is not None:
            warnings.warn(f"{layout.path}: {notice}", PrejitWarning, stacklevel=_CALLER)
    return Bundle(
        digest,
        config,
        blobs.layers(manifest),
        tuple(target.verdict for target in targets),
        platform=machine.platform,
        matched=chosen is not None,
        started=started,
        serve_smaller=while_compiling == "smaller",
        kernels=library,
    )


def _load_kernels(
    layout: Layout, config: Config, manifest: Manifest, blobs: Blobs
) -> Library | None:
    """The kernels of a target, in this process; None: it has none.

    Raises:
        RejectError: the library is damaged.
        KernelError: this machine does not load it.
    """
    if config.kernels is None:
        return None
    from prejit.runtime.device import kernels

    at = manifest.layer(KERNELS_MEDIA_TYPE)
    content = blobs.read(at)
    check_kernels(content, config.kernels, layout.blob_path(at.digest))
    return kernels.load(content)


def _without(
    targets: Sequence[Target], refused: Target, config: Config, error: KernelError
) -> tuple[Target, ...]:
    """The targets, one of which does not fit after all: its kernels cannot be loaded here."""
    assert config.kernels is not None
    needed = f"a library for {config.kernels.level} by {config.kernels.compiler}"
    axis = Axis("kernels", "can be loaded", needed, str(error), False)
    verdict = replace(refused.verdict, axes=(*refused.verdict.axes, axis))
    return tuple(replace(t, verdict=verdict) if t is refused else t for t in targets)
