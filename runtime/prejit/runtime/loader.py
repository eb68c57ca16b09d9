"""`load`: from the directory of a bundle to programs that run, in a fixed order.

    open -> index -> fingerprint -> manifests -> digests of all blobs -> config -> kernels -> map -> run

Two families of failure are never mixed. MISMATCH (this machine is none of the targets) falls back to
compiling the portable programs, with a warning that names the axis, or is an error where the caller wants
that. REJECT (damaged, forged, oversized) is always an error.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from datetime import date, timedelta
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar, final

from prejit.runtime import arguments, bundle, copied, start, verify
from prejit.runtime.bundle import Config, Descriptor, Index, Manifest, Portable
from prejit.runtime.errors import (
    FallbackWarning,
    KernelError,
    MismatchError,
    PrejitWarning,
    RejectError,
    StoreError,
)
from prejit.runtime.fingerprint import Axis, Fingerprint, Verdict, compare, preference
from prejit.runtime.layout import Content, Identity, Layout, digest_file, map_file
from prejit.runtime.receipt import Receipts

if TYPE_CHECKING:  # NumPy comes with them: what only reads a bundle does without
    from prejit.runtime.kernels import Library
    from prejit.runtime.loaded import Bundle
    from prejit.runtime.programs import Layer

NOTICE = timedelta(days=30)
"""How long before portable programs expire somebody is told."""

_CALLER = 3
"""Of a warning in `load`: behind the frame of its decorator."""

_ATTEMPTS = 20
"""How often a bundle may be replaced while it is read. An attempt takes milliseconds until all files are
open, a build seconds."""

_T = TypeVar("_T")

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


def read_manifests(layout: Layout, targets: Sequence[Target]) -> dict[str, Manifest]:
    """Reads and checks the manifests of targets, by name; each file once. Raises as that one."""
    read: dict[str, Manifest] = {}
    for target in targets:
        if target.descriptor.digest not in read:
            read[target.descriptor.digest] = read_manifest(layout, target)
    return {target.name: read[target.descriptor.digest] for target in targets}


def read_contents(layout: Layout, target: Target) -> Contents:
    """Reads and checks a target's manifest and config.

    Raises:
        RejectError: either is missing or damaged, or they disagree with the index.
    """
    manifest = read_manifest(layout, target)
    at = manifest.config
    content = layout.read_blob(at.digest, at.size)
    return Contents(manifest, _check_config(layout, target, manifest, content))


def _check_config(layout: Layout, target: Target, manifest: Manifest, content: bytes) -> Config:
    name, needs = verify.target_of(target.descriptor, str(layout.path / "index.json"))
    path = layout.blob_path(manifest.config.digest)
    verify.check_digest(content, manifest.config.digest, path)
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


@final
class Blobs:
    """Verified blobs of a bundle.

    Each file was opened once: what is read here is of the very file whose digest was right, whatever lies
    under its name by now.

    Attributes:
        hashed_bytes: how many bytes were hashed; all others have a receipt.
    """

    def __init__(self, layout: Layout, contents: dict[str, Content], hashed_bytes: int) -> None:
        self._layout = layout
        self._contents = contents
        self.hashed_bytes = hashed_bytes

    def read(self, at: Descriptor) -> bytes:
        """A copy of a blob, which nobody else can write to.

        Its digest is the caller's to check: somebody may have written to the file since it was hashed.
        """
        return bytes(self._contents[at.digest])

    def layers(self, manifest: Manifest) -> dict[str, Layer]:
        """Every layer of a target, by media type."""
        from prejit.runtime.programs import Layer

        return {
            at.mediaType: Layer(self._contents[at.digest], self._layout.blob_path(at.digest))
            for at in manifest.layers
        }


def check_blobs(
    layout: Layout,
    manifests: Collection[Manifest],
    receipts: Receipts | None,
    *,
    keep: Collection[Manifest] = (),
) -> Blobs:
    """Hashes every layer and program table, but for those with a valid receipt.

    Args:
        layout: the bundle.
        manifests: of all of its targets.
        receipts: of earlier verifications; None: hash everything.
        keep: those of them whose blobs are read afterwards. They are mapped, which takes a descriptor each.

    Returns:
        The blobs of `keep`.

    Raises:
        RejectError: a layer is missing, of another size, or has another digest.
        StoreError: the disk does not give its bytes.
    """
    kept = {at.digest: at.size for m in keep for at in (m.config, *m.layers)}
    sizes = kept | {at.digest: at.size for m in manifests for at in (m.config, *m.layers)}
    contents: dict[str, Content] = {}

    def check(digest: str, descriptor: int, identity: Identity) -> int:
        path = layout.blob_path(digest)
        try:
            found = digest_file(descriptor)
        except OSError as error:
            raise StoreError(
                f"{path}: cannot read: {error.strerror}",
                hint="the disk or the network failed, which says nothing about the bundle: see the "
                "system's log",
            ) from error
        if found != digest:
            raise RejectError(path, f"expected {digest}, found {found}")
        if receipts is not None:
            receipts.add(digest, identity)
        return sizes[digest]

    def check_other(digest: str) -> int:
        with layout.open_blob(digest, sizes[digest]) as (descriptor, identity):
            return check(digest, descriptor, identity)

    jobs: list[Callable[[], int]] = []
    with contextlib.ExitStack() as opened:
        for digest, size in sizes.items():
            with contextlib.ExitStack() as stack:
                descriptor, identity = stack.enter_context(layout.open_blob(digest, size))
                if digest in kept:
                    contents[digest] = map_file(descriptor, size)
                if receipts is not None and receipts.holds(digest, identity):
                    continue
                if digest in kept:
                    opened.push(stack.pop_all())
                    jobs.append(partial(check, digest, descriptor, identity))
                else:
                    jobs.append(partial(check_other, digest))
        if not jobs:
            return Blobs(layout, contents, 0)

        from concurrent.futures import ThreadPoolExecutor  # not needed at most starts

        with ThreadPoolExecutor() as pool:
            hashed = sum(pool.map(lambda job: job(), jobs))
    if receipts is not None:
        receipts.save()
    return Blobs(layout, contents, hashed)


def read_whole(path: str | os.PathLike[str], read: Callable[[Layout, Index, str], _T]) -> _T:
    """Reads from one bundle, the old or the new, where builds replace it meanwhile.

    Readers take no lock: they begin again where the index has changed since they began.

    Args:
        path: directory of the bundle.
        read: takes the layout, the index and the bundle's digest; may be called several times.

    Raises:
        StoreError: the directory cannot be opened, or it is replaced again and again.
        RejectError: the bundle is damaged.
    """
    for _ in range(_ATTEMPTS):
        with Layout(path) as layout:
            try:
                index, digest = open_index(layout)
                return read(layout, index, digest)
            except RejectError:
                if not layout.is_replaced():
                    raise
    raise StoreError(
        f"{os.fspath(path)}: cannot read a bundle: it was replaced {_ATTEMPTS} times meanwhile",
        hint="something builds into this directory all the time: load it when that is done",
    )


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
            raise _mismatch(layout, targets)
        # Every byte of every target is checked; the program table is read of the one that is served.
        manifests = read_manifests(layout, targets)
        fitting = [target for target in targets if target.verdict.matches]
        served = {t.name: manifests[t.name] for t in fitting or [_closest(targets)]}
        receipts = Receipts(layout.path)
        blobs = check_blobs(layout, manifests.values(), receipts, keep=served.values())
        return layout, digest, targets, served, blobs

    layout, digest, targets, manifests, blobs = read_whole(path, open_targets)
    library: Library | None = None
    while chosen := next((target for target in targets if target.verdict.matches), None):
        manifest = manifests[chosen.name]
        config = _check_config(layout, chosen, manifest, blobs.read(manifest.config))
        try:
            library = _load_kernels(layout, config, manifest, blobs)
            break
        except KernelError as error:
            targets = _without(targets, chosen, config, error)
    if chosen is None and on_mismatch == "error":
        raise _mismatch(layout, targets)
    served = chosen or _closest([target for target in targets if target.name in manifests])
    manifest = manifests[served.name]
    if chosen is None:
        config = _check_config(layout, served, manifest, blobs.read(manifest.config))
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
    from prejit.runtime import kernels

    at = manifest.layer(bundle.KERNELS_MEDIA_TYPE)
    content = blobs.read(at)
    verify.check_kernels(content, config.kernels, layout.blob_path(at.digest))
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
