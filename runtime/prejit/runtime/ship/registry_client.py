"""Requests to a repository of an OCI registry: logins, further attempts, and refusals in words.

The credentials are those that docker, podman, skopeo and oras keep.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit

from prejit.runtime.base.typed_json import parse_object
from prejit.runtime.errors import PrejitError, RejectError, StoreError, UsageError
from prejit.runtime.format.bundle_schema import Descriptor
from prejit.runtime.ship.reference import Reference
from prejit.runtime.ship.registry_login import HUB, HUB_HOST, RegistryLogin
from prejit.runtime.ship.repository import Pieces, arriving, checked

if TYPE_CHECKING:
    from requests import Response, Session

PLAIN_HTTP = "PREJIT_PLAIN_HTTP"
"""The environment variable with hosts, separated by commas, that are reached without TLS as loopback is."""
ANSWER_SECONDS = 30.0
"""How long a registry may take to answer, and to send the next piece."""
UPLOAD_BYTES_PER_SECOND = 256 << 10
"""A registry or a server answers once it has stored a blob. It may take this long."""
PAUSES_SECONDS = (0.3, 1.0, 3.0, 8.0)
"""Pauses before each further attempt."""
_MOST_PAUSE_SECONDS = 60.0
"""The longest wait that a registry may ask for."""
_TRY_AGAIN = frozenset({408, 429, 500, 502, 503, 504})


class RegistryClient:
    """Asks one repository of a registry. Threads may share it.

    Attributes:
        host, repository, name: of the repository; the name is for messages.
        answer_seconds: how long the registry may take to answer.
    """

    def __init__(
        self, reference: Reference, name: str, answer_seconds: float, pauses: Sequence[float] | None
    ) -> None:
        """Connect to nothing yet. `pauses` as of `Registry`.

        Raises:
            UsageError: requests is not installed.
        """
        self.name, self.host, self.repository = name, reference.host, reference.path
        server = self.host
        if self.host == HUB:  # no registry answers there
            server = HUB_HOST
            self.repository = "library/" * ("/" not in self.repository) + self.repository
        plain = os.environ.get(PLAIN_HTTP, "").split(",")
        is_plain = reference.is_loopback or reference.host in plain
        self._base = f"{'http' if is_plain else 'https'}://{server}/v2/{self.repository}/"
        self.answer_seconds = answer_seconds
        self._pauses = PAUSES_SECONDS if pauses is None else pauses
        try:
            self._session = new_session()
        except ImportError as error:
            raise UsageError(
                f"{self.name}: expected the package requests, which reaches registries, found none",
                hint="pip install 'prejit[ship]'",
            ) from error
        self._login = RegistryLogin(self.host, self.repository, self._session, answer_seconds)
        self._lock = threading.Lock()

    def ask(
        self,
        method: str,
        path: str,
        *,
        headers: dict[str, str] | None = None,
        data: bytes | BlobBody | None = None,
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
        limit = (self.answer_seconds, seconds or self.answer_seconds)
        for pause in (*self._pauses, None):
            try:
                url = urljoin(self._base, path)
                response = self._once(method, url, headers or {}, data, stream, limit)
            except (OSError, ValueError) as error:
                if isinstance(error, RejectError) or pause is None or not _is_passing(error):
                    raise self.failed(path, error) from error
                time.sleep(pause)
                continue
            if response.status_code in _TRY_AGAIN and pause is not None:
                _finish(response)
                time.sleep(_wait(response, pause))
                continue
            break
        code = response.status_code
        if response.ok:
            return response
        if (missing and code == 404) or (refused and code in (400, 404, 405)):
            _finish(response)
            return None
        raise self._refusal(method, path, response)

    def read(
        self, path: str, most: int, headers: dict[str, str] | None = None
    ) -> tuple[Response, bytes] | None:
        """Return a small answer and its bytes; None: there is none. One that is cut is asked for again.

        Raises:
            RejectError: it has more bytes than `most`.
            StoreError: as of `ask`, or it arrives too slowly.
        """
        pauses = iter(self._pauses)
        while (
            response := self.ask("GET", path, headers=headers, stream=True, missing=True)
        ) is not None:
            try:
                return response, _limited(response, most, f"{self.name}: {path}")
            except PrejitError:
                raise
            except Exception as error:  # urllib3's own, which are no OSErrors
                if (pause := next(pauses, None)) is None:
                    raise self.failed(path, error) from error
                time.sleep(pause)
        return None

    def _once(
        self,
        method: str,
        url: str,
        headers: dict[str, str],
        data: bytes | BlobBody | None,
        stream: bool,
        limit: tuple[float, float],
    ) -> Response:
        """Ask once, and once more with a token where the registry wants one."""
        is_ours = urlsplit(url)[:2] == urlsplit(self._base)[:2]
        sent = self._login.header if is_ours else {}
        options: dict[str, Any] = {"data": data, "stream": stream, "timeout": limit}
        response = self._session.request(method, url, headers=headers | sent, **options)
        if response.status_code not in (401, 403) or not is_ours or response.history:
            return response  # a host that we were sent to gets no password
        with self._lock:
            if self._login.header == sent:  # no other thread has asked for a token meanwhile
                final = self._login.answer(response)
                if final is not None:
                    return final
            now = self._login.header
        _finish(response)
        return self._session.request(method, url, headers=headers | now, **options)

    def _refusal(self, method: str, path: str, response: Response) -> StoreError:
        """Return the error for an answer, in words."""
        with self._lock:  # threads share the answer of a token service that refused
            code, said = response.status_code, _said(response)
        what = f"{self.name}: {method} {path:.40}: {code} {response.reason}{said}"
        if code in (401, 403):
            why, hint = self._login.refusal(response)
            return StoreError(f"{what}: {why}", hint=hint)
        quota = "the quota is used up: remove old tags, or ask for more"
        hints = {
            404: "check the name of the repository",
            405: "it may be a mirror, which takes no pushes: push to the registry that it mirrors",
            413: "the registry takes no blobs of this size: raise its limit, or that of the proxy before it",
            429: f"wait {_wait(response, 60):.0f} s: the registry limits how often it is asked",
            507: quota,
        }
        is_quota = "quota" in said.lower()
        hint = quota if is_quota else hints.get(code, "try again: what arrived is kept")
        return StoreError(what, hint=hint)

    def failed(self, path: str, error: Exception) -> StoreError:
        """Return the error for a request that had no answer."""
        if isinstance(error, StoreError):
            return error
        text, kind = _system_words(error) or str(error), type(error).__name__
        hint = "check the host's name, the network and the proxy (HTTPS_PROXY), then try again"
        if "WRONG_VERSION_NUMBER" in text:
            hint = f"the host has no TLS: set {PLAIN_HTTP}={self.host} if its network is trusted"
        return StoreError(
            f"{self.name}: {path:.40}: {kind}: {text:.300}", hint=certificate_hint(text) or hint
        )


def _system_words(error: BaseException | None) -> str:
    """Return what the system says of a failure, such as `Connection refused`; empty: nothing.

    requests wraps it three times, and each time repeats the URL.
    """
    words = ""
    while error is not None:
        words = (error.strerror if isinstance(error, OSError) else "") or words
        error = error.__cause__ or error.__context__
    return words


def certificate_hint(text: str) -> str:
    """Return the next step after an error that is one of certificates; empty: it is none."""
    text = text.lower()
    if "certificate" not in text:
        return ""
    if "expired" in text or "not yet valid" in text:
        now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
        return f"set this machine's clock if it is not {now} UTC now, else the host needs a new certificate"
    if "mismatch" in text or "not valid for" in text:
        return "give the host by the name that its certificate has"
    return "name the private CA of the host's certificate in SSL_CERT_FILE"


class BlobBody:
    """A blob as the body of a request, which may be sent again from its start."""

    def __init__(self, at: Descriptor, pieces: Pieces, where: str) -> None:
        self._at, self._pieces, self._where = at, pieces, where

    def __len__(self) -> int:
        return self._at.size

    def __iter__(self) -> Iterator[bytes | memoryview]:
        return checked(self._at, self._pieces(0), self._where)


def _limited(response: Response, most: int, where: str) -> bytes:
    """Return a small answer. Raise RejectError where it is larger, StoreError where it is too slow."""
    content = bytearray()
    for piece in arriving(response, where):
        content += piece
        if len(content) > most:
            raise RejectError(where, f"expected at most {most} bytes, found more")
    return bytes(content)


def _finish(response: Response) -> None:
    """Read a short answer, so that its connection takes the next request. Close that of a long one."""
    with contextlib.suppress(Exception):  # it is cut, or too slow
        next(arriving(response, response.url), None)


def _said(response: Response) -> str:
    """Return what a registry says about its refusal, with a colon before it."""
    content = b""
    with contextlib.suppress(Exception):  # it is cut, or too slow
        content = (
            next(arriving(response, response.url), b"") or response.content
        )  # if it was read before
    errors = parse_object(content).get("errors")
    first = errors[0] if isinstance(errors, list) and errors else None
    if not isinstance(first, dict):
        return ""
    parts = [str(first.get(key)) for key in ("code", "message") if first.get(key)]
    return f": {' '.join(parts):.300}"


def _wait(response: Response, pause: float) -> float:
    """Return how long a registry asks to wait, within reason."""
    said = response.headers.get("Retry-After", "")
    if said.isdecimal():
        return min(float(said), _MOST_PAUSE_SECONDS)
    try:
        seconds = parsedate_to_datetime(said).timestamp() - time.time()
    except (ValueError, OverflowError):  # no date either
        return pause
    return min(max(seconds, 0.0), _MOST_PAUSE_SECONDS)


def _is_passing(error: Exception) -> bool:
    """Return whether a failure may be over soon: not one of a name, a certificate or a proxy."""
    from requests import exceptions

    if isinstance(error, exceptions.SSLError | exceptions.ProxyError | exceptions.InvalidURL):
        return False
    return isinstance(error, exceptions.ConnectionError | exceptions.Timeout) and not any(
        word in str(error) for word in ("NameResolution", "refused")
    )


def new_session() -> Session:
    """Return a session of requests with the CAs of `$SSL_CERT_FILE`. Raise ImportError without requests."""
    import requests
    from requests.adapters import HTTPAdapter

    class OwnLogins(requests.Session):
        """Sends no login of ~/.netrc, which a registry could have sent to a host of its choice."""

        def rebuild_auth(self, prepared_request: Any, response: Any) -> None:
            if self.should_strip_auth(response.request.url, prepared_request.url):
                prepared_request.headers.pop("Authorization", None)

        def get_redirect_target(self, resp: Any) -> str | None:
            target = super().get_redirect_target(resp)
            if target is not None:  # requests would read the body, however long it is
                resp._content = b""
                resp.close()
            return target

    session = OwnLogins()
    session.auth = lambda request: request
    for scheme in ("http://", "https://"):
        session.mount(scheme, HTTPAdapter(pool_maxsize=32))
    session.headers["User-Agent"] = "prejit"
    if not os.environ.get("REQUESTS_CA_BUNDLE") and (given := os.environ.get("SSL_CERT_FILE")):
        session.verify = given
    return session
