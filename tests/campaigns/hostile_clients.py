"""An honest client of a server, and hostile ones. Each kind of client is a process; it prints JSON."""

import asyncio
import json
import os
import random
import resource
import struct
import sys
import time
from collections import Counter
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import cycle, product, repeat
from socket import SO_LINGER, SOL_SOCKET

HOST = "127.0.0.1"
STREAMS = 4
PROMPTS = 16  # how many prompts each stream of the honest client sends in turn, of about 40 tokens
LETTERS = {str(byte - ord("!")): 100 for byte in range(ord("a"), ord("z") + 1)}
"""A bias towards the tokens of letters, so that each token is text: an event tells the time of one token."""
SCRAPE_SECONDS = 0.25  # pause between two scrapes of /metrics
PATIENCE_SECONDS = 60.0  # how long the honest client waits for the next bytes
HOSTILE_SECONDS = 30.0  # how long a hostile request lasts at most
OPENED_A_SECOND = 400  # connections that are opened in a second until all that are wanted are open
KIB, MIB = 1 << 10, 1 << 20


def request(path, body, key="", **headers):
    """Return an HTTP request. A GET if the body is empty."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {"Host": HOST, "Connection": "close"}
    if content:
        fields |= {"Content-Type": "application/json", "Content-Length": len(content)}
    if key:
        fields["Authorization"] = f"Bearer {key}"
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{'POST' if content else 'GET'} {path} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in fields.items() if value != ""]
    return "\r\n".join([*lines, "", ""]).encode() + content


@asynccontextmanager
async def connected(port, **options):
    """Open a connection, and close it without waiting for the other side."""
    reader, writer = await asyncio.open_connection(HOST, port, **options)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def status_of(reader):
    """Return the status of an answer, or how the connection ended without one."""
    line = await reader.readline()
    return line.split()[1].decode() if line.startswith(b"HTTP/1.1 ") else "closed"


# ---------------------------------------------------------------------- an honest client


@dataclass
class Honest:
    """Reads completions as streams, one after the other in each of four tasks, and scrapes /metrics."""

    port: int
    key: str
    until: float
    gaps: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    scrapes: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)

    async def run(self):
        """Send requests until the time is over, and return what was seen."""
        await asyncio.gather(self._scrape(), *map(self._read, range(STREAMS)))
        return {
            "requests": len(self.firsts),
            "failed": len(self.failures),
            "failures": self.failures[:10],
            "tokens": len(self.gaps) + len(self.firsts),
            "ms between tokens": in_ms(self.gaps),
            "ms to the first token": in_ms(self.firsts),
            "scrapes": len(self.scrapes),
            "ms of a scrape": in_ms(self.scrapes),
        }

    async def _read(self, number):
        body = {"model": "decoder", "max_tokens": 64, "stream": True, "temperature": 0}
        body |= {"ignore_eos": True, "logit_bias": LETTERS}
        for turn in cycle(range(PROMPTS)):
            if time.monotonic() >= self.until:
                return
            prompt = f"{number} {turn} " + "name abc 12 " * 4
            try:
                text = await self._text(body | {"prompt": prompt})
                if self.texts.setdefault(prompt, text) != text:
                    raise ValueError(f"expected {self.texts[prompt]!r}, found {text!r}")
            except (OSError, EOFError, ValueError) as error:
                self.failures.append(f"{type(error).__name__}: {error}"[:300])
                await asyncio.sleep(0.5)

    async def _text(self, body):
        text, last = "", time.monotonic()
        times = self.firsts
        async with connected(self.port) as (reader, writer):
            writer.write(request("/v1/completions", body, self.key))
            async with asyncio.timeout(PATIENCE_SECONDS):
                status = await status_of(reader)
            while True:
                async with asyncio.timeout(PATIENCE_SECONDS):
                    line = await reader.readline()
                if status != "200":
                    raise ValueError(f"{status}: {(await reader.read(2000))[-300:]!r}")
                if line == b"data: [DONE]\n":
                    return text
                if not line:
                    raise EOFError(f"the stream ended after {text!r}")
                if line.startswith(b"data: "):
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        raise ValueError(chunk["error"])
                    now = time.monotonic()
                    times.append(now - last)
                    times, last = self.gaps, now
                    text += "".join(each["text"] for each in chunk["choices"])

    async def _scrape(self):
        while time.monotonic() < self.until:
            begun = time.monotonic()
            try:
                async with (
                    asyncio.timeout(PATIENCE_SECONDS),
                    connected(self.port) as (reader, writer),
                ):
                    writer.write(request("/metrics", b"", self.key))
                    status = await status_of(reader)
                    content = await reader.read()
                if status != "200" or b"vllm:num_requests_running" not in content:
                    raise ValueError(f"{status}: {content[-300:]!r}")
            except (OSError, ValueError) as error:
                self.failures.append(f"/metrics: {type(error).__name__}: {error}"[:300])
            self.scrapes.append(time.monotonic() - begun)
            await asyncio.sleep(SCRAPE_SECONDS)


def in_ms(seconds):
    """Return the median, the 99th percentile and the most of some times."""
    ordered = sorted(seconds) or [0.0]
    places = {"median": len(ordered) // 2, "p99": len(ordered) * 99 // 100, "most": -1}
    return {name: round(ordered[place] * 1000, 2) for name, place in places.items()}


# ---------------------------------------------------------------------- hostile clients


class Hostile:
    """Does all that a server should bear. Each method is a kind of request, and returns its outcome."""

    def __init__(self, port, key, until, connections):
        self._port, self._key, self._until = port, key, until
        self._connections = connections
        self._random = random.Random(30)
        self._outcomes = Counter()
        self._open = self._most_open = self._opened = 0

    async def run(self, kinds):
        """Send requests of these kinds until the time is over, and return how they ended."""
        tasks = [
            asyncio.create_task(self._again(kind, pause))
            for kind in kinds
            for count, pause in [KINDS[kind]]
            for _ in range(count)
        ]
        crowd = asyncio.create_task(self._crowd())
        await asyncio.sleep(max(0, self._until - time.monotonic()))
        for each in (*tasks, crowd):
            each.cancel()
        await asyncio.gather(*tasks, crowd, return_exceptions=True)
        found = {}
        for (kind, outcome), count in sorted(self._outcomes.items()):
            found.setdefault(kind, {})[outcome] = count
        return {
            "connections": {"opened": self._opened, "most at once": self._most_open},
            "requests": found,
        }

    async def _again(self, kind, pause):
        act = getattr(self, kind)
        await asyncio.sleep(self._random.uniform(0, min(pause, 1)))
        while True:
            try:
                async with asyncio.timeout(HOSTILE_SECONDS):
                    outcome = await act()
            except TimeoutError:
                outcome = "no end"
            except OSError:
                outcome = "closed"
            self._outcomes[kind, outcome] += 1
            await asyncio.sleep(pause * self._random.uniform(0.5, 1.5))

    async def _crowd(self):
        """Keep many connections open that send nothing, or the beginning of a head."""
        loop = asyncio.get_running_loop()
        hostile = self

        class Silent(asyncio.Protocol):
            def connection_made(self, transport):
                hostile._open += 1
                hostile._opened += 1
                hostile._most_open = max(hostile._most_open, hostile._open)
                if hostile._opened % 2:
                    assert isinstance(transport, asyncio.Transport)
                    transport.write(b"POST /v1/completions HTTP/1.1\r\nHost: ")

            def connection_lost(self, error):
                hostile._open -= 1

        while True:
            for _ in range(min(OPENED_A_SECOND // 20, self._connections - self._open)):
                with suppress(OSError):
                    await loop.create_connection(Silent, HOST, self._port)
            await asyncio.sleep(1 / 20)

    async def _send(self, pieces, *, pause=0, leave_after=None):
        """Send pieces, and return the status of the answer or how the connection ended."""
        pieces = (pieces,) if isinstance(pieces, bytes) else pieces
        async with connected(self._port) as (reader, writer):
            answer = asyncio.create_task(status_of(reader))
            try:
                for piece in pieces:
                    writer.write(piece)
                    with suppress(ConnectionError):
                        await writer.drain()
                    await asyncio.sleep(pause)
                    if answer.done():
                        break
                if leave_after is None:
                    return await answer
                await asyncio.wait((answer,), timeout=leave_after)
                return answer.result() if answer.done() else "left"
            finally:
                answer.cancel()

    def _completion(self, **fields):
        prompt = "".join(self._random.choices(("abc ", "name", "12"), k=8))
        body = {"model": "decoder", "prompt": prompt, "max_tokens": 400, "ignore_eos": True}
        return request("/v1/completions", body | fields, self._key)

    def _chat(self, schema):
        return request(
            "/v1/chat/completions",
            {
                "model": "decoder",
                "messages": [{"role": "user", "content": "abc"}],
                "max_tokens": 20,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": schema, "strict": True},
                },
            },
            self._key,
        )

    # ------------------------------------------------------------------ heads and bodies

    async def slow_head(self):
        """Sends a line of a head every second."""
        head = request("/v1/models", b"", self._key)[:-2]
        return await self._send((head, *repeat(b"X-More: 1\r\n", 25)), pause=1)

    async def slow_body(self):
        """Sends a byte of a body every second."""
        head = request("/v1/completions", b"{", self._key, Content_Length=10_000)
        return await self._send((head, *repeat(b" ", 25)), pause=1)

    async def huge_head(self):
        """Sends 2 MB of headers, in many fields or in one."""
        start = request("/v1/models", b"")[:-2]
        line = self._random.choice((b"X-More: 1\r\n" * 1000, b"x" * 10_000))
        return await self._send((start, b"X: ", *repeat(line, 200)))

    async def huge_body(self):
        """Announces 1 TB, or sends 32 MB in chunks, with a key or none."""
        key = self._random.choice((self._key, ""))
        if self._random.random() < 0.5:
            head = request("/v1/completions", b"{", key, Content_Length=1 << 40)
            return await self._send((head, *repeat(bytes(64 * KIB), 32)))
        chunk = b"%x\r\n%b\r\n" % (64 * KIB, bytes(64 * KIB))
        return await self._send((self._chunked(key), *repeat(chunk, 512)))

    async def huge_trailers(self):
        """Sends 20 MB of trailers behind a body, with a key or none."""
        path = self._random.choice(("/v1/models", "/v1/completions"))
        start = self._chunked(self._random.choice((self._key, "")), path) + b"2\r\n{}\r\n0\r\n"
        line = b"X-More: " + b"x" * 1000 + b"\r\n"
        return await self._send((start, *repeat(line * 20, 1000)))

    async def huge_extensions(self):
        """Sends chunks of one byte, each with an extension of 10 KB."""
        chunk = b"1;" + b"x" * 10_000 + b"\r\n \r\n"
        return await self._send((self._chunked(self._key), *repeat(chunk, 1000)))

    async def tiny_chunks(self):
        """Sends a body in 100,000 chunks of one byte."""
        return await self._send((self._chunked(self._key), *repeat(b"1\r\n \r\n" * 1000, 100)))

    async def cancelled_upload(self):
        """Goes in the middle of a body of 10 MB, with a reset."""
        async with connected(self._port) as (_, writer):
            writer.write(request("/v1/completions", b"{", self._key, Content_Length=10 * MIB))
            writer.write(bytes(self._random.randint(1, 256) * KIB))
            await asyncio.sleep(self._random.uniform(0, 0.3))
            lingering = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, lingering)
        return "left"

    async def no_http(self):
        """Sends what is no HTTP, or means two things."""
        both = b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        junk = (
            b"\x16\x03\x01" + self._random.randbytes(500),
            b"GET / HTTP/9.9\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"
            + both
            + b"GET /metrics HTTP/1.1\r\n\r\n",
            self._random.randbytes(5000) + b"\r\n\r\n",
        )
        return await self._send(self._random.choice(junk), leave_after=2)

    async def unread_answers(self):
        """Sends 500 requests in one connection and reads no answer."""
        one = request("/openapi.json", b"", Connection="")
        async with connected(self._port, limit=1) as (_, writer):
            writer.write(one * 500)
            await asyncio.sleep(10)
        return "left"

    async def nested(self):
        """Sends JSON that is deep, or has very many values or a very long number."""
        content = self._random.choice(
            (
                b"[" * 200_000,
                b'{"a":' * 100_000,
                b'{"prompt":[' + b"[]," * MIB + b"[]]}",
                b'{"model":"decoder","prompt":"a","seed":' + b"9" * MIB + b"}",
            )
        )
        return await self._send(request("/v1/completions", content, self._key))

    # ------------------------------------------------------------------ bombs

    async def schema_bomb(self):
        """Sends a new schema of 186 KB and goes after 2.5 seconds."""
        schema = wide_schema(self._random.getrandbits(40), 4000)
        return await self._send(self._chat(schema), leave_after=2.5)

    async def schema_growth(self):
        """Sends a small schema whose grammar is large."""
        depth = self._random.randint(12, 40)
        kinds = [
            {
                "$ref": "#/$defs/0",
                "$defs": {
                    str(at): {"anyOf": [{"$ref": f"#/$defs/{at + 1}"}] * 8} for at in range(depth)
                }
                | {str(depth): {"type": "null"}},
            },
            {"type": "array", "items": {"type": "string", "maxLength": 10**6}, "maxItems": 10**6},
            {"type": "object", "additionalProperties": False}
            | {"properties": {f"{at}": {"enum": [*range(300)]} for at in range(200)}},
            {"type": "integer", "minimum": -(10**300), "maximum": 10**300},
            nested_schema(3000),
        ]
        return await self._send(self._chat(self._random.choice(kinds)), leave_after=5)

    async def regex_bomb(self):
        """Sends a pattern that is small and hard."""
        patterns = (
            "^(a+)+$",
            "^(([a-z]{1,900}){1,900}){1,900}$",
            "^(.*a){40}$",
            "^" + "(a|b|ab)*" * 60 + "c$",
            "^(" * 2000 + "a" + ")?" * 2000 + "$",
            f"^[\\w\\W]{{0,{self._random.randint(1000, 60_000)}}}$",
            "^(?=.*a)(?=.*b).{1,500}$",
        )
        schema = {"type": "string", "pattern": self._random.choice(patterns)}
        return await self._send(self._chat(schema), leave_after=5)

    async def long_prompts(self):
        """Sends 256 prompts of 9,000 characters, or fewer and shorter ones that the server takes."""
        number, length = self._random.choice(((256, 9000), (256, 300), (24, 9000), (24, 300)))
        letters = "".join(self._random.choices("abcn 12", k=length))
        body = {"model": "decoder", "prompt": [letters] * number, "max_tokens": 1}
        return await self._send(request("/v1/completions", body, self._key))

    async def many_stops(self):
        """Asks for a text with 32 long stop strings."""
        stops = [f"{place}" + "abc " * 100 for place in range(32)]
        return await self._send(self._completion(stop=stops, max_tokens=60), leave_after=10)

    async def many_texts(self):
        """Asks for 128 texts of a schema, or for as many as the server takes."""
        body = {"model": "decoder", "messages": [{"role": "user", "content": "abc"}]}
        body["n"] = self._random.choice((128, 24, 4))
        schema = {"type": "string", "maxLength": 4000}
        shape = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        body |= {"max_tokens": 400, "response_format": shape}
        return await self._send(request("/v1/chat/completions", body, self._key), leave_after=3)

    # ------------------------------------------------------------------ floods

    async def flood(self):
        """Asks for long texts, and reads the answer."""
        return await self._send(self._completion(), leave_after=self._random.uniform(0.2, 20))

    async def flood_first(self):
        """Asks for several long texts, as important as they may be or more."""
        body = self._completion(priority=self._random.choice((-2_000_000_000, -1, 0)), n=4)
        return await self._send(body, leave_after=self._random.uniform(0.2, 20))

    async def slow_reader(self):
        """Reads a large stream slowly."""
        body = self._completion(logprobs=5, n=2, stream=True)
        async with connected(self._port, limit=1024) as (reader, writer):
            writer.write(body)
            for _ in range(40):
                if not await reader.read(512):
                    return "ended"
                await asyncio.sleep(0.5)
        return "left"

    async def no_key(self):
        """Asks for texts and for paths without a key, or with a wrong one."""
        key = self._random.choice(("", "wrong"))
        path = self._random.choice(("/v1/completions", "/tokenize", "/v1/responses", "/none"))
        return await self._send(request(path, {"model": "decoder", "prompt": "abc"}, key))

    async def looks(self):
        """Asks for open paths, without a key."""
        paths = ("/metrics", "/health/ready", "/health/live", "/openapi.json", "/")
        return await self._send(request(self._random.choice(paths), b""))

    async def drain(self):
        """Wants the server to take no more requests: without a key, with its own, or from a web page."""
        page = {"Origin": "http://example.com", "Content_Type": "text/plain", "Host": "example.com"}
        found = set[str]()
        for key, headers in product((self._key, ""), ({}, page)):
            found.add(await self._send(request("/drain", b"{}", key, **headers), leave_after=5))
        return " ".join(sorted(found))

    @staticmethod
    def _chunked(key, path="/v1/completions"):
        head = request(path, b"{}", key, Content_Length="", Transfer_Encoding="chunked")
        return head.removesuffix(b"{}")


KINDS = {
    Hostile.slow_head.__name__: (20, 1),
    Hostile.slow_body.__name__: (20, 1),
    Hostile.huge_head.__name__: (1, 1),
    Hostile.huge_body.__name__: (1, 2),
    Hostile.huge_trailers.__name__: (2, 2),
    Hostile.huge_extensions.__name__: (1, 3),
    Hostile.tiny_chunks.__name__: (1, 3),
    Hostile.cancelled_upload.__name__: (4, 0.5),
    Hostile.no_http.__name__: (1, 0.5),
    Hostile.unread_answers.__name__: (1, 3),
    Hostile.nested.__name__: (1, 3),
    Hostile.schema_bomb.__name__: (2, 3),
    Hostile.schema_growth.__name__: (1, 3),
    Hostile.regex_bomb.__name__: (1, 3),
    Hostile.long_prompts.__name__: (1, 5),
    Hostile.many_stops.__name__: (1, 3),
    Hostile.many_texts.__name__: (1, 3),
    Hostile.flood.__name__: (10, 0.5),
    Hostile.flood_first.__name__: (4, 0.5),
    Hostile.slow_reader.__name__: (4, 1),
    Hostile.no_key.__name__: (2, 0.2),
    Hostile.looks.__name__: (2, 0.3),
    Hostile.drain.__name__: (1, 3),
}
"""How many tasks send each kind of request at once, and how many seconds each pauses between two."""


def wide_schema(number, width):
    """Return a schema of an object of many fields, another one for each number."""
    names = (f"field_{number}_{place}" for place in range(width))
    return {"type": "object", "properties": {name: {"type": "string"} for name in names}}


def nested_schema(depth):
    """Return a schema of arrays in arrays."""
    schema = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def main():
    """Run a client; see the module."""
    name, port, key, seconds, *more = sys.argv[1:]
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    until = time.monotonic() + float(seconds)
    if name == "honest":
        found = asyncio.run(Honest(int(port), key, until).run())
    else:
        os.nice(19)
        hostile = Hostile(int(port), key, until, int(more[0]))
        found = asyncio.run(hostile.run(more[1:] or KINDS))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
