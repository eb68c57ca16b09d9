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
from functools import reduce
from itertools import product, repeat
from socket import SO_LINGER, SOL_SOCKET

HOST = "127.0.0.1"
HOSTILE_SECONDS = 30.0  # how long a hostile request lasts at most
OPENED_A_SECOND = 400  # connections that are opened in a second until all that are wanted are open
KIB, MIB = 1 << 10, 1 << 20
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


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


class Hostile:
    """Sends requests of `KINDS`, each from so many tasks and with a pause between two."""

    def __init__(self, port, key, until, connections):
        self.random, self.key = random.Random(30), key
        self._port, self._until, self._connections = port, until, connections
        self._outcomes = Counter()
        self._open = self._most_open = self._opened = 0

    async def run(self, kinds):
        """Send requests of these kinds until the time is over, and return how they ended."""
        tasks = [
            self._again(name, act, pause)
            for name, (count, pause, act) in KINDS.items()
            for _ in range(count if name in kinds else 0)
        ]
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

    async def _again(self, name, act, pause):
        await asyncio.sleep(self.random.uniform(0, min(pause, 1)))
        while True:
            try:
                async with asyncio.timeout(HOSTILE_SECONDS):
                    outcome = await act(self)
            except TimeoutError:
                outcome = "no end"
            except OSError:
                outcome = "closed"
            self._outcomes[name, outcome] += 1
            await asyncio.sleep(pause * self.random.uniform(0.5, 1.5))

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

    async def send(self, *pieces, pause=0, leave_after=None):
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

    def completion(self, **fields):
        prompt = "".join(self.random.choices(("abc ", "name", "12"), k=8))
        body = {"model": "decoder", "prompt": prompt, "max_tokens": 400, "ignore_eos": True}
        return request(COMPLETIONS, body | fields, self.key)

    def chat(self, schema, **fields):
        shape = {"name": "answer", "schema": schema, "strict": True}
        body = {"model": "decoder", "messages": [{"role": "user", "content": "abc"}]}
        body |= {"response_format": {"type": "json_schema", "json_schema": shape}}
        return request(CHAT, body | {"max_tokens": 20} | fields, self.key)

    def either_key(self):
        return self.random.choice((self.key, ""))

    async def slow_head(self):
        head = request("/v1/models", b"", self.key)[:-2]
        return await self.send(head, *repeat(b"X-More: 1\r\n", 25), pause=1)

    async def slow_body(self):
        head = request(COMPLETIONS, b"{", self.key, Content_Length=10_000)
        return await self.send(head, *repeat(b" ", 25), pause=1)

    async def huge_head(self):
        """Sends 2 MB of headers, in many fields or in one."""
        line = self.random.choice((b"X-More: 1\r\n" * 1000, b"x" * 10_000))
        return await self.send(request("/v1/models", b"")[:-2], b"X: ", *repeat(line, 200))

    async def huge_body(self):
        """Announces 1 TB, or sends 32 MB in chunks."""
        if self.random.random() < 0.5:
            head = request(COMPLETIONS, b"{", self.either_key(), Content_Length=1 << 40)
            return await self.send(head, *repeat(bytes(64 * KIB), 32))
        chunk = b"%x\r\n%b\r\n" % (64 * KIB, bytes(64 * KIB))
        return await self.send(chunked(self.either_key()), *repeat(chunk, 512))

    async def huge_trailers(self):
        """Sends 20 MB of trailers behind a body."""
        path = self.random.choice(("/v1/models", COMPLETIONS))
        start = chunked(self.either_key(), path) + b"2\r\n{}\r\n0\r\n"
        line = b"X-More: " + b"x" * 1000 + b"\r\n"
        return await self.send(start, *repeat(line * 20, 1000))

    async def cancelled_upload(self):
        """Goes in the middle of a body of 10 MB, with a reset."""
        async with connected(self._port) as (_, writer):
            writer.write(request(COMPLETIONS, b"{", self.key, Content_Length=10 * MIB))
            writer.write(bytes(self.random.randint(1, 256) * KIB))
            await asyncio.sleep(self.random.uniform(0, 0.3))
            lingering = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, lingering)
        return "left"

    async def no_http(self):
        """Sends what is no HTTP, or means two things."""
        two = b"Host: a\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        junk = (
            *(b"\x16\x03\x01" + self.random.randbytes(500), b"GET / HTTP/9.9\r\n\r\n"),
            b"POST /v1/completions HTTP/1.1\r\n" + two + b"GET /metrics HTTP/1.1\r\n\r\n",
            self.random.randbytes(5000) + b"\r\n\r\n",
        )
        return await self.send(self.random.choice(junk), leave_after=2)

    async def unread_answers(self):
        """Sends 500 requests in one connection and reads no answer."""
        async with connected(self._port, limit=1) as (_, writer):
            writer.write(request("/openapi.json", b"", Connection="") * 500)
            await asyncio.sleep(10)
        return "left"

    async def schema_bomb(self):
        """Sends a new schema of 186 KB and goes after 2.5 seconds."""
        schema = wide_schema(self.random.getrandbits(40), 4000)
        return await self.send(self.chat(schema), leave_after=2.5)

    async def schema_growth(self):
        """Sends a small schema whose grammar is large."""
        depth = self.random.randint(12, 40)
        doubled = {f"{at}": {"anyOf": [{"$ref": f"#/$defs/{at + 1}"}] * 8} for at in range(depth)}
        many = {f"{at}": {"enum": [*range(300)]} for at in range(200)}
        schemas = (
            {"$ref": "#/$defs/0", "$defs": doubled | {f"{depth}": {"type": "null"}}},
            {"type": "array", "items": {"type": "string", "maxLength": 10**6}, "maxItems": 10**6},
            {"type": "object", "additionalProperties": False, "properties": many},
            {"type": "integer", "minimum": -(10**300), "maximum": 10**300},
            reduce(
                lambda inner, _: {"type": "array", "items": inner}, range(3000), {"type": "null"}
            ),
        )
        return await self.send(self.chat(self.random.choice(schemas)), leave_after=5)

    async def regex_bomb(self):
        patterns = (
            *("^(a+)+$", "^(([a-z]{1,900}){1,900}){1,900}$", "^(.*a){40}$"),
            *("^" + "(a|b|ab)*" * 60 + "c$", "^(" * 2000 + "a" + ")?" * 2000 + "$"),
            f"^[\\w\\W]{{0,{self.random.randint(1000, 60_000)}}}$",
            "^(?=.*a)(?=.*b).{1,500}$",
        )
        schema = {"type": "string", "pattern": self.random.choice(patterns)}
        return await self.send(self.chat(schema), leave_after=5)

    async def long_prompts(self):
        """Sends 256 prompts of 9,000 characters, or fewer and shorter ones that the server takes."""
        number, length = self.random.choice(((256, 9000), (256, 300), (24, 9000), (24, 300)))
        letters = "".join(self.random.choices("abcn 12", k=length))
        return await self.send(self.completion(prompt=[letters] * number, max_tokens=1))

    async def many_stops(self):
        stops = [f"{place}" + "abc " * 100 for place in range(32)]
        return await self.send(self.completion(stop=stops, max_tokens=60), leave_after=10)

    async def many_texts(self):
        """Asks for 128 texts of a schema, or for as many as the server takes."""
        schema, count = {"type": "string", "maxLength": 4000}, self.random.choice((128, 24, 4))
        return await self.send(self.chat(schema, n=count, max_tokens=400), leave_after=3)

    async def flood_first(self):
        """Asks for several long texts, as important as they may be or more."""
        body = self.completion(priority=self.random.choice((-2_000_000_000, -1, 0)), n=4)
        return await self.send(body, leave_after=self.random.uniform(0.2, 20))

    async def slow_reader(self):
        async with connected(self._port, limit=1024) as (reader, writer):
            writer.write(self.completion(logprobs=5, n=2, stream=True))
            for _ in range(40):
                if not await reader.read(512):
                    return "ended"
                await asyncio.sleep(0.5)
        return "left"

    async def no_key(self):
        key = self.random.choice(("", "wrong"))
        path = self.random.choice((COMPLETIONS, "/tokenize", "/v1/responses", "/none"))
        return await self.send(request(path, {"model": "decoder", "prompt": "abc"}, key))

    async def drain(self):
        """Wants the server to take no more requests: without a key, with its own, or from a web page."""
        page = {"Origin": "http://example.com", "Content_Type": "text/plain", "Host": "example.com"}
        found = set()
        for key, headers in product((self.key, ""), ({}, page)):
            found.add(await self.send(request("/drain", b"{}", key, **headers), leave_after=5))
        return " ".join(sorted(found))


