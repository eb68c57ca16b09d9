"""Bundles in a repository of an OCI registry, as the OCI distribution specification 1.1 has it.

The credentials are those that docker, podman, skopeo and oras keep. What is attached to a bundle is found by
the referrers API, or by the tags that stand in for it.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit

from prejit.runtime.base.files import digest_of, is_digest
from prejit.runtime.base.typed_json import to_json
from prejit.runtime.errors import RejectError, StoreError, UsageError
from prejit.runtime.format import limits
from prejit.runtime.format.bundle_schema import Descriptor
from prejit.runtime.format.names import (
    ARTIFACT_TYPE,
    INDEX_MEDIA_TYPE,
    MANIFEST_MEDIA_TYPE,
    PARTS_MEDIA_TYPE,
    SIGNATURE_MEDIA_TYPE,
    STATEMENT_MEDIA_TYPE,
)
from prejit.runtime.format.referrers import attached_entry
from prejit.runtime.format.root import encode_root, read_descriptor
from prejit.runtime.ship.reference import Reference
from prejit.runtime.ship.remote_files import RemoteFiles
from prejit.runtime.ship.repository import (
    MOST_TRANSFERS,
    PIECE_BYTES,
    Pieces,
    Shipment,
    Tagged,
    checked,
    encode_copy,
)

if TYPE_CHECKING:
    from oras.auth.base import AuthBackend
    from requests import Response, Session

PLAIN_HTTP = "PREJIT_PLAIN_HTTP"
"""The environment variable with hosts, separated by commas, that are reached without TLS as loopback is."""
ANSWER_SECONDS = 30.0
"""How long a registry may take to answer, and to send the next piece."""
_UPLOAD_BYTES_PER_SECOND = 256 << 10
"""A registry answers once it has stored a blob. It may take this long."""
_PAUSES_SECONDS = (0.3, 1.0, 3.0, 8.0)
_MANIFEST_PAUSES_SECONDS = (0.05, 0.2, 0.5)
"""Pauses before a manifest is sent again. A registry on a file system answers 400 while another machine
uploads a blob of the manifest: it finds the blob half written."""
_MOST_PAUSE_SECONDS = 60.0
"""The longest wait that a registry may ask for."""
_TRY_AGAIN = frozenset({408, 429, 500, 502, 503, 504})
_DOCUMENTS = frozenset({INDEX_MEDIA_TYPE, MANIFEST_MEDIA_TYPE})
_ATTACHED = frozenset({SIGNATURE_MEDIA_TYPE, PARTS_MEDIA_TYPE, STATEMENT_MEDIA_TYPE})
"""The artifact types that are fetched. Others, such as scans by a registry, mean nothing to prejit."""
_REQUESTS = 8


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
            UsageError: oras is not installed.
        """
        self.name = str(replace(reference, tag="", digest=""))
        self.host, self.repository = reference.host, reference.path
        plain = os.environ.get(PLAIN_HTTP, "").split(",")
        is_plain = reference.is_loopback or reference.host in plain
        self._base = f"{'http' if is_plain else 'https'}://{self.host}/v2/{self.repository}/"
        self._answer_seconds = answer_seconds
        self._pauses = _PAUSES_SECONDS if pauses is None else pauses
        try:
            self._session = _session()
            self._logins = _logins(f"{self.host}/{self.repository}", is_plain, self._session)
        except ImportError as error:
            raise UsageError(
                f"{self.name}: expected the package oras, which reaches registries, found none",
                hint="pip install 'prejit[ship]'",
            ) from error
        self._login = self._logins["bearer"]
        self._lock = threading.Lock()
        self.most_transfers = MOST_TRANSFERS

    # ------------------------------------------------------------------ reading

    def open(self, tag: str, digest: str) -> RemoteFiles:
        """See `Repository.open`."""
        where = f"{self.name}{f':{tag}' if tag else ''}{f'@{digest}' if digest else ''}"
        at, content = self.manifest(digest or tag, where)
        if digest and at.digest != digest:
            raise RejectError(where, f"expected {digest}, found {at.digest}")
        plain = _object(content)
        kind = plain.get("artifactType")
        if kind != ARTIFACT_TYPE:
            raise UsageError(
                f"{where}: expected a bundle of prejit, found "
                f"{kind or plain.get('config', {}).get('mediaType') or at.mediaType}",
                hint="push one with: prejit push BUNDLE " + where,
            )
        files = RemoteFiles(where, b"", self._fetch)
        if at.mediaType == INDEX_MEDIA_TYPE:
            from prejit.runtime.format.checks.oci import check_index

            index = check_index(content, files.blob_path(at.digest))
            entries = self._attached([at, *index.manifests])
            return RemoteFiles(where, encode_root(index, content, entries), self._fetch)
        at = replace(at, artifactType=ARTIFACT_TYPE)
        return RemoteFiles(where, encode_copy([at], self._attached([at])), self._fetch)

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
        response = self.ask("GET", f"manifests/{name}", headers=headers, stream=True, missing=True)
        if response is None:
            return None
        content = _limited(response, most, f"{self.name}:{name}")
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
        response = self.ask("GET", path, headers=headers, stream=True, missing=True)
        return None if response is None else self._read(response, path, start)

    def _read(self, response: Response, path: str, start: int) -> Iterator[bytes]:
        skipped = start if response.status_code == 200 else 0
        try:
            while piece := response.raw.read(PIECE_BYTES):
                yield piece[skipped:] if skipped else piece
                skipped = max(0, skipped - len(piece))
        except Exception as error:  # urllib3's own, which are no OSError
            raise self._failed(path, error) from error
        finally:
            response.close()

    def _attached(self, subjects: Sequence[Descriptor]) -> list[Descriptor]:
        """Return the entries of what is attached to something, and to that, in the order of their digests."""
        found, asked = dict[str, Descriptor](), {at.digest for at in subjects}
        wanted = [at.digest for at in subjects]
        with ThreadPoolExecutor(_REQUESTS, "prejit-referrers") as pool:
            while wanted and len(found) < limits.MAX_ROOT_ENTRIES:
                some = [each for few in pool.map(self._referrers, wanted) for each in few]
                found |= {at.digest: at for at in some}
                wanted = [at.digest for at in some if at.digest not in asked]
                asked |= set(wanted)
        return [found[digest] for digest in sorted(found)]

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
        response = self.ask("GET", f"referrers/{digest}", stream=True, missing=True)
        if response is not None:
            content = _limited(response, limits.MAX_INDEX_BYTES, f"{self.name} referrers")
        elif (fallback := self.find_manifest(_fallback_tag(digest))) is not None:
            content = fallback[1]
        else:
            return []
        listed = _object(content).get("manifests")
        return listed if isinstance(listed, list) else []

    def tags(self) -> list[Tagged]:
        """See `Repository.tags`."""
        names, path = list[str](), "tags/list?n=1000"
        while path:
            response = self.ask("GET", path, missing=True)
            if response is None:
                raise StoreError(f"{self.name}: not found", hint="push a bundle first: prejit push")
            names += _object(response.content).get("tags") or []
            path = response.links.get("next", {}).get("url", "")
        shown = [each for each in sorted(names) if not _is_fallback(each)]
        with ThreadPoolExecutor(_REQUESTS, "prejit-tags") as pool:
            return [
                Tagged(*pair) for pair in zip(shown, pool.map(self._digest, shown), strict=True)
            ]

    def _digest(self, tag: str) -> str:
        found = self.find_manifest(tag)
        return "" if found is None else found[0].digest

    # ------------------------------------------------------------------ writing

    def has(self, at: Descriptor) -> bool:
        """See `Repository.has`."""
        kind = "manifests" if at.mediaType in _DOCUMENTS else "blobs"
        headers = {"Accept": at.mediaType}
        return self.ask("HEAD", f"{kind}/{at.digest}", headers=headers, missing=True) is not None

    def mount(self, at: Descriptor, repository: str) -> bool:
        """Take a blob from another repository of this registry; return whether the registry could."""
        path = f"blobs/uploads/?mount={at.digest}&from={repository}"
        response = self.ask("POST", path, headers={"Content-Length": "0"}, refused=True)
        if response is not None and response.status_code == 202:  # it began an upload instead
            self.ask("DELETE", response.headers.get("Location", ""), refused=True)
        return response is not None and response.status_code == 201

    def write(self, at: Descriptor, pieces: Pieces) -> None:
        """See `Repository.write`. The whole blob is one request: not all registries take parts."""
        begun = self.ask("POST", "blobs/uploads/", headers={"Content-Length": "0"})
        location = begun.headers.get("Location") if begun is not None else None
        if not location:
            raise StoreError(f"{self.name}: expected the place of an upload, found none")
        url = f"{location}{'&' if '?' in location else '?'}digest={at.digest}"
        headers = {"Content-Type": "application/octet-stream"}
        seconds = self._answer_seconds + at.size / _UPLOAD_BYTES_PER_SECOND
        body = _Body(at, pieces, self.name)
        self.ask("PUT", url, headers=headers, data=body, seconds=seconds)

    def publish(self, shipment: Shipment, tag: str) -> None:
        """See `Repository.publish`."""
        for document in shipment.documents:
            name = document.at.digest
            if name == shipment.digest and tag:
                name = tag
            answer = self.put_manifest(name, document.at.mediaType, document.content)
            subject = _object(document.content).get("subject")
            if isinstance(subject, dict) and "OCI-Subject" not in answer.headers:
                self._add_fallback(str(subject.get("digest")), document.at, document.content)

    def put_manifest(self, name: str, media_type: str, content: bytes) -> Response:
        """Write a manifest under a tag or its digest."""
        headers = {"Content-Type": media_type}
        for pause in _MANIFEST_PAUSES_SECONDS:
            answer = self.ask(
                "PUT", f"manifests/{name}", headers=headers, data=content, refused=True
            )
            if answer is not None:
                return answer
            time.sleep(pause)
        answer = self.ask("PUT", f"manifests/{name}", headers=headers, data=content)
        assert answer is not None
        return answer

    def _add_fallback(self, subject: str, at: Descriptor, content: bytes) -> None:
        """List a manifest under the tag that stands in for the referrers API (OCI distribution 1.1)."""
        listed = self._listed_referrers(subject)
        if any(isinstance(each, dict) and each.get("digest") == at.digest for each in listed):
            return
        kind = _object(content).get("artifactType")
        listed.append(Descriptor(at.mediaType, at.digest, at.size, kind))
        index = {"schemaVersion": 2, "mediaType": INDEX_MEDIA_TYPE, "manifests": listed}
        self.put_manifest(_fallback_tag(subject), INDEX_MEDIA_TYPE, to_json(index))

    def remove(self, tag: str) -> None:
        """See `Repository.remove`."""
        if self.find_manifest(tag) is None:
            raise StoreError(
                f"{self.name}:{tag}: not found",
                hint=f"`prejit ls {self.name}` says which tags there are",
            )
        if self.ask("DELETE", f"manifests/{tag}", refused=True) is None:
            raise StoreError(
                f"{self.name}:{tag}: this registry deletes no tags",
                hint="name the digest, which removes all its tags, or use the registry's own interface",
            )

    # ------------------------------------------------------------------ requests

    def ask(
        self,
        method: str,
        path: str,
        *,
        headers: dict[str, str] | None = None,
        data: bytes | _Body | None = None,
        stream: bool = False,
        missing: bool = False,
        refused: bool = False,
        seconds: float = 0.0,
    ) -> Response | None:
        """Return the answer to a request, after further attempts where the registry is busy.

        Args:
            method: of the request.
            path: below the repository, or a URL.
            headers: of the request.
            data: its body.
            stream: whether the caller reads the answer in pieces.
            missing: whether 404 is an answer, None.
            refused: whether 400 and 405 are an answer, None.
            seconds: time limit of the answer; 0: the usual.

        Raises:
            StoreError: the registry does not answer, or refuses.
        """
        url = urljoin(self._base, path)
        limit = (self._answer_seconds, seconds or self._answer_seconds)
        for pause in (*self._pauses, None):
            try:
                response = self._once(method, url, headers or {}, data, stream, limit)
            except (OSError, ValueError) as error:
                if isinstance(error, RejectError) or pause is None or not _is_passing(error):
                    raise self._failed(path, error) from error
                time.sleep(pause)
                continue
            if response.status_code in _TRY_AGAIN and pause is not None:
                time.sleep(_wait(response, pause))
                continue
            break
        code = response.status_code
        if response.ok or (missing and code == 404) or (refused and code in (400, 404, 405)):
            return response if response.ok else None
        raise self._refusal(method, path, response)

    def _once(
        self,
        method: str,
        url: str,
        headers: dict[str, str],
        data: bytes | _Body | None,
        stream: bool,
        limit: tuple[float, float],
    ) -> Response:
        """Ask once, and once more with a token where the registry wants one."""
        is_ours = urlsplit(url)[:2] == urlsplit(self._base)[:2]
        sent = self._login.get_auth_header() if is_ours else {}
        options: dict[str, Any] = {"data": data, "stream": stream, "timeout": limit}
        response = self._session.request(method, url, headers=headers | sent, **options)
        if response.status_code not in (401, 403) or not is_ours:
            return response
        with self._lock:
            now = self._login.get_auth_header()
            if now == sent or not now:  # no other thread has asked for a token meanwhile
                challenge = response.headers.get("www-authenticate", "")
                self._check_realm(challenge)
                scheme = challenge.partition(" ")[0].lower()
                self._login = self._logins.get(scheme, self._login)
                now, may_pass = self._login.authenticate_request(response, {}, refresh=True)
                if not may_pass:
                    return response
        return self._session.request(method, url, headers=headers | now, **options)

    def _check_realm(self, challenge: str) -> None:
        """Refuse to send a password without TLS to a host that a registry names."""
        realm = challenge.partition('realm="')[2].partition('"')[0]
        if realm.startswith("http://") and not self._base.startswith("http://"):
            raise StoreError(
                f"{self.name}: the registry wants a password sent to {realm:.200}, without TLS",
                hint="ask who runs the registry to give its token service a certificate",
            )

    def _refusal(self, method: str, path: str, response: Response) -> StoreError:
        """Return the error for an answer, in words."""
        code, said = response.status_code, _said(response)
        what = f"{self.name}: {method} {path:.40}: {code} {response.reason}{said}"
        hints = {
            401: f"log in: docker login {self.host}, or oras login {self.host}",
            403: f"this account may not do that here: log in with another (docker login {self.host})",
            404: "check the name of the repository",
            413: "the registry takes no blobs of this size: raise its limit, or that of the proxy before it",
            429: f"wait {_wait(response, 60):.0f} s: the registry limits how often it is asked",
            507: "the quota is used up: remove old tags, or ask for more",
        }
        is_quota = "quota" in said.lower()
        hint = hints[507] if is_quota else hints.get(code, "try again: what arrived is kept")
        return StoreError(what, hint=hint)

    def _failed(self, path: str, error: Exception) -> StoreError:
        if isinstance(error, StoreError):
            return error
        text, kind = str(error), type(error).__name__
        hint = "check the host's name, the network and the proxy (HTTPS_PROXY), then try again"
        if "CERTIFICATE" in text.upper():
            hint = "name a private CA in SSL_CERT_FILE or REQUESTS_CA_BUNDLE, and check this machine's clock"
        elif "WRONG_VERSION_NUMBER" in text:
            hint = f"the host has no TLS: set {PLAIN_HTTP}={self.host} if its network is trusted"
        return StoreError(f"{self.name}: {path:.40}: {kind}: {text:.300}", hint=hint)


