"""Bundles in a repository of an OCI registry, as the OCI distribution specification 1.1 has it.

What is attached to a bundle is found by the referrers API, or by the tags that stand in for it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from prejit.runtime.base.files import digest_of, is_digest
from prejit.runtime.base.typed_json import parse_object, to_json
from prejit.runtime.errors import RejectError, StoreError, UsageError
from prejit.runtime.format import limits
from prejit.runtime.format.bundle_schema import Descriptor
from prejit.runtime.format.checks.oci import check_index
from prejit.runtime.format.index_writing import encode_root
from prejit.runtime.format.names import (
    ARTIFACT_TYPE,
    INDEX_MEDIA_TYPE,
    MANIFEST_MEDIA_TYPE,
    PARTS_MEDIA_TYPE,
    SIGNATURE_MEDIA_TYPE,
    STATEMENT_MEDIA_TYPE,
)
from prejit.runtime.format.referrers import attached_entry
from prejit.runtime.format.root import read_descriptor
from prejit.runtime.ship.reference import Reference
from prejit.runtime.ship.registry_client import (
    ANSWER_SECONDS,
    UPLOAD_BYTES_PER_SECOND,
    BlobBody,
    RegistryClient,
)
from prejit.runtime.ship.repository import (
    MOST_TRANSFERS,
    Pieces,
    RemoteFiles,
    Shipment,
    Tagged,
    arriving,
    check_count,
    encode_copy,
)

if TYPE_CHECKING:
    from requests import Response

_MANIFEST_PAUSES_SECONDS = (0.05, 0.2, 0.5)
"""Pauses before a manifest is sent again. A registry on a file system answers 400 while another machine
uploads a blob of the manifest: it finds the blob half written."""
_MORE_UPLOADS = 4
"""How often an upload that the registry lost begins again."""
_DOCUMENTS = frozenset({INDEX_MEDIA_TYPE, MANIFEST_MEDIA_TYPE})
_ATTACHED = frozenset({SIGNATURE_MEDIA_TYPE, PARTS_MEDIA_TYPE, STATEMENT_MEDIA_TYPE})
"""The artifact types that are fetched. Others, such as scans by a registry, mean nothing to prejit."""
_REQUESTS = 8
_MOST_PAGES = 1000
"""Pages of a list of tags. Registries give 100 to 1,000 tags each."""
_MOST_PAGE_BYTES = 16 << 20
"""Maximum size of a page: some registries have one only."""


class Registry:
    """Implements `repository.Repository` for a repository of a registry."""

    def __init__(
        self,
        reference: Reference,
        *,
        answer_seconds: float = ANSWER_SECONDS,
        pauses: Sequence[float] | None = None,
    ) -> None:
        """Connect to nothing yet.

        Args:
            reference: the repository.
            answer_seconds: how long it may take to answer.
            pauses: pauses in seconds before each further attempt; None: the usual ones.

        Raises:
            UsageError: requests is not installed.
        """
        self.name = str(replace(reference, tag="", digest=""))
        self.most_transfers = MOST_TRANSFERS
        self._client = RegistryClient(reference, self.name, answer_seconds, pauses)
        self._has_referrers = True

    # ------------------------------------------------------------------ reading

    def open(self, tag: str, digest: str) -> RemoteFiles:
        """See `Repository.open`."""
        where = f"{self.name}{f':{tag}' if tag else ''}{f'@{digest}' if digest else ''}"
        at, content = self.manifest(digest or tag, where)
        if digest and at.digest != digest:
            raise RejectError(where, f"expected {digest}, found {at.digest}")
        plain = parse_object(content)
        kind = plain.get("artifactType")
        if at.mediaType == INDEX_MEDIA_TYPE and kind is None:  # skopeo drops it
            listed = plain.get("manifests")
            entries = [
                read_descriptor(each, where)
                for each in (listed if isinstance(listed, list) else ())
            ]
            attached, known = self._attached(entries, entries)
            return RemoteFiles(where, encode_copy(entries, attached), self._fetch, known)
        if kind != ARTIFACT_TYPE:
            config = plain.get("config")
            found = kind or (config.get("mediaType") if isinstance(config, dict) else None)
            raise UsageError(
                f"{where}: expected a bundle of prejit, found {found or at.mediaType!s:.200}",
                hint="push the bundle under another tag, without --image and --modelpack",
            )
        if at.mediaType == INDEX_MEDIA_TYPE:
            index = check_index(content, where)
            attached, known = self._attached([at, *index.manifests], index.manifests)
            index_file = encode_root(index, content, attached)
        else:
            at = replace(at, artifactType=ARTIFACT_TYPE)
            attached, known = self._attached([at], ())
            index_file = encode_copy([at], attached)
        return RemoteFiles(where, index_file, self._fetch, {at.digest: content, **known})

    def manifest(self, name: str, where: str) -> tuple[Descriptor, bytes]:
        """Return a manifest or an index by its tag or digest. Raise StoreError where there is none."""
        found = self.find_manifest(name)
        if found is None:
            raise StoreError(
                f"{where}: not found", hint=f"`prejit ls {self.name}` says which tags there are"
            )
        return found

    def find_manifest(
        self, name: str, most: int = limits.MAX_INDEX_BYTES
    ) -> tuple[Descriptor, bytes] | None:
        """Return a manifest or an index of at most so many bytes; None: there is none."""
        headers = {"Accept": ", ".join(sorted(_DOCUMENTS))}
        answer = self._client.read(f"manifests/{name}", most, headers)
        if answer is None:
            return None
        response, content = answer
        kind = response.headers.get("Content-Type", "").partition(";")[0].strip()
        return Descriptor(kind, digest_of(content), len(content)), content

    def _fetch(self, at: Descriptor, start: int) -> Iterator[bytes]:
        """Yield a blob's bytes from a place on, for as long as they arrive."""
        found = self.find_blob(at, start)
        if found is None:
            raise StoreError(
                f"{self.name}@{at.digest}: not found", hint="push the bundle again: it is not whole"
            )
        yield from found

    def find_blob(self, at: Descriptor, start: int = 0) -> Iterator[bytes] | None:
        """Return a blob's bytes from a place on, for as long as they arrive; None: there is none."""
        kind = "manifests" if at.mediaType in _DOCUMENTS else "blobs"
        headers = {"Accept": at.mediaType if kind == "manifests" else "*/*"}
        headers["Accept-Encoding"] = "identity"
        if start:
            headers["Range"] = f"bytes={start}-"
        path = f"{kind}/{at.digest}"
        response = self._client.ask("GET", path, headers=headers, stream=True, missing=True)
        return None if response is None else self._read(response, path, start)

    def _read(self, response: Response, path: str, start: int) -> Iterator[bytes]:
        skipped = start if response.status_code == 200 else 0
        try:
            for piece in arriving(response, f"{self.name}/{path}", is_decoded=False):
                yield piece[skipped:] if skipped else piece
                skipped = max(0, skipped - len(piece))
        except Exception as error:  # urllib3's own, which are no OSError
            raise self._client.failed(path, error) from error

    def _attached(
        self, subjects: Sequence[Descriptor], targets: Sequence[Descriptor]
    ) -> tuple[list[Descriptor], dict[str, bytes]]:
        """Return the entries of what is attached to something, and to that, in the order of their digests.

        Beside them come the manifests that a pull reads next, by digest: those that were asked for meanwhile
        and are there.
        """
        found, asked = dict[str, Descriptor](), {at.digest for at in subjects}
        wanted = [at.digest for at in subjects]
        soon = list(targets) if len(targets) <= _REQUESTS else []  # of many, few are pulled
        reads = list[Future[bytes | None]]()
        with ThreadPoolExecutor(2 * _REQUESTS, "prejit-manifests") as pool:
            while wanted and len(found) < limits.MAX_ROOT_ENTRIES:
                answers = [pool.submit(self._referrers, digest) for digest in wanted]
                reads += [pool.submit(self._read_early, at) for at in soon]
                some = [each for answer in answers for each in answer.result()]
                soon = [at for at in some if at.digest not in found]
                found |= {at.digest: at for at in some}
                wanted = [at.digest for at in some if at.digest not in asked]
                asked |= set(wanted)
            reads += [pool.submit(self._read_early, at) for at in soon]
        known = [content for read in reads if (content := read.result()) is not None]
        return [found[digest] for digest in sorted(found)], {digest_of(c): c for c in known}

    def _read_early(self, at: Descriptor) -> bytes | None:
        """Return a manifest; None: it cannot be read now. Who needs it reads it again and gets the error."""
        with contextlib.suppress(StoreError, RejectError):
            answer = self.find_manifest(at.digest, limits.MAX_MANIFEST_BYTES)
            if answer is not None and answer[0].digest == at.digest:
                return answer[1]
        return None

    def _referrers(self, digest: str) -> list[Descriptor]:
        listed = self._listed_referrers(digest)
        where = f"{self.name} (referrers of {digest})"
        found = [read_descriptor(each, where) for each in listed]
        return [
            attached_entry(at.digest, at.size, at.artifactType or "")
            for at in found
            if at.artifactType in _ATTACHED and at.size <= limits.MAX_MANIFEST_BYTES
        ]

    def _listed_referrers(self, digest: str) -> list[Any]:
        """Return the descriptors of what refers to a digest, by the API or by the tag instead of it."""
        where = f"{self.name} (referrers of {digest})"
        listed, pages = list[Any](), 0
        if self._has_referrers:
            for content in self._pages(f"referrers/{digest}", limits.MAX_INDEX_BYTES, "referrers"):
                pages += 1
                listed += _listed(content, where)
                if len(listed) > limits.MAX_ROOT_ENTRIES:
                    most = limits.MAX_ROOT_ENTRIES
                    raise RejectError(where, f"expected at most {most} entries, found more")
            self._has_referrers = pages > 0  # a registry with the API never answers 404
        if pages or (fallback := self.find_manifest(_fallback_tag(digest))) is None:
            return listed
        return _listed(fallback[1], where)

    def _pages(self, path: str, most_bytes: int, what: str) -> Iterator[bytes]:
        """Yield the pages of a list; none: there is no such list."""
        seen = set[str]()
        for _ in range(_MOST_PAGES):
            if path in seen:
                raise RejectError(
                    self.name, f"pages of {what} form a circle: {path:.80} comes again"
                )
            if (answer := self._client.read(path, most_bytes)) is None:
                if not seen:
                    return
                raise StoreError(f"{self.name}: {path:.80}: not found", hint="try again")
            response, content = answer
            yield content
            seen.add(path)
            path = response.links.get("next", {}).get("url", "")
            if not path:
                return
        raise StoreError(
            f"{self.name}: expected at most {_MOST_PAGES} pages of {what}, found one more",
            hint="name a tag or a digest: only the list of all is refused",
        )

    def tags(self) -> list[Tagged]:
        """See `Repository.tags`."""
        shown = [each for each in sorted(set(self._tag_names())) if not _is_fallback(each)]
        with ThreadPoolExecutor(_REQUESTS, "prejit-tags") as pool:
            return [
                Tagged(*pair) for pair in zip(shown, pool.map(self.resolve, shown), strict=True)
            ]

    def _tag_names(self) -> list[str]:
        names, is_there = list[str](), False
        for content in self._pages("tags/list?n=1000", _MOST_PAGE_BYTES, "tags"):
            is_there = True
            found = parse_object(content).get("tags") or []
            if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
                raise RejectError(self.name, f"expected a list of tags, found {content[:80]!r}")
            names += found
            check_count(names, self.name)
        if not is_there:
            raise StoreError(f"{self.name}: not found", hint="push a bundle first: prejit push")
        return names

    def resolve(self, tag: str) -> str:
        """See `Repository.resolve`."""
        found = self.find_manifest(tag)
        return "" if found is None else found[0].digest

    # ------------------------------------------------------------------ writing

    def has(self, at: Descriptor) -> bool:
        """See `Repository.has`."""
        kind = "manifests" if at.mediaType in _DOCUMENTS else "blobs"
        headers = {"Accept": at.mediaType}
        return (
            self._client.ask("HEAD", f"{kind}/{at.digest}", headers=headers, missing=True)
            is not None
        )

    def mount(self, at: Descriptor, repository: str) -> bool:
        """Take a blob from another repository of this registry; return whether the registry could."""
        path = f"blobs/uploads/?mount={at.digest}&from={repository}"
        response = self._client.ask("POST", path, headers={"Content-Length": "0"}, refused=True)
        if response is not None and response.status_code == 202:  # it began an upload instead
            self._client.ask("DELETE", response.headers.get("Location", ""), refused=True)
        return response is not None and response.status_code == 201

    def write(self, at: Descriptor, pieces: Pieces) -> None:
        """See `Repository.write`. The whole blob is one request: not all registries take parts."""
        headers = {"Content-Type": "application/octet-stream"}
        seconds = self._client.answer_seconds + at.size / UPLOAD_BYTES_PER_SECOND
        body = BlobBody(at, pieces, self.name)
        for more in range(_MORE_UPLOADS, -1, -1):
            begun = self._client.ask("POST", "blobs/uploads/", headers={"Content-Length": "0"})
            location = begun.headers.get("Location") if begun is not None else None
            if not location:
                raise StoreError(f"{self.name}: expected the place of an upload, found none")
            url = f"{location}{'&' if '?' in location else '?'}digest={at.digest}"
            # After a cut many registries do not know the upload any more: 404, and a new one is due.
            answer = self._client.ask(
                "PUT", url, headers=headers, data=body, seconds=seconds, missing=more > 0
            )
            if answer is not None:
                return

    def publish(self, shipment: Shipment, tag: str) -> None:
        """See `Repository.publish`."""
        for document in shipment.documents:
            name = document.at.digest
            if name == shipment.digest and tag:
                name = tag
            answer = self.put_manifest(name, document.at.mediaType, document.content)
            subject = parse_object(document.content).get("subject")
            if isinstance(subject, dict) and "OCI-Subject" not in answer.headers:
                self._add_fallback(str(subject.get("digest")), document.at, document.content)

    def put_manifest(self, name: str, media_type: str, content: bytes) -> Response:
        """Write a manifest under a tag or its digest."""
        headers = {"Content-Type": media_type}
        put = partial(self._client.ask, "PUT", f"manifests/{name}", headers=headers, data=content)
        for pause in _MANIFEST_PAUSES_SECONDS:
            if (answer := put(refused=True)) is not None:
                return answer
            time.sleep(pause)
        answer = put()
        assert answer is not None
        return answer

    def _add_fallback(self, subject: str, at: Descriptor, content: bytes) -> None:
        """List a manifest under the tag that stands in for the referrers API (OCI distribution 1.1)."""
        listed = self._listed_referrers(subject)
        if any(isinstance(each, dict) and each.get("digest") == at.digest for each in listed):
            return
        kind = parse_object(content).get("artifactType")
        listed.append(Descriptor(at.mediaType, at.digest, at.size, kind))
        index = {"schemaVersion": 2, "mediaType": INDEX_MEDIA_TYPE, "manifests": listed}
        self.put_manifest(_fallback_tag(subject), INDEX_MEDIA_TYPE, to_json(index))

    def close(self) -> None:
        """See `Destination.close`. No blob is there in part."""

    def remove(self, tag: str) -> int:
        """See `Repository.remove`."""
        self.manifest(tag, f"{self.name}:{tag}")
        if self._client.ask("DELETE", f"manifests/{tag}", refused=True) is None:
            raise StoreError(
                f"{self.name}:{tag}: this registry deletes no tags",
                hint="name the digest, which removes all its tags, or use the registry's own interface",
            )
        return 0


def _listed(content: bytes, where: str) -> list[Any]:
    """Return the entries of an index of referrers."""
    listed = parse_object(content).get("manifests", content)
    if not isinstance(listed, list | None):
        # None of them would be an answer, too: a bundle would arrive without its signatures.
        raise RejectError(where, f"expected an index, found {content[:80]!r}")
    return listed or []


def _fallback_tag(digest: str) -> str:
    return digest.replace(":", "-")


def _is_fallback(tag: str) -> bool:
    return is_digest(tag.replace("-", ":", 1))