NESTED = (  # JSON that is deep, or has very many values or a very long number
    *(b"[" * 200_000, b'{"a":' * 100_000, b'{"prompt":[' + b"[]," * MIB + b"[]]}"),
    b'{"model":"decoder","prompt":"a","seed":' + b"9" * MIB + b"}",
)
OPEN = ("/metrics", "/health/ready", "/health/live", "/openapi.json", "/")  # paths without a key
EXTENDED = b"1;" + b"x" * 10_000 + b"\r\n \r\n"
KINDS = {
    "slow_head": (20, 1, Hostile.slow_head),
    "slow_body": (20, 1, Hostile.slow_body),
    "huge_head": (1, 1, Hostile.huge_head),
    "huge_body": (1, 2, Hostile.huge_body),
    "huge_trailers": (2, 2, Hostile.huge_trailers),
    "huge_extensions": (1, 3, lambda h: h.send(chunked(h.key), *[EXTENDED] * 1000)),
    "tiny_chunks": (1, 3, lambda h: h.send(chunked(h.key), *[b"1\r\n \r\n" * 1000] * 100)),
    "cancelled_upload": (4, 0.5, Hostile.cancelled_upload),
    "no_http": (1, 0.5, Hostile.no_http),
    "unread_answers": (1, 3, Hostile.unread_answers),
    "nested": (1, 3, lambda h: h.send(request(COMPLETIONS, h.random.choice(NESTED), h.key))),
    "schema_bomb": (2, 3, Hostile.schema_bomb),
    "schema_growth": (1, 3, Hostile.schema_growth),
    "regex_bomb": (1, 3, Hostile.regex_bomb),
    "long_prompts": (1, 5, Hostile.long_prompts),
    "many_stops": (1, 3, Hostile.many_stops),
    "many_texts": (1, 3, Hostile.many_texts),
    "flood": (10, 0.5, lambda h: h.send(h.completion(), leave_after=h.random.uniform(0.2, 20))),
    "flood_first": (4, 0.5, Hostile.flood_first),
    "slow_reader": (4, 1, Hostile.slow_reader),
    "no_key": (2, 0.2, Hostile.no_key),
    "looks": (2, 0.3, lambda h: h.send(request(h.random.choice(OPEN), b""))),
    "drain": (1, 3, Hostile.drain),
}
"""How many tasks send each kind at once, how many seconds each pauses between two, and what it sends."""


def main(port, key, seconds, connections, *kinds):
    """Send requests of these kinds or of all, with the least priority of the machine."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    os.nice(19)  # honest clients wait for what the server does, not for the CPU time of neighbours
    hostile = Hostile(int(port), key, time.monotonic() + float(seconds), int(connections))
    print(json.dumps(asyncio.run(hostile.run(kinds or KINDS))))


if __name__ == "__main__":
    main(*sys.argv[1:])
