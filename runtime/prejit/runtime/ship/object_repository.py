"""Bundles in a bucket (S3, Google Cloud Storage, Azure), on a web server or on the hub, by obstore.

    PATH/index.json            the bundle without a tag, as it lies in a directory: any copy of one will do
    PATH/tags/TAG.json         the same file of a bundle with a tag
    PATH/blobs/sha256/<hex>    the blobs of all of them, once each

Credentials are those of the environment and, where boto3 is installed, those that AWS's own tools keep. On
the Hugging Face hub a revision stands for the tag, and the login is that of its own tool.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

from prejit.runtime.errors import RejectError, StoreError, UsageError
from prejit.runtime.format import limits
from prejit.runtime.format.bundle_schema import Descriptor
from prejit.runtime.format.index_writing import encode_root
from prejit.runtime.format.names import OCI_LAYOUT
from prejit.runtime.format.referrers import reached
from prejit.runtime.format.root import read_root
from prejit.runtime.ship.reference import HUB, Reference, refuse_query
from prejit.runtime.ship.registry_client import (
    ANSWER_SECONDS,
    PLAIN_HTTP,
    UPLOAD_BYTES_PER_SECOND,
    BlobBody,
    certificate_hint,
    new_session,
)
from prejit.runtime.ship.repository import (
    MOST_TRANSFERS,
    Pieces,
    RemoteFiles,
    Shipment,
    Tagged,
    blob_name,
    check_count,
    checked,
    in_time,
    shipment_of,
)

if TYPE_CHECKING:
    from obstore.store import ObjectStore

TOKEN = "PREJIT_STORE_TOKEN"  # noqa: S105 (a variable's name)
"""The environment variable with a bearer token for a web server."""
_TRANSFER_SECONDS = 24 * 3600.0
_PART_BYTES = 16 << 20
"""Files above this size go to a bucket in parts."""
_STATUS = re.compile(r"status code: (\d{3})|error \((\d{3})|^(\d{3}) (?:Client|Server) Error")


class ObjectRepository:
    """Implements `repository.Repository` for what stands below one URL."""

    def __init__(self, reference: Reference) -> None:
        """Connect to nothing yet.

        Raises:
            UsageError: obstore is not installed, or the URL asks for plain HTTP over a network.
        """
        self.name = str(replace(reference, tag="", digest=""))
        self._is_hub = reference.scheme == HUB
        at = _of_hub(reference) if self._is_hub else reference
        self._is_http = at.scheme in ("http", "https")
        plain = os.environ.get(PLAIN_HTTP, "").split(",")
        if at.scheme == "http" and not (at.is_loopback or at.host in plain):
            raise UsageError(
                f"{self.name}: expected https://, found http:// to another machine",
                hint=f"set {PLAIN_HTTP}={at.host} if its network is trusted",
            )
        self.most_transfers = MOST_TRANSFERS
        parts = urlsplit(at.place)
        self._url = urlunsplit(parts._replace(netloc=at.host))
        self._login = _hub_login() if self._is_hub else _authorization(parts, is_chosen=False)
        self._objects = open_objects(
            self._url, answer_seconds=ANSWER_SECONDS, authorization=self._login
        )

    def open(self, tag: str, digest: str) -> RemoteFiles:
        """See `Repository.open`."""
        where = f"{self.name}{f':{tag}' if tag else ''}{f'@{digest}' if digest else ''}"
        path = _index_path("" if self._is_hub else tag)  # the URL has the revision
        index_file = self._read(path, limits.MAX_INDEX_BYTES)
        if index_file is None and (tag or not digest):
            raise StoreError(f"{where}: not found: no {path} there", hint=self._where_else())
        files = RemoteFiles(where, index_file or b"", self._fetch)
        if not digest or (index_file is not None and read_root(files).digest == digest):
            return files
        if tag:
            raise RejectError(where, f"expected {digest}, found {read_root(files).digest}")
        return self._open_index(where, digest)

    def _open_index(self, where: str, digest: str) -> RemoteFiles:
        """Return a bundle by its digest alone. Nothing says what is attached to it."""
        from prejit.runtime.format.checks.oci import check_digest, check_index

        content = self._read(blob_name(digest), limits.MAX_INDEX_BYTES)
        if content is None:
            raise StoreError(f"{where}: not found", hint=self._where_else())
        check_digest(content, digest, where)
        index = check_index(content, where)
        return RemoteFiles(where, encode_root(index, content, ()), self._fetch)

    def _where_else(self) -> str:
        """Return where to look for what is not there."""
        if self._is_http:  # it lists nothing
            return "check the path, and the tag or the revision"
        return f"`prejit ls {self.name}` says which tags there are"

    def _read(self, path: str, most: int) -> bytes | None:
        content = bytearray()
        try:
            for piece in self._pieces(path, 0):
                content += piece
                if len(content) > most:
                    raise RejectError(f"{self.name}/{path}", f"expected at most {most} bytes")
        except FileNotFoundError:
            return None
        return bytes(content)

    def _fetch(self, at: Descriptor, start: int) -> Iterator[bytes | memoryview]:
        path = blob_name(at.digest)
        try:
            yield from self._pieces(path, start)
        except FileNotFoundError as error:
            raise StoreError(
                f"{self.name}/{path}: not found",
                hint="push the bundle again: a blob of it is missing",
            ) from error

    def _pieces(self, path: str, start: int) -> Iterator[bytes | memoryview]:
        import obstore
        from obstore.exceptions import NotSupportedError

        with self._asking(path):
            options: Any = {"range": {"offset": start}} if start else {}
            try:
                found = obstore.get(self._objects, path, options=options)
            except NotSupportedError:  # a server without ranges
                found, skipped = obstore.get(self._objects, path), start
            else:
                skipped = 0
            # In parts as they come: `in_time` cannot see those that obstore collects.
            for piece in in_time(found.stream(min_chunk_size=1), f"{self.name}/{path}"):
                yield memoryview(piece)[skipped:]
                skipped = max(0, skipped - len(piece))

    def has(self, at: Descriptor) -> bool:
        """See `Repository.has`."""
        import obstore

        if self._is_hub:  # what moves a bundle asks this first
            raise UsageError(
                f"{self.name}: expected a place that prejit writes to, found the hub",
                hint=f"upload the directory with its own tool: hf upload {self.name[5:]} DIRECTORY",
            )
        path = blob_name(at.digest)
        try:
            with self._asking(path):
                return bool(obstore.head(self._objects, path)["size"] == at.size)
        except FileNotFoundError:
            return False

    def write(self, at: Descriptor, pieces: Pieces) -> None:
        """See `Repository.write`."""
        import obstore

        path = blob_name(at.digest)
        where = f"{self.name}/{path}"
        with self._asking(path, is_write=True):
            if self._is_http:  # obstore would hold the whole blob
                body: Any = BlobBody(at, pieces, where)
                url = f"{self._url}/{path}"
                limit = (ANSWER_SECONDS, ANSWER_SECONDS + at.size / UPLOAD_BYTES_PER_SECOND)
                with new_session() as session:
                    answer = session.put(url, data=body, headers=self._login, timeout=limit)
                answer.raise_for_status()
            elif at.size > _PART_BYTES:
                given = checked(at, pieces(0), where)
                obstore.put(self._objects, path, given, use_multipart=True)
            else:
                self._put(path, b"".join(checked(at, pieces(0), where)))

    def _put(self, path: str, content: bytes) -> None:
        import obstore

        with self._asking(path, is_write=True):
            obstore.put(self._objects, path, content, use_multipart=False)

    def publish(self, shipment: Shipment, tag: str) -> None:
        """See `Repository.publish`."""
        for document in shipment.documents:
            if not self.has(document.at):
                self._put(blob_name(document.at.digest), document.content)
        self._put("oci-layout", OCI_LAYOUT)
        self._put(_index_path(tag), shipment.index_file)

    def tags(self) -> list[Tagged]:
        """See `Repository.tags`. The bundle without a tag has the empty one."""
        import obstore

        if self._is_http:
            raise UsageError(
                f"{self.name}: expected a registry or a bucket, found a web server, which lists no tags",
                hint="name the tag or the revision, or the bundle's digest",
            )
        found = [""] if self._read(_index_path(""), limits.MAX_INDEX_BYTES) is not None else []
        with self._asking("tags"):
            for some in obstore.list(self._objects, prefix="tags"):
                found += [each["path"].removeprefix("tags/").removesuffix(".json") for each in some]
                check_count(found, self.name)
        return [Tagged(tag, self.resolve(tag)) for tag in sorted(found)]

    def resolve(self, tag: str) -> str:
        """See `Repository.resolve`."""
        content = self._read(_index_path(tag), limits.MAX_INDEX_BYTES)
        if content is None:
            return ""
        return read_root(RemoteFiles(self.name, content, self._fetch)).digest

    def close(self) -> None:
        """See `Destination.close`. No blob is there in part."""

    def remove(self, tag: str) -> int:
        """See `Repository.remove`."""
        import obstore

        files = self.open(tag, "")  # S3 deletes what is not there
        root = read_root(files)
        path = _index_path(tag)
        with self._asking(path):
            obstore.delete(self._objects, path)
        left = {at.digest: at.size for at in shipment_of(files, root, root.bundle.manifests).all}
        for each in self.tags():
            kept = files if each.digest == root.digest else self.open(each.tag, "")
            for digest in reached(kept, read_root(kept)):
                left.pop(digest, None)
        return sum(left.values())

    @contextlib.contextmanager
    def _asking(self, path: str, *, is_write: bool = False) -> Iterator[None]:
        """Turn failures in the block into StoreErrors, but for a file that is missing to a reader."""
        from obstore.exceptions import BaseError

        try:
            yield
        except BaseException as error:
            # Rust code panics where a variable such as GOOGLE_BASE_URL has no URL.
            is_panic = type(error).__name__ == "PanicException"
            if not isinstance(error, BaseError | OSError) and not is_panic:
                raise
            if isinstance(error, FileNotFoundError) and not is_write:
                raise
            raise StoreError(
                f"{self.name}/{path}: {_words(str(error)):.300}", hint=_hint(str(error))
            ) from error


def _words(text: str) -> str:
    """Return what obstore says, with the innermost cause of its debug text and without the rest of that."""
    said, _, debug = text.partition("\nDebug source:")
    causes = re.findall(r'(?:message|error): "(.*?)"', debug)
    return " ".join(f"{said} ({causes[-1]})".split() if causes else said.split())


def _index_path(tag: str) -> str:
    return f"tags/{tag}.json" if tag else "index.json"


_REFUSALS = (
    (("RequestTimeTooSkewed", "RequestExpired"), "set this machine's clock: the store's differs"),
    (
        ("ExpiredToken", "TokenRefreshRequired", "InvalidToken"),
        "log in again with the cloud's own tool: its session has ended",
    ),
    (
        ("SignatureDoesNotMatch", "InvalidAccessKeyId"),
        "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY: the store does not know this pair",
    ),
    (
        ("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraint"),
        "set AWS_REGION to the region of the bucket",
    ),
    (("NoSuchBucket", "ContainerNotFound", "404"), "make the bucket first, or check its name"),
    (("quota", "507"), "the quota is used up: remove what is not needed, or ask for more"),
    (("405", "501"), "the server takes no files: copy the directory to it, or push to a bucket"),
    (("413",), "the server takes no files of this size: raise its limit"),
    (
        ("429", "503", "SlowDown", "TooManyRequests"),
        "the store limits how often it is asked: wait a minute, then try again",
    ),
    (
        ("401", "403", "Unauthenticated", "PermissionDenied", "credential"),
        "log in with the cloud's own tool, or set its variables (AWS_ACCESS_KEY_ID, "
        f"GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_KEY; {TOKEN} for a web server; `hf auth "
        "login` for the hub); the account must have the right to do this",
    ),
)
"""Words or statuses in an error of obstore, and the next step. The first that is there counts."""


def _hint(text: str) -> str:
    """Return the next step after a failure, from what obstore says."""
    found = _STATUS.search(text)
    code = next((each for each in found.groups() if each), "") if found else ""
    for words, hint in _REFUSALS:
        if any(word == code if word.isdigit() else word.lower() in text.lower() for word in words):
            return hint
    ours = "check the URL and the network, then try again: what arrived is kept"
    return certificate_hint(text) or ours


def _of_hub(reference: Reference) -> Reference:
    """Return the reference to the files of a revision of a repository of the Hugging Face hub."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise StoreError(
            f"{reference}: HF_HUB_OFFLINE is set",
            hint="unset it, or set PREJIT_OFFLINE=1 to load what this machine's store has",
        )
    repository, _, path = reference.path.partition("/")
    revision = f"{reference.host}/{repository}/resolve/{reference.tag or 'main'}"
    url = f"{constants.ENDPOINT}/{revision}/{path}".rstrip("/")
    return replace(reference, scheme=urlsplit(url).scheme, place=url, tag="")


