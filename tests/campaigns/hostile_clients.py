"""Clients that do to a server whatever it should bear, and print how their requests ended."""

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
from itertools import product, repeat
from socket import SO_LINGER, SOL_SOCKET

HOST = "127.0.0.1"
HOSTILE_SECONDS = 30.0  # how long a hostile request lasts at most
OPENED_A_SECOND = 400  # connections that are opened in a second until all that are wanted are open
KIB, MIB = 1 << 10, 1 << 20
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
KINDS = {}


def kind(tasks, pause):
    """Let so many tasks send requests of a kind, each with a pause of so many seconds between two."""

    def register(act):
        KINDS[act.__name__] = act, tasks, pause
        return act

    return register


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


def chunked(key, path=COMPLETIONS):
    head = request(path, b"{}", key, Content_Length="", Transfer_Encoding="chunked")
    return head.removesuffix(b"{}")


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


def wide_schema(number, width):
    names = (f"field_{number}_{place}" for place in range(width))
    return {"type": "object", "properties": {name: {"type": "string"} for name in names}}


def nested_schema(depth):
    schema = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


class Hostile:
    """Each method with a `kind` sends one request, and returns its outcome."""

    def __init__(self, port, key, until, connections):
        self._port, self._key, self._until = port, key, until
        self._connections = connections
        self._random = random.Random(30)
        self._outcomes = Counter()
        self._open = self._most_open = self._opened = 0

    async def run(self, kinds):
        """Send requests of these kinds until the time is over, and return how they ended."""
        wanted = [KINDS[name] for name in kinds]
        tasks = [self._again(act, pause) for act, count, pause in wanted for _ in range(count)]
        tasks = [asyncio.create_task(each) for each in (*tasks, self._crowd())]
        await asyncio.sleep(max(0, self._until - time.monotonic()))
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        found = {}
        for (name, outcome), count in sorted(self._outcomes.items()):
            found.setdefault(name, {})[outcome] = count
        connections = {"opened": self._opened, "most at once": self._most_open}
        return {"connections": connections, "requests": found}

    async def _again(self, act, pause):
        await asyncio.sleep(self._random.uniform(0, min(pause, 1)))
        while True:
            try:
                async with asyncio.timeout(HOSTILE_SECONDS):
                    outcome = await act(self)
            except TimeoutError:
                outcome = "no end"
            except OSError:
                outcome = "closed"
            self._outcomes[act.__name__, outcome] += 1
            await asyncio.sleep(pause * self._random.uniform(0.5, 1.5))

    async def _crowd(self):
        """Keep many connections open that send nothing, or the beginning of a head."""
        hostile = self

        class Silent(asyncio.Protocol):
            def connection_made(self, transport):
                hostile._open += 1
                hostile._opened += 1
                hostile._most_open = max(hostile._most_open, hostile._open)
                if hostile._opened % 2:
                    transport.write(b"POST /v1/completions HTTP/1.1\r\nHost: ")

            def connection_lost(self, error):
                hostile._open -= 1

        loop = asyncio.get_running_loop()
        while True:
            for _ in range(min(OPENED_A_SECOND // 20, self._connections - self._open)):
                with suppress(OSError):
                    await loop.create_connection(Silent, HOST, self._port)
            await asyncio.sleep(1 / 20)

    async def _send(self, *pieces, pause=0, leave_after=None):
        """Send pieces; return the status, or how it ended; go after some seconds without an answer."""
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
        return request(COMPLETIONS, body | fields, self._key)

    def _chat(self, schema, **fields):
        shape = {"name": "answer", "schema": schema, "strict": True}
        body = {"model": "decoder", "messages": [{"role": "user", "content": "abc"}]}
        body |= {"response_format": {"type": "json_schema", "json_schema": shape}}
        return request(CHAT, body | {"max_tokens": 20} | fields, self._key)

    # ------------------------------------------------------------------ heads and bodies

    @kind(20, 1)
    async def slow_head(self):
        head = request("/v1/models", b"", self._key)[:-2]
        return await self._send(head, *repeat(b"X-More: 1\r\n", 25), pause=1)

    @kind(20, 1)
    async def slow_body(self):
        head = request(COMPLETIONS, b"{", self._key, Content_Length=10_000)
        return await self._send(head, *repeat(b" ", 25), pause=1)

    @kind(1, 1)
    async def huge_head(self):
        """Sends 2 MB of headers, in many fields or in one."""
        start = request("/v1/models", b"")[:-2]
        line = self._random.choice((b"X-More: 1\r\n" * 1000, b"x" * 10_000))
        return await self._send(start, b"X: ", *repeat(line, 200))

    @kind(1, 2)
    async def huge_body(self):
        """Announces 1 TB, or sends 32 MB in chunks, with a key or none."""
        key = self._random.choice((self._key, ""))
        if self._random.random() < 0.5:
            head = request(COMPLETIONS, b"{", key, Content_Length=1 << 40)
            return await self._send(head, *repeat(bytes(64 * KIB), 32))
        chunk = b"%x\r\n%b\r\n" % (64 * KIB, bytes(64 * KIB))
        return await self._send(chunked(key), *repeat(chunk, 512))

    @kind(2, 2)
    async def huge_trailers(self):
        """Sends 20 MB of trailers behind a body, with a key or none."""
        path = self._random.choice(("/v1/models", COMPLETIONS))
        start = chunked(self._random.choice((self._key, "")), path) + b"2\r\n{}\r\n0\r\n"
        line = b"X-More: " + b"x" * 1000 + b"\r\n"
        return await self._send(start, *repeat(line * 20, 1000))

    @kind(1, 3)
    async def huge_extensions(self):
        """Sends chunks of one byte, each with an extension of 10 KB."""
        chunk = b"1;" + b"x" * 10_000 + b"\r\n \r\n"
        return await self._send(chunked(self._key), *repeat(chunk, 1000))

    @kind(1, 3)
    async def tiny_chunks(self):
        """Sends a body in 100,000 chunks of one byte."""
        return await self._send(chunked(self._key), *repeat(b"1\r\n \r\n" * 1000, 100))

    @kind(4, 0.5)
    async def cancelled_upload(self):
        """Goes in the middle of a body of 10 MB, with a reset."""
        async with connected(self._port) as (_, writer):
            writer.write(request(COMPLETIONS, b"{", self._key, Content_Length=10 * MIB))
            writer.write(bytes(self._random.randint(1, 256) * KIB))
            await asyncio.sleep(self._random.uniform(0, 0.3))
            lingering = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, lingering)
        return "left"

    @kind(1, 0.5)
    async def no_http(self):
        two = b"Host: a\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        junk = (
            b"\x16\x03\x01" + self._random.randbytes(500),
            b"GET / HTTP/9.9\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\n" + two + b"GET /metrics HTTP/1.1\r\n\r\n",
            self._random.randbytes(5000) + b"\r\n\r\n",
        )
        return await self._send(self._random.choice(junk), leave_after=2)

    @kind(1, 3)
    async def unread_answers(self):
        """Sends 500 requests in one connection and reads no answer."""
        async with connected(self._port, limit=1) as (_, writer):
            writer.write(request("/openapi.json", b"", Connection="") * 500)
            await asyncio.sleep(10)
        return "left"

    @kind(1, 3)
    async def nested(self):
        """Sends JSON that is deep, or has very many values or a very long number."""
        contents = (
            b"[" * 200_000,
            b'{"a":' * 100_000,
            b'{"prompt":[' + b"[]," * MIB + b"[]]}",
            b'{"model":"decoder","prompt":"a","seed":' + b"9" * MIB + b"}",
        )
        return await self._send(request(COMPLETIONS, self._random.choice(contents), self._key))

    # ------------------------------------------------------------------ bombs

    @kind(2, 3)
    async def schema_bomb(self):
        """Sends a new schema of 186 KB and goes after 2.5 seconds."""
        schema = wide_schema(self._random.getrandbits(40), 4000)
        return await self._send(self._chat(schema), leave_after=2.5)

    @kind(1, 3)
    async def schema_growth(self):
        """Sends a small schema whose grammar is large."""
        depth = self._random.randint(12, 40)
        doubled = {f"{at}": {"anyOf": [{"$ref": f"#/$defs/{at + 1}"}] * 8} for at in range(depth)}
        many = {f"{at}": {"enum": [*range(300)]} for at in range(200)}
        schemas = (
            {"$ref": "#/$defs/0", "$defs": doubled | {f"{depth}": {"type": "null"}}},
            {"type": "array", "items": {"type": "string", "maxLength": 10**6}, "maxItems": 10**6},
            {"type": "object", "additionalProperties": False, "properties": many},
            {"type": "integer", "minimum": -(10**300), "maximum": 10**300},
            nested_schema(3000),
        )
        return await self._send(self._chat(self._random.choice(schemas)), leave_after=5)

    @kind(1, 3)
    async def regex_bomb(self):
        patterns = (
            *("^(a+)+$", "^(([a-z]{1,900}){1,900}){1,900}$", "^(.*a){40}$"),
            *("^" + "(a|b|ab)*" * 60 + "c$", "^(" * 2000 + "a" + ")?" * 2000 + "$"),
            f"^[\\w\\W]{{0,{self._random.randint(1000, 60_000)}}}$",
            "^(?=.*a)(?=.*b).{1,500}$",
        )
        schema = {"type": "string", "pattern": self._random.choice(patterns)}
        return await self._send(self._chat(schema), leave_after=5)

    @kind(1, 5)
    async def long_prompts(self):
        """Sends 256 prompts of 9,000 characters, or fewer and shorter ones that the server takes."""
        number, length = self._random.choice(((256, 9000), (256, 300), (24, 9000), (24, 300)))
        letters = "".join(self._random.choices("abcn 12", k=length))
        return await self._send(self._completion(prompt=[letters] * number, max_tokens=1))

    @kind(1, 3)
    async def many_stops(self):
        stops = [f"{place}" + "abc " * 100 for place in range(32)]
        return await self._send(self._completion(stop=stops, max_tokens=60), leave_after=10)

    @kind(1, 3)
    async def many_texts(self):
        """Asks for 128 texts of a schema, or for as many as the server takes."""
        schema, count = {"type": "string", "maxLength": 4000}, self._random.choice((128, 24, 4))
        return await self._send(self._chat(schema, n=count, max_tokens=400), leave_after=3)

    # ------------------------------------------------------------------ floods

    @kind(10, 0.5)
    async def flood(self):
        return await self._send(self._completion(), leave_after=self._random.uniform(0.2, 20))

    @kind(4, 0.5)
    async def flood_first(self):
        """Asks for several long texts, as important as they may be or more."""
        body = self._completion(priority=self._random.choice((-2_000_000_000, -1, 0)), n=4)
        return await self._send(body, leave_after=self._random.uniform(0.2, 20))

    @kind(4, 1)
    async def slow_reader(self):
        body = self._completion(logprobs=5, n=2, stream=True)
        async with connected(self._port, limit=1024) as (reader, writer):
            writer.write(body)
            for _ in range(40):
                if not await reader.read(512):
                    return "ended"
                await asyncio.sleep(0.5)
        return "left"

    @kind(2, 0.2)
    async def no_key(self):
        key = self._random.choice(("", "wrong"))
        path = self._random.choice((COMPLETIONS, "/tokenize", "/v1/responses", "/none"))
        return await self._send(request(path, {"model": "decoder", "prompt": "abc"}, key))

    @kind(2, 0.3)
    async def looks(self):
        paths = ("/metrics", "/health/ready", "/health/live", "/openapi.json", "/")
        return await self._send(request(self._random.choice(paths), b""))

    @kind(1, 3)
    async def drain(self):
        """Wants the server to take no more requests: without a key, with its own, or from a web page."""
        page = {"Origin": "http://example.com", "Content_Type": "text/plain", "Host": "example.com"}
        found = set()
        for key, headers in product((self._key, ""), ({}, page)):
            found.add(await self._send(request("/drain", b"{}", key, **headers), leave_after=5))
        return " ".join(sorted(found))


def main(port, key, seconds, connections, *kinds):
    """Send requests of these kinds or of all, with the least priority of the machine."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    os.nice(
        19
    )  # an honest client waits for what the server does, not for the CPU time of its neighbours
    hostile = Hostile(int(port), key, time.monotonic() + float(seconds), int(connections))
    print(json.dumps(asyncio.run(hostile.run(kinds or KINDS))))


if __name__ == "__main__":
    main(*sys.argv[1:])
