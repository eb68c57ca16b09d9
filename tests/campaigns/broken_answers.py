"""Answers of a registry, or of a web server, that break a transfer: `FakeRegistry.fault` returns them."""

import gzip
import json
import socket
import struct
import time

STALL_SECONDS = 0.5  # longer than the time limit that the campaign's processes have for an answer
ABSURD_WAITS = (
    "999999999",
    "9" * 400,
    "-5",
    "1e9",
    "soon",
    "",
    "²",
    "Wed, 21 Oct 2065 07:28:00 GMT",
)
ABSURD_PLACES = ("http://[::1", "http://", "ftp://x/y", "::", "http://127.0.0.1:1/x", "\x7f", "//")
CHALLENGES = (
    *("", "Bearer", "Negotiate", 'Bearer realm="nowhere"', 'Basic realm="x'),
    'Bearer realm="http://127.0.0.1:1/token"',
)
JUNK = (
    *(b"", b"null", b"[]", b"[" * 20_000, b'{"manifests":{}}', b'{"config":[]}'),
    *(b'{"manifests":[null, 1, "a", {}]}', b'{"artifactType":[1]}', b"\xff\xfe"),
    b"<html>log in to the wireless network first</html>",
)


def send(handler, part, status, *, length, close=True, **headers):
    """Send an answer whose Content-Length (None: it has none) need not be right."""
    handler.send_response(status)
    if length is not None:
        headers["content_length"] = str(length)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    if handler.command != "HEAD":
        handler.write(part)
    handler.close_connection = close


def body(write):
    """Return an answer made of the right content from the first byte that is asked for, and the status."""

    def answer(handler, content, start):
        if content is None:
            handler.reply(404)
        else:
            write(handler, content[start:], 206 if handler.headers.get("range") else 200)

    return answer


def document(said, **headers):
    """Return an answer that is the same whatever is asked for."""
    return lambda handler, content, start: send(
        handler, said, 200, length=len(said), close=False, **headers
    )


def first(part, share):
    """Return the first bytes of a part, as many as a share of it has."""
    return part[: int(len(part) * share)]


def partly(end):
    """Return what draws a part of the answer; then `end` gets the handler."""

    def draw(rng):
        share = rng.random()

        def write(handler, part, status):
            send(handler, first(part, share), status, length=len(part))
            end(handler)

        return body(write)

    return draw


def reset(handler):
    handler.wfile.flush()
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def other_length(rng):
    """A Content-Length that is too small, with bytes behind it or none, or too large, filled or not."""
    share, more, sends = rng.random(), rng.randint(1, 100_000), rng.random() < 0.5
    is_small = rng.random() < 0.5

    def write(handler, part, status):
        if is_small:
            said = first(part, share)
            send(handler, part if sends else said, status, length=len(said), close=sends)
        else:
            filled = part + bytes(more) if sends else part
            send(handler, filled, status, length=len(part) + more)

    return body(write)


def no_length(rng):
    """No Content-Length: the end of the connection is that of the answer, which may be cut."""
    share = rng.choice((1.0, rng.random()))

    def write(handler, part, status):
        send(handler, first(part, share), status, length=None, connection="close")

    return body(write)


def chunks(rng):
    """A chunked body whose last chunk is cut, or has no valid length."""
    share, ending = rng.random(), rng.choice((b"", b"zz\r\n", b"-1\r\n"))

    def write(handler, part, status):
        sent = first(part, share)
        send(handler, b"", status, length=None, transfer_encoding="chunked")
        handler.wfile.write(b"%x\r\n" % max(1, len(sent)))
        handler.write(sent)
        handler.wfile.write(b"\r\n" + ending)

    return body(write)


def range_ignored(rng):
    """All bytes with status 200, or with 206, whatever was asked for."""
    status = rng.choice((200, 200, 206))
    headers = rng.choice(({}, {"content_range": "bytes 0-0/1"}, {"content_range": "x"}))
    share = rng.choice((1.0, rng.random()))

    def answer(handler, content, start):
        if content is None:
            handler.reply(404)
            return
        given = headers if status == 206 else {}
        send(handler, first(content, share), status, length=len(content), **given)

    return answer


def wrong(rng):
    """One wrong byte, in all of the answer or in a part of it."""
    place, share = rng.random(), rng.choice((1.0, 0.9, rng.random()))

    def write(handler, part, status):
        changed = bytearray(part)
        if part:
            changed[int(place * len(part))] ^= 1 << rng.randrange(8)
        send(handler, first(bytes(changed), share), status, length=len(part))

    return body(write)


def swapped(rng):
    choice = rng.random()

    def answer(handler, content, start):
        held = handler.registry
        others = [*held.blobs.values(), *held.manifests.values(), *held.files.values()]
        part = others[int(choice * len(others))][start:]
        send(handler, part, 206 if start else 200, length=len(part), close=False)

    return answer


def zipped(_):
    def write(handler, part, status):
        small = gzip.compress(part)
        send(handler, small, status, length=len(small), close=False, content_encoding="gzip")

    return body(write)


def junk(rng):
    said = rng.choice(JUNK)
    kinds = ("text/html", "application/vnd.oci.image.index.v1+json", "", "x/y")
    return document(said, content_type=rng.choice(kinds))


def no_http(rng):
    said = rng.choice((b"\x15\x03\x01\x00\x02\x02\x16", b"HTTP/1.1 abc\r\n\r\n", b"a: b\r\n" * 300))

    def answer(handler, content, start):
        handler.wfile.write(said)
        handler.close_connection = True

    return answer


def busy(rng):
    wait = rng.choice((None, *ABSURD_WAITS))
    headers = {} if wait is None else {"retry_after": wait}
    return rng.choice((408, 429, 429, 500, 502, 503, 504)), headers


def refused(rng):
    code = rng.choice((400, 401, 401, 403, 404, 405, 410, 413, 418, 451, 507, 599))
    return code, {"www_authenticate": rng.choice(CHALLENGES)} if code in (401, 403) else {}


def lying_referrers(rng):
    """A list of what refers to a bundle, with entries for what is not there or is something else."""
    kind = "application/vnd.oci.image.manifest.v1+json"
    digest = rng.choice(("sha256:" + "0" * 64, "sha256:../../x", "sha512:" + "0" * 128, "", 7))
    entry = {"mediaType": kind, "digest": digest, "size": rng.choice((2, -1, 10**12, "2"))}
    entry["artifactType"] = "application/vnd.cyclonedx+json"
    said = {"manifests": [entry] * rng.choice((1, 2, 3000))}
    return document(json.dumps(said).encode())


OF_CONTENT = {
    "cut": partly(lambda handler: None),
    "reset": partly(reset),
    "stalled": partly(lambda handler: time.sleep(STALL_SECONDS)),
    "another Content-Length": other_length,
    "no Content-Length": no_length,
    "chunks that are cut": chunks,
    "Range ignored or misnamed": range_ignored,
    "416": lambda rng: body(lambda handler, *_: handler.reply(416)),
    "a wrong byte": wrong,
    "another blob": swapped,
    "compressed unasked": zipped,
    "a page or junk": junk,
}
OF_ANY = {
    "no HTTP": no_http,
    "429 and 5xx": busy,
    "refused": refused,
    "an absurd redirect": lambda rng: (
        rng.choice((202, 301, 302, 307, 308)),
        {"location": rng.choice(ABSURD_PLACES)},
    ),
    "hung up": lambda rng: "hang up",
}