class _Body:
    """A blob as the body of a request, which may be sent again from its start."""

    def __init__(self, at: Descriptor, pieces: Pieces, where: str) -> None:
        self._at, self._pieces, self._where = at, pieces, where

    def __len__(self) -> int:
        return self._at.size

    def __iter__(self) -> Iterator[bytes | memoryview]:
        return checked(self._at, self._pieces(0), self._where)


def _fallback_tag(digest: str) -> str:
    return digest.replace(":", "-")


def _is_fallback(tag: str) -> bool:
    return is_digest(tag.replace("-", ":", 1))


def _object(content: bytes) -> dict[str, Any]:
    """Return an object in JSON; empty: it is none."""
    try:
        plain = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return plain if isinstance(plain, dict) else {}


def _limited(response: Response, most: int, where: str) -> bytes:
    """Return a small answer. Raise RejectError where it is larger."""
    content = bytearray()
    for piece in response.iter_content(64 << 10):
        content += piece
        if len(content) > most:
            response.close()
            raise RejectError(where, f"expected at most {most} bytes, found more")
    return bytes(content)


def _said(response: Response) -> str:
    """Return what a registry says about its refusal, with a colon before it."""
    errors = _object(response.content[:65536]).get("errors")
    first = errors[0] if isinstance(errors, list) and errors else None
    if not isinstance(first, dict):
        return ""
    parts = [str(first.get(key)) for key in ("code", "message") if first.get(key)]
    return f": {' '.join(parts):.300}"


