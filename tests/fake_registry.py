"""A small OCI registry that keeps the specification's rules, and breaks transfers as it is told to."""

import base64
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
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
    """The content of a registry, and its faults."""

    blobs: dict[tuple[str, str], bytes] = field(default_factory=dict)  # by repository and digest
    manifests: dict[tuple[str, str], bytes] = field(default_factory=dict)  # ... and tag or digest
    user: str | None = None  # `name:password` that its token service wants
    is_basic: bool = False  # the user is asked for without a token service
    has_referrers: bool = True  # if not, clients keep tags instead of this API
    page_entries: int = 1000  # of the list of referrers
    has_tag_deletion: bool = True
    # Called with the method and the path of each request; it returns what happens instead of the answer:
    # a status, a status with headers, `cut` (half of the answer), `stall`, `wrong` (other bytes), `hang up`
    # (before the body of the request is read), a URL to redirect to, or a function that answers: it gets the
    # handler, the right content (None: there is none) and the first byte that is asked for. Or before the
    # right answer: seconds, a float, or an event, which holds back half of it until it is set. None: nothing.
    fault: Callable[[str, str], Any] = lambda method, path: None
    files: dict[str, bytes] = field(default_factory=dict)  # of a static web server beside it
    seen: list[tuple[str, str, str]] = field(default_factory=list)  # method, path, authorization
    sent: Counter[str] = field(default_factory=Counter)  # bytes of blobs and files, by path
    connections: int = 0
    connected: int = 0  # connections that were opened so far
    host: str = ""

    def count(self, method, part):
        """Return how many requests of a method had a path with a part."""
        return sum(each[0] == method and part in each[1] for each in self.seen)


@contextmanager
def fake_registry(**behaviour):
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

    def handle(self):
        with _counting:
            self.registry.connections += 1
            self.registry.connected += 1
        try:
            super().handle()
        finally:
            with _counting:
                self.registry.connections -= 1

    def finish(self):
        with suppress(BrokenPipeError, ConnectionResetError):
            super().finish()

    def answer(self):
        state, method = self.registry, self.command
        login = self.headers.get("authorization", "")
        state.seen.append((method, self.path, login))
        parts = urlsplit(self.path)
        fault = None if parts.path == "/token" else state.fault(method, self.path)
        if fault == "hang up":
            self.close_connection = True
            return
        is_chunked = "chunked" in self.headers.get("transfer-encoding", "")
        body = b"" if is_chunked else self.content()
        if isinstance(fault, float):
            time.sleep(fault)
            fault = None
        basic = f"Basic {base64.b64encode((state.user or '').encode()).decode()}"
        right = basic if state.is_basic else "Bearer right"
        if parts.path == "/token":
            self.reply(*((200, b'{"token": "right"}') if login == basic else (401,)))
        elif isinstance(fault, int):
            self.reply(fault)
        elif isinstance(fault, tuple):
            self.reply(fault[0], **fault[1])
        elif isinstance(fault, str) and "://" in fault:
            self.reply(307, location=fault)
        elif state.user and "/v2/" in self.path and login != right:
            token = f'Bearer realm="http://{state.host}/token",service="s",scope="x"'
            self.reply(401, www_authenticate='Basic realm="registry"' if state.is_basic else token)
        else:
            self.act(method, parts.path, parse_qs(parts.query), body, fault)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = answer

    def act(self, method, path, query, body, fault):
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
            content, media_type = state.manifests.get((name, rest)), MANIFEST
            with suppress(ValueError, KeyError):  # a test has damaged it
                media_type = str(json.loads(content or b"")["mediaType"])
            digest = digest_of(content or b"")
            self.send(content, fault, content_type=media_type, docker_content_digest=digest)
        elif kind == "blobs":
            self.send(state.blobs.get((name, rest)), fault)
        elif kind == "referrers" and state.has_referrers:
            start = int(query.get("last", ["0"])[0])
            end = start + state.page_entries
            index = json.loads(referrers_index(state, name, rest))
            is_last = len(index["manifests"]) <= end
            index["manifests"] = index["manifests"][start:end]
            headers = {} if is_last else {"link": f'<{path}?last={end}>; rel="next"'}
            self.send(json.dumps(index).encode(), fault, content_type=INDEX, **headers)
        elif kind == "tags":
            tags = [tag for at, tag in state.manifests if at == name and ":" not in tag]
            known = any(at == name for at, _ in state.manifests)
            self.reply(200 if known else 404, json.dumps({"tags": tags}).encode())
        else:
            self.reply(404)

    def send(self, content, fault, **headers):
        asked = self.headers.get("range", "").removeprefix("bytes=").partition("-")[0]
        start, status = int(asked or 0), 206 if asked else 200
        if callable(fault):
            fault(self, content, start)
            return
        if content is None:
            self.reply(404, b'{"errors":[{"code":"NAME_UNKNOWN","message":"unknown"}]}')
            return
        if fault == "wrong":
            content = bytes(len(content) - 1) + b"x"
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

    def write(self, part):
        self.wfile.write(part)
        self.registry.sent[self.path] += len(part)

    def upload(self, method, name, query, body):
        blobs = self.registry.blobs
        if method == "POST":
            mounted = query.get("mount", [""])[0]
            there = blobs.get((query.get("from", [""])[0], mounted))
            if there is None:
                self.reply(202, location=f"/v2/{name}/blobs/uploads/1?state=x")
                return
            blobs[name, mounted] = there
            self.reply(201)
        elif method == "PUT":
            [digest] = query.get("digest", [""])
            if digest_of(body) != digest:
                self.reply(400, b'{"errors":[{"code":"DIGEST_INVALID"}]}')
                return
            blobs[name, digest] = body
            self.reply(201)
        else:
            self.reply(204)

    def put_manifest(self, name, tag, body):
        state, plain = self.registry, json.loads(body)
        blobs = [*filter(None, [plain.get("config")]), *plain.get("layers", ())]
        needed = [(state.blobs, at) for at in blobs]
        needed += [(state.manifests, at) for at in plain.get("manifests", ())]
        if any((name, at["digest"]) not in held for held, at in needed):
            self.reply(400, b'{"errors":[{"code":"MANIFEST_BLOB_UNKNOWN"}]}')
            return
        state.manifests[name, digest_of(body)] = state.manifests[name, tag] = body
        has_subject = "subject" in plain and state.has_referrers
        self.reply(201, **({"oci_subject": plain["subject"]["digest"]} if has_subject else {}))


def referrers_index(state, name, digest):
    found = []
    for (at, tag), content in list(state.manifests.items()):
        plain = json.loads(content)
        if at == name and ":" in tag and plain.get("subject", {}).get("digest") == digest:
            entry = {"mediaType": MANIFEST, "digest": tag, "size": len(content)}
            found.append({**entry, "artifactType": plain.get("artifactType")})
    return json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": found}).encode()
