"""Files that many machines share in an OCI registry, by oras.

    blob <digest>                       contents
    manifest with the tag ac-<digits>   a result: an annotation has it, and the layers are its contents

The layers keep a registry from collecting contents that a result needs (OCI distribution 1.1, image 1.1).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import urlsplit

from prejit.compiler.sharing.objects import ANSWER_SECONDS
from prejit.compiler.sharing.remote import (
    UPLOAD_BYTES_PER_SECOND,
    RemoteError,
    RemoteFile,
    again,
    claim,
    size_of,
)
from prejit.runtime.base.files import digest_of
from prejit.runtime.errors import UsageError

if TYPE_CHECKING:
    from oras.auth.base import AuthBackend
    from requests import Response, Session

RESULT = "dev.prejit.result"
"""The annotation of a manifest that has a result, as base64."""
_RESULT_TYPE = "application/vnd.prejit.result.v1+json"
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_EMPTY: Mapping[str, Any] = {
    "mediaType": "application/vnd.oci.empty.v1+json",
    "digest": digest_of(b"{}"),
    "size": 2,
}
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")
_PIECE_BYTES = 1 << 20
_PAUSES_SECONDS = (0.05, 0.2, 0.5)
"""Pauses before a manifest is sent again that was answered with 400.

A registry on a file system answers so while another machine uploads a blob of the manifest: it finds the blob
half written.
"""


class _BadRequestError(RemoteError):
    """The registry answered 400."""


class Repository:
    """A `Remote` in a repository of a registry."""

    def __init__(self, url: str) -> None:
        """Connect to nothing yet. Credentials are those of `docker login` or `oras login`.

        Args:
            url: `oci://HOST[:PORT]/REPOSITORY`. This machine's own registry is reached without TLS.

        Raises:
            UsageError: oras is not installed, or the URL names no repository.
        """
        parts = urlsplit(url)
        repository = parts.path.strip("/")
        if not parts.netloc or not repository:
            raise UsageError(
                f"{url}: expected a host and a repository, found none",
                hint="give oci://registry.example/team/prejit-store",
            )
        self.name = f"oci://{parts.netloc}/{repository}"
        is_local = parts.netloc.rpartition(":")[0] in _LOCAL_HOSTS or parts.netloc in _LOCAL_HOSTS
        self._base = f"{'http' if is_local else 'https'}://{parts.netloc}/v2/{repository}"
        try:
            self._session = _session()
            self._logins = _logins(f"{parts.netloc}/{repository}", is_local, self._session)
        except ImportError as error:
            raise UsageError(
                f"{self.name}: expected the package oras, which reaches registries, found none",
                hint="pip install 'prejit[store]'",
            ) from error
        self._login = self._logins["bearer"]
        self._has_config = False

    def read(self, path: str, most: int) -> bytes | None:
        """See `Remote.read`."""
        response = self._ask("GET", _at(path), headers={"Accept": _MANIFEST}, stream=True)
        if response is None:
            return None
        content = bytearray()
        for piece in response.iter_content(_PIECE_BYTES):
            content += piece
            if len(content) > 2 * most:
                return b""
        try:
            return base64.b64decode(json.loads(content)["annotations"][RESULT], validate=True)
        except (ValueError, KeyError, TypeError, RecursionError):
            return b""

    def download(self, path: str, write: Callable[[memoryview], object]) -> bool:
        """See `Remote.download`."""
        response = self._ask("GET", _at(path), stream=True)
        if response is None:
            return False
        try:
            for piece in response.iter_content(_PIECE_BYTES):
                write(memoryview(piece))
        except OSError as error:
            raise self._failed(path, error) from error
        return True

    def has(self, path: str) -> bool:
        """See `Remote.has`."""
        return self._ask("HEAD", _at(path), headers={"Accept": _MANIFEST}) is not None

    def write(self, path: str, content: bytes | BinaryIO) -> None:
        """See `Remote.write`."""
        if path.startswith("cas/"):
            self._upload(f"sha256:{path.removeprefix('cas/')}", content)
            return
        assert isinstance(content, bytes)
        config = f"cas/{_EMPTY['digest'].removeprefix('sha256:')}"
        if not self._has_config and not self.has(config):
            self.write(config, b"{}")
        self._has_config = True
        layers = [
            {
                "mediaType": "application/octet-stream",
                "digest": f"sha256:{each['digest']['hash']}",
                "size": int(each["digest"]["sizeBytes"]),
            }
            for each in json.loads(content)["outputFiles"]
        ]
        manifest = {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "artifactType": _RESULT_TYPE,
            "config": dict(_EMPTY),
            "layers": layers or [dict(_EMPTY)],
            "annotations": {RESULT: base64.b64encode(content).decode("ascii")},
        }
        data = json.dumps(manifest, sort_keys=True).encode("ascii")
        headers = {"Content-Type": _MANIFEST}
        again(
            lambda: self._ask("PUT", _at(path), headers=headers, data=data),
            _PAUSES_SECONDS,
            _BadRequestError,
        )

    def create(self, path: str, content: bytes) -> bool:
        """See `Remote.create`. A registry writes tags without a condition."""
        return claim(self, path, content)

    def remove(self, path: str) -> bool:
        """See `Remote.remove`. A registry deletes what its own retention rules say."""
        return False

    def listed(self) -> Iterator[RemoteFile]:
        """See `Remote.listed`. A registry lists no contents."""
        raise UsageError(
            f"{self.name}: expected a directory or an object store, whose files can be listed, found a "
            "registry",
            hint="limit its size by the registry's own retention rules",
        )

    def _upload(self, digest: str, content: bytes | BinaryIO) -> None:
        begun = self._ask("POST", "blobs/uploads/", headers={"Content-Length": "0"})
        location = None if begun is None else begun.headers.get("location")
        if not location:
            raise RemoteError(f"{self.name}: expected the place of an upload, found none")
        host = self._base.partition("/v2/")[0]
        url = location if "://" in location else f"{host}{location}"
        url += f"{'&' if '?' in url else '?'}digest={digest}"
        headers = {"Content-Type": "application/octet-stream"}
        # The registry answers once it has stored everything.
        seconds = ANSWER_SECONDS + size_of(content) / UPLOAD_BYTES_PER_SECOND
        self._ask("PUT", url, headers=headers, data=content, timeout=(ANSWER_SECONDS, seconds))

    def _ask(self, method: str, path: str, **options: Any) -> Response | None:
        """Return the answer of the registry; None: 404."""
        url = path if "://" in path else f"{self._base}/{path}"
        headers = options.pop("headers", {}) | self._login.get_auth_header()
        try:
            response = self._session.request(method, url, headers=headers, **options)
            if response.status_code in (401, 403):
                scheme = response.headers.get("www-authenticate", "").partition(" ")[0].lower()
                self._login = self._logins.get(scheme, self._login)
                headers, may_pass = self._login.authenticate_request(
                    response, headers, refresh=True
                )
                if may_pass:
                    if (data := options.get("data")) is not None and not isinstance(data, bytes):
                        data.seek(0)
                    response = self._session.request(method, url, headers=headers, **options)
        except (OSError, ValueError) as error:
            raise self._failed(path, error) from error
        if response.status_code == 404 and method in ("GET", "HEAD"):
            return None
        if not response.ok:
            kind = _BadRequestError if response.status_code == 400 else RemoteError
            raise kind(
                f"{self.name}: {method} {path:.24}: {response.status_code} {response.reason}"
            )
        return response

    def _failed(self, path: str, error: Exception) -> RemoteError:
        return RemoteError(f"{self.name}: {path:.24}: {error!s:.300}")


def _at(path: str) -> str:
    kind, _, digits = path.partition("/")
    return f"manifests/ac-{digits}" if kind == "ac" else f"blobs/sha256:{digits}"


def _session() -> Session:
    """Return a session whose requests wait a second for each answer, where they say nothing else."""
    import requests
    from requests.adapters import HTTPAdapter

    session = requests.Session()
    for scheme in ("http://", "https://"):
        session.mount(scheme, HTTPAdapter(pool_maxsize=32))
    # Its own `get`, with which oras asks for tokens, passes here too.
    session.request = partial(session.request, timeout=ANSWER_SECONDS)  # type: ignore[method-assign]
    return session


def _logins(repository: str, is_local: bool, session: Session) -> dict[str, AuthBackend]:
    """Return what answers a registry that asks who we are, by the scheme that it asks for."""
    from oras.auth import get_auth_backend
    from oras.container import Container

    found = {
        "bearer": get_auth_backend("token", session, is_local),
        "basic": get_auth_backend("basic", session, is_local),
    }
    for each in found.values():
        each.load_configs(Container(repository))
    if not hasattr(found["basic"], "_basic_auth"):  # nobody has logged in
        found["basic"].set_basic_auth("", "")
    return found
