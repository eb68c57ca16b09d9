"""Write a bundle into its directory, unless it is there already, and attach something to a bundle.

Blobs are written first, `index.json` last, and each file as temporary file, fsync, rename. So a writer that
is killed leaves what was there before, or the whole of what is new.
"""

from __future__ import annotations

import json
import logging
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from prejit.compiler.progress import Progress
from prejit.runtime.base.file_hashing import digest_file
from prejit.runtime.base.files import digest_of, is_digest, store_errors
from prejit.runtime.base.typed_json import from_json, to_json
from prejit.runtime.base.written_files import write_file
from prejit.runtime.errors import RejectError, StoreError, UsageError
from prejit.runtime.format import limits
from prejit.runtime.format.audit import check_attached, check_index_file
from prejit.runtime.format.blob_hashing import check_blob
from prejit.runtime.format.blobs import check_blobs
from prejit.runtime.format.bundle_schema import Descriptor, Index
from prejit.runtime.format.index_writing import encode_root, is_ours, locked, stranger
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.names import (
    BUNDLE_NAME,
    EMPTY_MEDIA_TYPE,
    MANIFEST_MEDIA_TYPE,
    OCI_LAYOUT,
    RECORDED_MEDIA_TYPE,
    REF_NAME,
    SIGNATURE_MEDIA_TYPE,
)
from prejit.runtime.format.opening import match, read_manifest
from prejit.runtime.format.referrers import ATTACHED, Referrer, attached_entry, reached, referrers
from prejit.runtime.format.root import read_root
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.machine.kept_files import Receipts

if TYPE_CHECKING:
    from prejit.compiler.pipeline.pack.contents import PackedBundle

_log = logging.getLogger(__name__)


def write(bundle: PackedBundle, output: Path, progress: Progress) -> tuple[Path, bool]:
    """Write a bundle into `output/NAME`, unless it is there already.

    Returns:
        The directory, and whether it was changed.
    """
    path = output / bundle.name
    if is_current(path, bundle.index):
        remove_abandoned(path)
        _log.info("%s: is there already, byte for byte", path)
        return path, False
    _log.info("%s: written anew, because its index differs or there is none", path)
    signed = _is_signed(path)
    with progress.phase(f"writing {path}"):
        write_layout(path, bundle.index, bundle.blobs, digest_of_file=Receipts(path).digest_of)
    if signed and not _is_signed(path):
        progress.note(
            f"{path} is not signed any more: it has changed, and neither signatures of the bundle before nor "
            f"{path}.sig count for it. Sign it again: prejit sign {path}"
        )
    return path, True


def _is_signed(path: Path) -> bool:
    """Return whether the bundle in a directory, as a whole, has a signature."""
    try:
        with Layout(path) as layout:
            root = read_root(layout)
            attached = referrers(layout, root, root.digest)
            return any(each.artifact_type == SIGNATURE_MEDIA_TYPE for each in attached)
    except (RejectError, StoreError):
        return False


def check_place(name: str, output: Path) -> None:
    """Check that a bundle of this name may be written to `output/NAME`: nothing else is there.

    A damaged bundle may be replaced: that repairs it.

    Raises:
        UsageError: another bundle is there, or something that is none; or the output is no directory.
    """
    path = output / name
    if output.exists() and not output.is_dir():
        raise UsageError(
            f"{output}: expected a directory of bundles (--output), found a file; nothing was built",
            hint="give another directory (-o DIR), or move the file away",
        )
    if (output / "oci-layout").is_file() and (output / "index.json").is_file():
        raise UsageError(
            f"{output}: expected a directory of bundles (--output), found a bundle; nothing was built",
            hint=f"give the directory that it is in: -o {output.parent}",
        )
    if found := _found_at(path, name):
        raise UsageError(
            f"{path}: expected no bundle but an older {name!r} of `prejit build`, found {found}; nothing was "
            "changed",
            hint="build into another directory (-o DIR), give the bundle another name, or move this away",
        )


def _found_at(path: Path, name: str) -> str:
    """Return what keeps a bundle of this name from being written here; empty: nothing does."""
    try:
        with Layout(path) as layout:
            content = layout.read("index.json", limits.MAX_INDEX_BYTES)
            try:
                root = read_root(layout)
            except RejectError:
                return (
                    "" if is_ours(content) or not _is_index(content) else "what another tool wrote"
                )
            there = root.bundle.annotations[BUNDLE_NAME]
            targets = match(root, Fingerprint.current())
            layers = [at.mediaType for each in targets for at in read_manifest(layout, each).layers]
    except (RejectError, StoreError):
        if (path / "index.json").exists():  # a damaged bundle
            return ""
        return repr(found) if (found := stranger(path)) else ""
    if RECORDED_MEDIA_TYPE in layers:
        return "a recording of `prejit record`"
    return "" if there == name else f"the bundle {there!r}"


