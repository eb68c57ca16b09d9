"""Shared stores for tests: in memory, an HTTP server as nginx with WebDAV is one, S3, and an OCI registry."""

import re
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import formatdate
from urllib.parse import parse_qs, unquote

from tests.http_serving import QuietHandler, serving

from prejit.compiler.sharing.remote import RemoteError, RemoteFile


@dataclass
class Memory:
    """A remote store in memory, which can fail."""

    name: str = "memory://"
    files: dict[str, bytes] = field(default_factory=dict)
    fails: str = ""
    reads: int = 0
    deletes: bool = True

    def read(self, path, most):
        self.reads += 1
        self._check()
        content = self.files.get(path)
        if content is not None and len(content) > most:
            raise RemoteError(f"{path}: too large")
        return content

    def download(self, path, write):
        self._check()
        if path not in self.files:
            return False
        content = self.files[path]
        for start in range(0, len(content), 1000):
            write(memoryview(content[start : start + 1000]))
        return True

    def has(self, path):
        self._check()
        return path in self.files

    def write(self, path, content):
        self._check()
        self.files[path] = content if isinstance(content, bytes) else content.read()

    def create(self, path, content):
        self._check()
        return self.files.setdefault(path, content) == content

    def remove(self, path):
        self._check()
        if self.deletes:
            self.files.pop(path, None)
        return self.deletes

    def listed(self):
        self._check()
        for number, (path, content) in enumerate([*self.files.items()]):
            yield RemoteFile(path, len(content), float(number))

    def _check(self):
        if self.fails:
            raise RemoteError(self.fails)


@contextmanager
def http_store(files, seen, is_down=lambda: False, upload_seconds=0.0):
    """Serve files over HTTP; PUT adds one, after a time. Yields the URL."""

    class Handler(QuietHandler):
        def do_GET(self):
            self.answer(self.path in files, files.get(self.path, b""))

        do_HEAD = do_GET

        def do_PUT(self):
            seen.append(f"{self.path[:8]} {self.headers.get('content-type')}")
            time.sleep(upload_seconds)
            content = self.content()
            if not is_down():
                files[self.path] = content
            self.answer(True, b"")

        def answer(self, found, content):
            seen.append(f"{self.command} {self.headers.get('authorization')}")
            if is_down():
                self.reply(503)
            else:
                self.reply(200 if found else 404, content)

    with serving(Handler) as host:
        yield f"http://{host}"


@contextmanager
def s3_store(conditions="kept"):
    """Serve a bucket of the S3 API, as Google's XML API has it too. Yields the endpoint.

    `conditions` is what a PUT with `If-None-Match: *` does where the object exists: S3 itself keeps the
    condition; older servers of its API ignore it or refuse every request that has one.
    """
    files = {}
    parts = {}  # of the one multipart upload that a test may do
    lock = threading.Lock()

    class Handler(QuietHandler):
        def parse_request(self):
            is_sound = super().parse_request()
            self.path = unquote(self.path)  # a client of Google's encodes slashes
            return is_sound

        def do_GET(self):
            path, _, query = self.path.partition("?")
            if "list-type=2" in query:
                self.answer(200, self.listing(parse_qs(query).get("prefix", [""])[0]))
            elif (found := files.get(path)) is None:
                self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            else:
                self.answer(200, found[0])

        do_HEAD = do_GET

        def do_PUT(self):
            content = self.content()
            if "uploadId=" in self.path:
                parts[int(parse_qs(self.path.partition("?")[2])["partNumber"][0])] = content
                return self.answer(200)
            conditional = self.headers.get("if-none-match") == "*"
            if conditional and conditions == "refused":
                return self.answer(501, b"<Error><Code>NotImplemented</Code></Error>")
            with lock:
                taken = conditional and conditions == "kept" and self.path in files
                if not taken:
                    files[self.path] = (content, time.time())
            self.answer(412 if taken else 200)

        def do_POST(self):
            path, _, query = self.path.partition("?")
            found = self.content().decode()
            if query.startswith("uploads"):
                return self.answer(200, b"<R><UploadId>1</UploadId></R>")
            if query.startswith("uploadId="):
                files[path] = (b"".join(parts[number] for number in sorted(parts)), time.time())
                return self.answer(200, b'<R><ETag>"x"</ETag></R>')
            keys = re.findall("<Key>(.*?)</Key>", found)
            for key in keys:
                files.pop(f"/bucket/{key}", None)
            deleted = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
            self.answer(200, f"<DeleteResult>{deleted}</DeleteResult>".encode())

        def do_DELETE(self):
            files.pop(self.path, None)
            self.answer(204)

        def listing(self, prefix):
            entries = ""
            for path, (content, written) in sorted(files.items()):
                if path.startswith(f"/bucket/{prefix}"):
                    date = datetime.fromtimestamp(written, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
                    entries += f"<Contents><Key>{path.removeprefix('/bucket/')}</Key>"
                    entries += f"<Size>{len(content)}</Size>"
                    entries += f"<LastModified>{date}</LastModified></Contents>"
            return f"<ListBucketResult>{entries}</ListBucketResult>".encode()

        def answer(self, status, content=b""):
            written = formatdate(files.get(self.path, (b"", 0.0))[1], usegmt=True)
            self.reply(status, content, last_modified=written, etag='"x"')

    with serving(Handler) as host:
        yield f"http://{host}"


S3_SETTINGS = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y", "AWS_REGION": "us-east-1"}
"""The environment variables of a client of `s3_store`, beside AWS_ENDPOINT."""