def _wait(response: Response, pause: float) -> float:
    """Return how long a registry asks to wait, within reason."""
    said = response.headers.get("Retry-After", "")
    return min(float(said), _MOST_PAUSE_SECONDS) if said.isdigit() else pause


def _is_passing(error: Exception) -> bool:
    """Return whether a failure may be over soon: not one of a name, a certificate or a proxy."""
    from requests import exceptions

    if isinstance(error, exceptions.SSLError | exceptions.ProxyError | exceptions.InvalidURL):
        return False
    return isinstance(error, exceptions.ConnectionError | exceptions.Timeout) and not any(
        word in str(error) for word in ("NameResolution", "refused")
    )


def _session() -> Session:
    import requests
    from requests.adapters import HTTPAdapter

    session = requests.Session()
    for scheme in ("http://", "https://"):
        session.mount(scheme, HTTPAdapter(pool_maxsize=32))
    session.headers["User-Agent"] = "prejit"
    if not os.environ.get("REQUESTS_CA_BUNDLE") and (given := os.environ.get("SSL_CERT_FILE")):
        session.verify = given
    return session


def _login_files() -> Iterable[str]:
    """Yield the files in which podman, skopeo and buildah keep logins (containers-auth.json(5))."""
    named = os.environ.get("REGISTRY_AUTH_FILE")
    runtime = os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.getuid()}")
    config = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    for each in (named, f"{runtime}/containers/auth.json", f"{config}/containers/auth.json"):
        if each and Path(each).is_file():
            yield each


def _logins(repository: str, is_plain: bool, session: Session) -> dict[str, AuthBackend]:
    """Return what answers a registry that asks who we are, by the scheme that it asks for."""
    from oras.auth import get_auth_backend
    from oras.container import Container

    found = {
        "bearer": get_auth_backend("token", session, is_plain),
        "basic": get_auth_backend("basic", session, is_plain),
    }
    for each in found.values():
        each.load_configs(Container(repository), configs=[*_login_files()])
    if not hasattr(found["basic"], "_basic_auth"):  # nobody has logged in
        found["basic"].set_basic_auth("", "")
    return found