def _is_index(content: bytes) -> bool:
    try:
        return "manifests" in json.loads(content)
    except (ValueError, RecursionError, TypeError):
        return False


def is_current(path: Path, index: bytes) -> bool:
    """Return whether a directory holds exactly this bundle, undamaged."""
    try:
        with Layout(path) as layout:
            root = read_root(layout)
            if to_json(root.bundle) != index:  # another one, or a copy of some of its targets
                return False
            targets = match(root, Fingerprint.current())
            manifests = [read_manifest(layout, target) for target in targets]
            check_index_file(layout, root, check_attached(layout, root, manifests))
            check_blobs(layout, manifests, Receipts(path))
    except (RejectError, StoreError):
        return False
    return True


def _digest_of_file(path: Path) -> str:
    with open(path, "rb") as file:
        return digest_file(file.fileno())


def write_layout(
    path: Path,
    index: bytes,
    blobs: Mapping[str, bytes | Path],
    *,
    digest_of_file: Callable[[Path], str] = _digest_of_file,
) -> None:
    """Write a bundle, or replace one.

    New blobs are written first. Then `index.json` replaces the old one atomically. Then blobs that only the
    old bundle had are removed, and the temporary files of writers that were killed. So a reader of an index
    finds its blobs, or finds that `index.json` has changed. Writers of one bundle wait for each other.

    What refers to the bundle or to one of its targets stays, if the old bundle was the same or had the same
    target.

    Blobs that exist and match their names are not written again.

    Raises:
        StoreError: the disk is full, or writing is not permitted. The bundle that was there still opens.
    """
    directory = path / "blobs" / "sha256"
    with store_errors(directory, "make this directory", hint="write to another place, with -o"):
        directory.mkdir(parents=True, exist_ok=True)
    read = from_json(Index, index, str(path / "index.json"))
    with locked(path):
        referring = _kept_referrers(path, {digest_of(index), *(at.digest for at in read.manifests)})
        blobs = {**blobs, digest_of(index): index}
        _write_blobs(directory, blobs, digest_of_file)
        write_file(path / "oci-layout", OCI_LAYOUT)
        root = encode_root(read, index, [each.entry for each in referring])
        write_file(path / "index.json", root)
        kept = {*blobs, *(digest for each in referring for digest in _blobs_of(each))}
        stale = [file for file in directory.iterdir() if f"sha256:{file.name}" not in kept]
        for file in {*stale, *_abandoned(path)}:
            file.unlink(missing_ok=True)


def _abandoned(path: Path) -> Iterator[Path]:
    """Yield the temporary files of writers that were killed. The caller has the lock of the directory."""
    for pattern in (".oci-layout.*.tmp", ".index.json.*.tmp", "blobs/sha256/.*.tmp"):
        yield from path.glob(pattern)


class Part(NamedTuple):
    """A blob of something that is attached to a bundle, and annotations of its descriptor."""

    media_type: str
    content: bytes
    annotations: dict[str, str] | None = None

    def descriptor(self) -> Descriptor:
        """Return its OCI descriptor."""
        return Descriptor(
            self.media_type,
            digest_of(self.content),
            len(self.content),
            annotations=self.annotations or None,
        )


_EMPTY = Part(EMPTY_MEDIA_TYPE, b"{}")
"""The config of a manifest: it needs none."""


def attach(
    path: Path,
    subject: Descriptor,
    artifact_type: str,
    layers: Sequence[Part],
    annotations: Mapping[str, str],
) -> Descriptor:
    """Attach something to a bundle, to one of its targets, or to what is attached already.

    It writes a manifest that refers to the subject, and lists the manifest in `index.json`, with a name by
    which tools that do not know OCI's referrers can copy it. No digest of the bundle changes. If the same
    manifest is attached already, nothing changes. Temporary files of writers that were killed are removed.

    `artifact_type` is its type, such as `application/vnd.cyclonedx+json`. There is one layer at least.

    Returns:
        The descriptor of the manifest.

    Raises:
        UsageError: the bundle has no such subject, or its format has no place for what refers to it.
        RejectError: the bundle is damaged.
        StoreError: the disk is full, or writing is not permitted. What was there before is unchanged.
    """
    manifest = to_json(
        {
            "annotations": dict(annotations),
            "artifactType": artifact_type,
            "config": _EMPTY.descriptor(),
            "layers": [layer.descriptor() for layer in layers],
            "mediaType": MANIFEST_MEDIA_TYPE,
            "schemaVersion": 2,
            "subject": Descriptor(subject.mediaType, subject.digest, subject.size),
        }
    )
    if len(manifest) > limits.MAX_MANIFEST_BYTES:
        raise UsageError(
            f"{artifact_type}: expected a manifest of at most {limits.MAX_MANIFEST_BYTES} bytes, "
            f"found {len(manifest)}",
            hint="put what is large into a layer",
        )
    at = attached_entry(digest_of(manifest), len(manifest), artifact_type)
    blobs = {digest_of(part.content): part.content for part in (_EMPTY, *layers)}
    with locked(path):
        listed = _check_subject(path, subject)
        _write_blobs(path / "blobs" / "sha256", {**blobs, at.digest: manifest})
        if at.digest not in listed:
            root = json.loads((path / "index.json").read_bytes())
            root["manifests"].append(json.loads(to_json(at)))
            root["manifests"].sort(key=_attached_digest)
            # The order of the keys says which tool wrote the file, and stays.
            write_file(path / "index.json", json.dumps(root, separators=(",", ":")).encode())
        for file in [*_abandoned(path)]:
            file.unlink(missing_ok=True)
    return at