def _hub_login() -> dict[str, str]:
    from huggingface_hub import get_token

    token = get_token()
    return {"Authorization": f"Bearer {token}"} if token else {}


def open_objects(
    url: str,
    *,
    answer_seconds: float,
    transfer_seconds: float = _TRANSFER_SECONDS,
    retries: bool = True,
    headers: Mapping[str, str] | None = None,
    authorization: Mapping[str, str] | None = None,
) -> ObjectStore:
    """Return obstore's client for a URL.

    Args:
        url: of `http://`, `https://`, `s3://`, `gs://` or `az://`. A web server gets the user and password
            in it, or the bearer token of `$PREJIT_STORE_TOKEN`.
        answer_seconds: how long the store may take to answer, and to send the next piece.
        transfer_seconds: how long a request may take as a whole.
        retries: whether obstore itself asks again.
        headers: sent with each request to a web server.
        authorization: the header that tells a web server who we are; None: see `url`.

    Raises:
        UsageError: obstore is not installed, or does not know the URL.
    """
    refuse_query(url)
    parts = urlsplit(url)
    place = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    try:
        from obstore import exceptions
        from obstore.store import from_url
    except ImportError as error:
        raise UsageError(
            f"{place}: expected the package obstore, which reaches buckets and servers, found none",
            hint="pip install 'prejit[ship]'",
        ) from error
    seconds = timedelta(seconds=answer_seconds)
    client: dict[str, Any] = {
        "allow_http": True,
        "connect_timeout": seconds,
        "read_timeout": seconds,
        "timeout": timedelta(seconds=transfer_seconds),
    }
    if parts.scheme in ("http", "https"):
        client["default_headers"] = {
            **(headers or {}),
            **(_authorization(parts, is_chosen=True) if authorization is None else authorization),
        }
    options: dict[str, Any] = {"client_options": client}
    if not retries:
        options["retry_config"] = {"max_retries": 0, "retry_timeout": seconds}
    if parts.scheme == "s3" and "AWS_ACCESS_KEY_ID" not in os.environ:
        with contextlib.suppress(ImportError):
            from obstore.auth.boto3 import Boto3CredentialProvider

            options["credential_provider"] = Boto3CredentialProvider()
    try:
        return from_url(place, **options)
    except (exceptions.BaseError, ValueError, OSError) as error:
        reason = str(error).partition("\n")[0]
        if parts.scheme in ("s3", "gs", "az"):
            raise UsageError(
                f"{place}: expected settings that reach its cloud, found {reason:.300}",
                hint="check its variables: AWS_..., GOOGLE_... or AZURE_...",
            ) from error
        raise UsageError(
            f"{place}: expected the URL of a bucket or a server, found {reason:.300}",
            hint="give http://, https://, s3://, gs://, az://, oci:// or the path of a directory",
        ) from error


def _authorization(parts: SplitResult, *, is_chosen: bool) -> dict[str, str]:
    """Return the header that tells a web server who we are.

    `is_chosen`: this machine's settings name the server. If not, it gets a token only if that names it.
    """
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
        return {"Authorization": f"Basic {base64.b64encode(pair).decode('ascii')}"}
    given = os.environ.get(TOKEN, "")
    named = dict(each.partition("=")[::2] for each in given.split())
    token = named.get(parts.netloc, given if is_chosen else "")
    return {"Authorization": f"Bearer {token}"} if token else {}
