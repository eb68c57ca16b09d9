"""`load`: from the directory of a bundle to programs that run, in a fixed order.

    open -> index -> fingerprint -> manifests -> digests of all blobs -> config -> kernels -> map -> run

Two families of failure are never mixed. MISMATCH (this machine is none of the targets) falls back to
compiling the portable programs, with a warning that names the axis, or is an error where the caller wants
that. REJECT (damaged, forged, oversized) is always an error.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date, timedelta
from typing import TYPE_CHECKING, Literal

from prejit.runtime import arguments, bundle, copied, start, verify
from prejit.runtime.bundle import Config, Descriptor, Index, Manifest, Portable
from prejit.runtime.errors import (
    FallbackWarning,
    KernelError,
    MismatchError,
    PrejitWarning,
    RejectError,
)
from prejit.runtime.fingerprint import Axis, Fingerprint, Verdict, compare, preference
from prejit.runtime.layout import Layout, digest_file
from prejit.runtime.receipt import Receipts

if TYPE_CHECKING:  # NumPy comes with them: what only reads a bundle does without
    from prejit.runtime.kernels import Library
    from prejit.runtime.loaded import Bundle
    from prejit.runtime.programs import Layer

NOTICE = timedelta(days=30)
"""How long before portable programs expire somebody is told."""

_CALLER = 3
"""Of a warning in `load`: behind the frame of its decorator."""

_fallbacks: Counter[str] = Counter()
_fallbacks_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Target:
    """One target of an opened bundle.

    Attributes:
        name: of the target.
        verdict: whether its executables run on the machine that was asked about.
        descriptor: of its manifest.
        format: of the bundle, as its index says.
    """

    name: str
    verdict: Verdict
    descriptor: Descriptor
    format: str


@dataclass(frozen=True, slots=True)
class Contents:
    """What a target's manifest leads to.

    Attributes:
        manifest: the OCI manifest.
        config: the program table.
    """

    manifest: Manifest
    config: Config


def open_index(layout: Layout) -> tuple[Index, str]:
    """Reads and checks `oci-layout` and `index.json`.

    Returns:
        The index and the bundle's digest; of a copy that another tool made, those of its targets alone.

    Raises:
        RejectError: either is missing or damaged.
    """
    path = str(layout.path / "oci-layout")
    version = layout.read("oci-layout", copied.MAX_LAYOUT_BYTES)
    content = layout.read("index.json", bundle.MAX_INDEX_BYTES)
    manifests = copied.manifests_of_copy(content)
    if manifests is None or not copied.is_layout_file(version):
        verify.check_layout_file(version, path)
    if manifests is not None:
        content = copied.index_of_copy(layout, manifests)
    index = verify.check_index(content, str(layout.path / "index.json"))
    return index, bundle.digest_of(content)


def match(layout: Layout, index: Index, machine: Fingerprint) -> tuple[Target, ...]:
    """Every target of a bundle with its verdict, in the order of `fingerprint.preference`.

    Raises:
        RejectError: a requirement in the index is damaged.
    """
    targets = []
    for descriptor in index.manifests:
        name, needs = verify.target_of(descriptor, str(layout.path / "index.json"))
        written = index.annotations[bundle.BUNDLE_FORMAT]
        target = Target(name, compare(name, needs, machine), descriptor, written)
        targets.append((preference(needs, machine), target))
    targets.sort(key=lambda item: item[0])
    return tuple(target for _, target in targets)


def read_manifest(layout: Layout, target: Target) -> Manifest:
    """Reads and checks a target's manifest.

    Raises:
        RejectError: it is missing or damaged.
    """
    at = target.descriptor
    content = layout.read_blob(at.digest, at.size)
    verify.check_digest(content, at.digest, layout.blob_path(at.digest))
    return verify.check_manifest(content, layout.blob_path(at.digest))


def read_contents(layout: Layout, target: Target) -> Contents:
    """Reads and checks a target's manifest and config.

    Raises:
        RejectError: either is missing or damaged, or they disagree with the index.
    """
    manifest = read_manifest(layout, target)
    return Contents(manifest, _read_config(layout, target, manifest))


def _read_config(layout: Layout, target: Target, manifest: Manifest) -> Config:
    at = manifest.config
    content = layout.read_blob(at.digest, at.size)
    verify.check_digest(content, at.digest, layout.blob_path(at.digest))
    name, needs = verify.target_of(target.descriptor, str(layout.path / "index.json"))
    path = layout.blob_path(at.digest)
    config = verify.check_config(content, target.format, name, needs, path)
    verify.check_kernels_layer(config, manifest, layout.blob_path(target.descriptor.digest))
    return config


def read_kernels(layout: Layout, config: Config, manifest: Manifest) -> bytes | None:
    """Reads and checks the library of kernels of a target; None: it has none.

    Raises:
        RejectError: it is missing or damaged.
    """
    if config.kernels is None:
        return None
    at = manifest.layer(bundle.KERNELS_MEDIA_TYPE)
    content = layout.read_blob(at.digest, at.size)
    verify.check_kernels(content, config.kernels, layout.blob_path(at.digest))
    return content


def check_blobs(layout: Layout, manifests: Sequence[Manifest], receipts: Receipts | None) -> int:
    """Hashes every layer and program table, but for those with a valid receipt.

    Args:
        layout: the bundle.
        manifests: of all of its targets.
        receipts: of earlier verifications; None: hash everything.

    Returns:
        How many bytes were hashed.

    Raises:
        RejectError: a layer is missing, of another size, or has another digest.
    """
    sizes = {at.digest: at.size for m in manifests for at in (m.config, *m.layers)}
    unknown = []
    for digest, size in sizes.items():
        with layout.open_blob(digest, size) as (_, identity):
            if receipts is None or not receipts.holds(digest, identity):
                unknown.append(digest)
    if not unknown:
        return 0

    def check(digest: str) -> int:
        with layout.open_blob(digest, sizes[digest]) as (descriptor, identity):
            found = digest_file(descriptor)
            if found != digest:
                raise RejectError(layout.blob_path(digest), f"expected {digest}, found {found}")
            if receipts is not None:
                receipts.add(digest, identity)
            return sizes[digest]

    from concurrent.futures import ThreadPoolExecutor  # not needed at most starts

    with ThreadPoolExecutor() as pool:
        hashed = sum(pool.map(check, unknown))
    if receipts is not None:
        receipts.save()
    return hashed


def map_layers(layout: Layout, manifest: Manifest) -> dict[str, Layer]:
    """Maps every layer of a target, by media type.

    Raises:
        RejectError: a layer is missing or of another size.
    """
    from prejit.runtime.programs import Layer

    return {
        layer.mediaType: Layer(
            layout.map_blob(layer.digest, layer.size), layout.blob_path(layer.digest)
        )
        for layer in manifest.layers
    }


@start.quickly()
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
    from prejit.runtime.loaded import Bundle

    started = time.perf_counter()
    path = arguments.path("path", path)
    arguments.choice("on_mismatch", on_mismatch, ("jit", "error"))
    arguments.choice("while_compiling", while_compiling, ("wait", "smaller"))
    arguments.function("on_fallback", on_fallback)
    if fingerprint is not None:
        arguments.instance("fingerprint", fingerprint, Fingerprint)
    with Layout(path) as layout:
        index, digest = open_index(layout)
        machine = Fingerprint.current()
        targets = match(layout, index, machine)
        if fingerprint is not None:
            # Code still runs here: a declared machine may lack what this one has, but cannot lend it
            # instructions. Those would end in SIGILL.
            here = {target.name: target for target in targets}
            declared = match(layout, index, fingerprint)
            targets = tuple(t if not t.verdict.matches else here[t.name] for t in declared)
        if on_mismatch == "error" and not any(target.verdict.matches for target in targets):
            raise _mismatch(layout, targets)
        # Every byte of every target is checked; the program table is read of the one that is served.
        manifests = {target.name: read_manifest(layout, target) for target in targets}
        check_blobs(layout, tuple(manifests.values()), Receipts(layout.path))
        library: Library | None = None
        while chosen := next((target for target in targets if target.verdict.matches), None):
            config = _read_config(layout, chosen, manifests[chosen.name])
            try:
                library = _load_kernels(layout, config, manifests[chosen.name])
                break
            except KernelError as error:
                targets = _without(targets, chosen, config, error)
        if chosen is None and on_mismatch == "error":
            raise _mismatch(layout, targets)
        served = chosen or _closest(targets)
        manifest = manifests[served.name]
        if chosen is None:
            config = _read_config(layout, served, manifest)
            for axis in served.verdict.mismatches:
                with _fallbacks_lock:
                    _fallbacks[axis.name] += 1
                if on_fallback is not None:
                    on_fallback(axis)
            warnings.warn(_fallback_warning(layout, served), FallbackWarning, stacklevel=_CALLER)
            notice = expiry_notice(config.portable, machine.jaxlib, date.today())
            if notice is not None:
                warnings.warn(f"{layout.path}: {notice}", PrejitWarning, stacklevel=_CALLER)
        return Bundle(
            digest,
            config,
            map_layers(layout, manifest),
            tuple(target.verdict for target in targets),
            platform=machine.platform,
            matched=chosen is not None,
            started=started,
            serve_smaller=while_compiling == "smaller",
            kernels=library,
        )


def _load_kernels(layout: Layout, config: Config, manifest: Manifest) -> Library | None:
    """The kernels of a target, in this process; None: it has none.

    Raises:
        RejectError: the library is missing or damaged.
        KernelError: this machine does not load it.
    """
    if (content := read_kernels(layout, config, manifest)) is None:
        return None
    from prejit.runtime import kernels

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


def fallback_counts() -> dict[str, int]:
    """How many times each axis caused a fallback in this process, by its name.

    A load that falls back counts each axis on which the closest target does not fit.
    """
    with _fallbacks_lock:
        return dict(_fallbacks)


def expiry_notice(portable: Portable | None, jaxlib: str, today: date) -> str | None:
    """What to say of portable programs whose promised time is about to end, or has; None: nothing.

    Args:
        portable: of the bundle; None: of format 1, which tells nothing.
        jaxlib: that is to read them. The one that wrote them always can.
        today: the date.
    """
    if portable is None or portable.readable_until is None or jaxlib == portable.jax:
        return None
    until = date.fromisoformat(portable.readable_until)
    if today + NOTICE < until:
        return None
    ends = "ended" if today > until else "ends"
    return (
        f"its portable programs are of jax {portable.jax}, which later versions promise to read for six "
        f"months: that {ends} on {until}. Build it again with a newer jax"
    )


def _closest(targets: Sequence[Target]) -> Target:
    return min(targets, key=lambda target: target.verdict.distance)


def _mismatch(layout: Layout, targets: Sequence[Target]) -> MismatchError:
    reasons = "; or ".join(f"{target.name} ({target.verdict.reason()})" for target in targets)
    return MismatchError(
        f"{layout.path}: this machine is none of the bundle's targets: {reasons}",
        verdicts=tuple(target.verdict for target in targets),
        hint="add a [[target]] for this machine and build again, or allow compiling here "
        '(on_mismatch="jit", without --require-aot)',
    )


def _fallback_warning(layout: Layout, closest: Target) -> str:
    return (
        f"{layout.path}: this machine is none of the bundle's targets, so programs are compiled here; "
        f"closest is {closest.name}: {closest.verdict.reason()}. See `prejit explain {layout.path}`."
    )
