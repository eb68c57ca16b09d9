"""A small OCI registry that keeps the specification's rules, and breaks transfers as it is told to."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.http_serving import QuietHandler, serving

from prejit.runtime.base.files import digest_of

INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"


@dataclass
class FakeRegistry:
    """What a registry holds, and how it behaves.

    Attributes:
        blobs: contents by repository and digest.
        manifests: contents by repository and tag or digest.
        user: `name:password` that its token service wants; None: nobody needs to log in.
        is_basic: whether the user is asked for without a token service.
        has_referrers: whether it knows the referrers API. If not, clients keep tags instead of it.
        has_tag_deletion: whether it deletes tags.
        fault: called with the method and the path of each request; what it returns happens instead of the
            right answer: a status, a status with headers, `cut` (half of the answer), `stall`, `wrong`
            (other bytes), `hang up` (before the body of the request is read), a URL to redirect to, or a
            function that answers: it gets the handler, the right content (None: there is none) and the
            first byte that is asked for. Or before the right answer: seconds, a float, or an event, which
            holds back half of it until it is set. None: nothing.
        files: contents by path, for a static web server beside the registry.
        seen: method and path of each request, with its authorization.
        sent: bytes of blobs and files that were sent, by path.
        connections, connected: how many are open, and how many were opened so far.
        host: `host:port`.
    """

    blobs: dict[tuple[str, str], bytes] = field(default_factory=dict)
    manifests: dict[tuple[str, str], bytes] = field(default_factory=dict)
    user: str | None = None
    is_basic: bool = False
    has_referrers: bool = True
    has_tag_deletion: bool = True
    fault: Callable[[str, str], Any] = lambda method, path: None
    files: dict[str, bytes] = field(default_factory=dict)
    seen: list[tuple[str, str, str]] = field(default_factory=list)
    sent: Counter[str] = field(default_factory=Counter)
    connections: int = 0
    connected: int = 0
    host: str = ""

    def count(self, method: str, part: str) -> int:
        """Return how many requests of a method had a path with a part."""
        return sum(each[0] == method and part in each[1] for each in self.seen)


@contextmanager
def fake_registry(**behaviour: Any) -> Iterator[FakeRegistry]:
    """Serve a registry on a free port of this machine."""
    state = FakeRegistry(**behaviour)

    class Handler(_RegistryHandler):
        registry = state

    with serving(Handler) as state.host:
        yield state


_counting = threading.Lock()


class _RegistryHandler(QuietHandler):
    disable_nagle_algorithm = True  # else a body waits 40 ms behind its headers
    registry: FakeRegistry

    def handle(self) -> None:
        self.count_connection(1)
        try:
            super().handle()
        finally:
            self.count_connection(-1)

    def count_connection(self, one: int) -> None:
        with _counting:
            self.registry.connections += one
            self.registry.connected += max(0, one)

    def finish(self) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):
            super().finish()

    def answer(self) -> None:
        state, method = self.registry, self.command
        state.seen.append((method, self.path, self.headers.get("authorization", "")))
        parts = urlsplit(self.path)
        fault = None if parts.path == "/token" else state.fault(method, self.path)
        if fault == "hang up":
            self.close_connection = True
            return
        body = b""
        if "chunked" not in self.headers.get("transfer-encoding", ""):
            body = self.content()
        if isinstance(fault, float):
            time.sleep(fault)
            fault = None
        if parts.path == "/token":
            self.token()
        elif isinstance(fault, int):
            self.reply(fault)
        elif isinstance(fault, tuple):
            self.reply(fault[0], **fault[1])
        elif isinstance(fault, str) and "://" in fault:
            self.reply(307, location=fault)
        elif (
            state.user and "/v2/" in self.path and self.headers.get("authorization") != self.right()
        ):
            token = f'Bearer realm="http://{state.host}/token",service="s",scope="x"'
            asked = 'Basic realm="registry"' if state.is_basic else token
            self.reply(401, www_authenticate=asked)
        else:
            self.act(method, parts.path, parse_qs(parts.query), body, fault)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = answer

    def right(self) -> str:
        return self.basic() if self.registry.is_basic else "Bearer right"

    def basic(self) -> str:
        return f"Basic {base64.b64encode((self.registry.user or '').encode()).decode()}"

    def token(self) -> None:
        if self.headers.get("authorization") == self.basic():
            self.reply(200, b'{"token": "right"}')
        else:
            self.reply(401)

    def act(
        self, method: str, path: str, query: dict[str, list[str]], body: bytes, fault: Any
    ) -> None:
        state = self.registry
        if not path.startswith("/v2/"):
            self.send(state.files.get(path), fault)
            return
        head, _, rest = path.removeprefix("/v2/").rpartition("/")
        name, _, kind = head.rpartition("/")
        if kind == "uploads":  # POST .../blobs/uploads/, PUT .../blobs/uploads/1
            self.upload(method, name.removesuffix("/blobs"), query, body)
        elif kind == "manifests" and method == "PUT":
            self.put_manifest(name, rest, body)
        elif kind == "manifests" and method == "DELETE":
            gone = state.has_tag_deletion and state.manifests.pop((name, rest), b"")
            self.reply(202 if gone else 404 if state.has_tag_deletion else 405)
        elif kind == "manifests":
            content = state.manifests.get((name, rest))
            kind, digest = _media_type(content or b""), digest_of(content or b"")
            self.send(content, fault, content_type=kind, docker_content_digest=digest)
        elif kind == "blobs":
            self.send(state.blobs.get((name, rest)), fault)
        elif kind == "referrers" and state.has_referrers:
            self.send(referrers_index(state, name, rest), fault, content_type=INDEX)
        elif kind == "tags":
            tags = [tag for at, tag in state.manifests if at == name and ":" not in tag]
            known = any(at == name for at, _ in state.manifests)
            self.reply(200 if known else 404, json.dumps({"tags": tags}).encode())
        else:
            self.reply(404)

    def send(self, content: bytes | None, fault: Any, **headers: str) -> None:
        asked = self.headers.get("range", "").removeprefix("bytes=").partition("-")[0]
        if callable(fault):
            fault(self, content, int(asked or 0))
            return
        if content is None:
            self.reply(404, b'{"errors":[{"code":"NAME_UNKNOWN","message":"unknown"}]}')
            return
        if fault == "wrong":
            content = bytes(len(content) - 1) + b"x"
        start, status = int(asked or 0), 206 if asked else 200
        part = content[start:]
        if asked:
            headers["content_range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        if fault in ("cut", "stall") or isinstance(fault, threading.Event):
            self.send_response(status)
            self.send_header("content-length", str(len(part)))
            self.end_headers()
            self.write(part[: len(part) // 2])
            if fault == "stall":
                time.sleep(2)
            if isinstance(fault, threading.Event):
                fault.wait(30)
                self.write(part[len(part) // 2 :])
            self.close_connection = True
            return
        if self.command != "HEAD":
            self.registry.sent[self.path] += len(part)
        self.reply(status, part, **headers)

    def write(self, part: bytes) -> None:
        self.wfile.write(part)
        self.registry.sent[self.path] += len(part)

    def upload(self, method: str, name: str, query: dict[str, list[str]], body: bytes) -> None:
        state = self.registry
        if method == "POST":
            mounted = query.get("mount", [""])[0]
            there = state.blobs.get((query.get("from", [""])[0], mounted))
            if there is not None:
                state.blobs[name, mounted] = there
                self.reply(201)
            else:
                self.reply(202, location=f"/v2/{name}/blobs/uploads/1?state=x")
        elif method == "PUT":
            [digest] = query.get("digest", [""])
            if digest_of(body) != digest:
                self.reply(400, b'{"errors":[{"code":"DIGEST_INVALID"}]}')
                return
            state.blobs[name, digest] = body
            self.reply(201)
        else:
            self.reply(204)

    def put_manifest(self, name: str, tag: str, body: bytes) -> None:
        state, plain, headers = self.registry, json.loads(body), dict[str, str]()
        needed = [
            ("blobs", at) for at in [*filter(None, [plain.get("config")]), *plain.get("layers", ())]
        ]
        needed += [("manifests", at) for at in plain.get("manifests", ())]
        for kind, at in needed:
            held: dict[tuple[str, str], bytes] = getattr(state, kind)
            if (name, at["digest"]) not in held:
                self.reply(400, b'{"errors":[{"code":"MANIFEST_BLOB_UNKNOWN"}]}')
                return
        state.manifests[name, digest_of(body)] = body
        state.manifests[name, tag] = body
        if "subject" in plain and state.has_referrers:
            headers["oci_subject"] = plain["subject"]["digest"]
        self.reply(201, **headers)


def referrers_index(state: FakeRegistry, name: str, digest: str) -> bytes:
    found = []
    for (at, tag), content in list(state.manifests.items()):
        plain = json.loads(content)
        if at == name and ":" in tag and plain.get("subject", {}).get("digest") == digest:
            entry = {"mediaType": MANIFEST, "digest": tag, "size": len(content)}
            found.append({**entry, "artifactType": plain.get("artifactType")})
    return json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": found}).encode()


def _media_type(content: bytes) -> str:
    try:
        return str(json.loads(content)["mediaType"])
    except (ValueError, KeyError):  # a test has damaged it
        return MANIFEST
