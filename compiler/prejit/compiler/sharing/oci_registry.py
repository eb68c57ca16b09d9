"""Files that many machines share in an OCI registry.

    blob <digest>                       contents
    manifest with the tag ac-<digits>   a result: an annotation has it, and the layers are its contents

The layers keep a registry from collecting contents that a result needs (OCI distribution 1.1, image 1.1).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import BinaryIO

from prejit.compiler.sharing.objects import ANSWER_SECONDS
from prejit.compiler.sharing.remote import RemoteError, RemoteFile, claim, size_of
from prejit.runtime.base.files import digest_of
from prejit.runtime.base.typed_json import to_json
from prejit.runtime.errors import RejectError, StoreError, UsageError
from prejit.runtime.format.bundle_schema import Descriptor
from prejit.runtime.format.names import EMPTY_MEDIA_TYPE, MANIFEST_MEDIA_TYPE
from prejit.runtime.ship.reference import parse_reference
from prejit.runtime.ship.registry_repository import Registry
from prejit.runtime.ship.repository import PIECE_BYTES

RESULT = "dev.prejit.result"
"""The annotation of a manifest that has a result, as base64."""
_RESULT_TYPE = "application/vnd.prejit.result.v1+json"
_EMPTY = Descriptor(EMPTY_MEDIA_TYPE, digest_of(b"{}"), 2)
_LAYER_TYPE = "application/octet-stream"


class RegistryStore:
    """A `Remote` in a repository of a registry."""

    def __init__(self, url: str) -> None:
        """Connect to nothing yet. Credentials are those of `docker login` or `oras login`.

        Args:
            url: `oci://HOST[:PORT]/REPOSITORY`. This machine's own registry is reached without TLS.

        Raises:
            UsageError: requests is not installed, or the URL names no repository.
        """
        # A build asks again where it must (`Patient`), and else goes on alone.
        self._registry = Registry(parse_reference(url), answer_seconds=ANSWER_SECONDS, pauses=())
        self.name = self._registry.name
        self._has_config = False

    def read(self, path: str, most: int) -> bytes | None:
        """See `Remote.read`."""
        try:
            with self._asking():
                found = self._registry.find_manifest(_tag(path), 2 * most)
            if found is None:
                return None
            return base64.b64decode(json.loads(found[1])["annotations"][RESULT], validate=True)
        except (RejectError, ValueError, KeyError, TypeError, RecursionError):
            return b""

    def download(self, path: str, write: Callable[[memoryview], object]) -> bool:
        """See `Remote.download`."""
        with self._asking():
            pieces = self._registry.find_blob(_content(path))
            for piece in pieces or ():
                write(memoryview(piece))
            return pieces is not None

    def has(self, path: str) -> bool:
        """See `Remote.has`."""
        with self._asking():
            if path.startswith("cas/"):
                return self._registry.has(_content(path))
            return self._registry.find_manifest(_tag(path)) is not None

    def write(self, path: str, content: bytes | BinaryIO) -> None:
        """See `Remote.write`."""
        with self._asking():
            if path.startswith("cas/"):
                self._registry.write(
                    _content(path, size_of(content)), lambda start: _pieces(content, start)
                )
                return
            assert isinstance(content, bytes)
            if not self._has_config and not self._registry.has(_EMPTY):
                self._registry.write(_EMPTY, lambda _: iter([b"{}"]))
            self._has_config = True
            self._registry.put_manifest(_tag(path), MANIFEST_MEDIA_TYPE, _manifest(content))

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

    @contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except StoreError as error:
            raise RemoteError(str(error)) from error


def _tag(path: str) -> str:
    return f"ac-{path.removeprefix('ac/')}"


def _content(path: str, size: int = 0) -> Descriptor:
    return Descriptor(_LAYER_TYPE, f"sha256:{path.removeprefix('cas/')}", size)


def _pieces(content: bytes | BinaryIO, start: int) -> Iterator[bytes]:
    if isinstance(content, bytes):
        yield content[start:]
        return
    content.seek(start)
    while piece := content.read(PIECE_BYTES):
        yield piece


def _manifest(result: bytes) -> bytes:
    """Return the manifest of a result, whose layers are its contents."""
    layers = [
        Descriptor(
            _LAYER_TYPE, f"sha256:{each['digest']['hash']}", int(each["digest"]["sizeBytes"])
        )
        for each in json.loads(result)["outputFiles"]
    ]
    return to_json(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_MEDIA_TYPE,
            "artifactType": _RESULT_TYPE,
            "config": _EMPTY,
            "layers": layers or [_EMPTY],
            "annotations": {RESULT: base64.b64encode(result).decode("ascii")},
        }
    )