def _attached_digest(entry: dict[str, Any]) -> str:
    """Return what entries of `index.json` are sorted by: equal contents give equal bytes."""
    is_attached = str((entry.get("annotations") or {}).get(REF_NAME)).startswith(ATTACHED)
    return str(entry["digest"]) if is_attached else ""


def remove_abandoned(path: Path) -> None:
    """Remove what killed writers of a bundle left: temporary files, and blobs that nothing leads to."""
    with locked(path):
        for file in [*_abandoned(path), *_unused_blobs(path)]:
            file.unlink(missing_ok=True)


def _unused_blobs(path: Path) -> Iterator[Path]:
    """Yield the whole blobs that nothing leads to: a writer was killed before it wrote `index.json`."""
    with Layout(path) as layout:
        if not is_ours(layout.read("index.json", limits.MAX_INDEX_BYTES)):
            return  # another tool may keep what it likes there
        known = reached(layout, read_root(layout))
    for file in (path / "blobs" / "sha256").iterdir():
        name = f"sha256:{file.name}"
        if is_digest(name) and name not in known and _is_blob(file, file.lstat().st_size):
            yield file


def _check_subject(path: Path, subject: Descriptor) -> set[str]:
    """Check that a bundle has what something shall be attached to. Return the digests that it lists."""
    with Layout(path) as layout:
        root = read_root(layout)
    there = [*root.bundle.manifests, *root.others]
    if root.subject is not None:
        there.append(root.subject)
    if not any(at.digest == subject.digest and at.size == subject.size for at in there):
        raise UsageError(
            f"{path}: expected the bundle or one of its targets, found no {subject.digest}",
            hint="the bundle may have been replaced meanwhile: try again",
        )
    return {at.digest for at in there}


def _kept_referrers(path: Path, subjects: set[str]) -> list[Referrer]:
    """Return what the bundle at a path has that refers to these digests, or to what refers to them."""
    try:
        with Layout(path) as layout:
            found = referrers(layout, read_root(layout))
            known, kept = set(subjects), list[Referrer]()
            while more := [
                each for each in found if each.subject.digest in known and each not in kept
            ]:
                kept += [each for each in more if is_whole(layout, each)]
                known |= {each.descriptor.digest for each in kept}
                found = tuple(each for each in found if each not in more)
    except (RejectError, StoreError):
        return []  # there is no bundle yet, or a damaged one
    return sorted(kept, key=lambda each: each.descriptor.digest)


def is_whole(layout: Layout, referrer: Referrer) -> bool:
    """Return whether the blobs of a referrer are there and undamaged."""
    try:
        for at in (referrer.config, *referrer.layers):
            check_blob(layout, at)
    except RejectError:
        return False
    return True


def _blobs_of(referrer: Referrer) -> Iterator[str]:
    yield referrer.descriptor.digest
    yield referrer.config.digest
    for layer in referrer.layers:
        yield layer.digest


def _write_blobs(
    directory: Path,
    blobs: Mapping[str, bytes | Path],
    digest_of_file: Callable[[Path], str] = _digest_of_file,
) -> None:
    """Write those of some blobs that are not there."""
    for digest, content in blobs.items():
        file = directory / digest.removeprefix("sha256:")
        size = content.stat().st_size if isinstance(content, Path) else len(content)
        if not _is_blob(file, size, digest_of_file):
            write_file(file, content)


def _is_blob(
    path: Path, size: int, digest_of_file: Callable[[Path], str] = _digest_of_file
) -> bool:
    """Return whether a file exists, has this size, and matches the digest in its name."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(status.st_mode) or status.st_size != size:
        return False
    return digest_of_file(path) == f"sha256:{path.name}"
