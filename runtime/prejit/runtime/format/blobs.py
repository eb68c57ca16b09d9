"""Read the blobs of a bundle: every byte is hashed before it is used."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, final

from prejit.runtime.base.files import Content, Identity, digest_file, map_file
from prejit.runtime.errors import RejectError, StoreError
from prejit.runtime.format.checks import layers as layer_checks
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.opening import open_index
from prejit.runtime.format.schema import Descriptor, ImageManifest, Index, Segment
from prejit.runtime.store.receipts import Receipts

_ATTEMPTS = 20
"""How often a bundle may be replaced while it is read. Opening all files takes milliseconds, a build takes
seconds."""

_T = TypeVar("_T")


@final
class Blobs:
    """Verified blobs of a bundle.

    Each file is opened once. So the bytes come from the very file whose digest was right, even if another
    file has its name by now.

    Attributes:
        hashed_bytes: the number of bytes that were hashed; all others have a receipt.
    """

    def __init__(self, layout: Layout, contents: dict[str, Content], hashed_bytes: int) -> None:
        self._layout = layout
        self._contents = contents
        self.hashed_bytes = hashed_bytes

    def read(self, at: Descriptor) -> bytes:
        """Return a copy of a blob, to which nobody else can write.

        The caller must check its digest, because another process may have written to the file since it was
        hashed.
        """
        return bytes(self._contents[at.digest])

    def layers(self, manifest: ImageManifest) -> dict[str, Layer]:
        """Return every layer of a target, by media type."""
        return {
            at.mediaType: Layer(self._contents[at.digest], self._layout.blob_path(at.digest))
            for at in manifest.layers
        }


def check_blobs(
    layout: Layout,
    manifests: Collection[ImageManifest],
    receipts: Receipts | None,
    *,
    keep: Collection[ImageManifest] = (),
) -> Blobs:
    """Hash every layer and program table that has no valid receipt: check 8.

    Args:
        layout: the bundle.
        manifests: the manifests of all its targets.
        receipts: receipts of earlier verifications; None: hash everything.
        keep: the manifests whose blobs are read afterwards. Their blobs are mapped.

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
                hint="the disk or the network failed, and the bundle may be sound: see the system's log",
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
    """Read one bundle whole, the old one or the new one, even if a build replaces it meanwhile.

    Readers take no lock. They begin again if a check fails and the index has changed since they began.

    Args:
        path: directory of the bundle.
        read: reads from the layout; also takes the index and the bundle's digest. It may be called several
            times.

    Raises:
        StoreError: the directory cannot be opened, or a build replaces it again and again.
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
        hint="wait until the builds that write to this directory are done, then try again",
    )


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer of a bundle, mapped.

    Attributes:
        content: its bytes.
        path: the file, for errors.
    """

    content: Content
    path: str

    def unpack(self, segment: Segment) -> bytes:
        """Return a frame of a pack, decompressed: the very bytes that check 9 verified."""
        # The slice is a copy, to which no other process can write.
        frame = self.content[segment.offset : segment.offset + segment.size]
        return layer_checks.unpack(frame, segment, self.path)
