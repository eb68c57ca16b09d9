"""Clients that send one request after the other, and what a bundle should answer to them."""

import asyncio
import json
import threading
import time

from prejit.runtime import load
from prejit.server.load.http_client import HttpClient
from prejit.server.load.workload import LoadRequest

KEYS = [f"key-{number}-0123456789" for number in range(4)]
TOKENS = 24
LIMIT_SECONDS = 120


class Clients(threading.Thread):
    """Clients that send one request after the other, each with its own prompt, in one event loop."""

    def __init__(self, server, count):
        super().__init__(daemon=True)  # a test that fails does not wait for it
        self._server, self._count, self._ends = server, count, threading.Event()
        self.gaps = []
        self.texts = set()
        self.requests = 0
        self.failures = []

    def run(self):
        asyncio.run(self._send_all())

    def end(self):
        self._ends.set()
        self.join()
        return self

    async def _send_all(self):
        client = HttpClient(self._server.url)
        await asyncio.gather(*(self._send(client, number) for number in range(self._count)))
        client.close()

    async def _send(self, client, number):
        prompt = f"{number % 8} name abc 12 "
        body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": True}
        headers = {
            "Authorization": f"Bearer {KEYS[number % len(KEYS)]}",
            "Content-Type": "application/json",
        }
        content = json.dumps({**body, "ignore_eos": True}).encode()
        request = LoadRequest("/v1/completions", content, headers, is_streamed=True)
        while not self._ends.is_set():
            answer = await client.exchange_within(request, LIMIT_SECONDS)
            try:
                self._read(prompt, answer)
            except Exception as error:
                self.failures.append(f"{type(error).__name__}: {error}"[:300])
                await asyncio.sleep(0.1)  # a server that has ended fails thousands a second

    def _read(self, prompt, answer):
        text, fingerprints, last, is_whole, rest = "", set[str](), None, False, b""
        if answer.status != 200 or answer.failed:
            raise ValueError(f"{answer.status}: {answer.failed} {answer.body[-300:]!r}")
        for came, part in answer.parts:
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                if line == b"data: [DONE]":
                    is_whole = True
                elif line.startswith(b"data: "):
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        raise ValueError(chunk["error"])
                    if last is not None:
                        self.gaps.append(came - last)
                    last = came
                    text += "".join(each["text"] for each in chunk["choices"])
                    fingerprints.add(chunk["system_fingerprint"])
        if not is_whole or len(fingerprints) != 1:
            raise ValueError(f"expected a whole text of one bundle, found {fingerprints}: {text!r}")
        self.texts.add((prompt, text, fingerprints.pop()))
        self.requests += 1


def expected(bundle):
    """Return what a bundle answers to every prompt, with its fingerprint."""
    with load(bundle, on_mismatch="error") as loaded:
        fingerprint = f"fp_{loaded.digest.removeprefix('sha256:')[:12]}"
        options = {"max_new_tokens": TOKENS, "temperature": 0, "stop_token_ids": ()}
        return {
            (prompt, loaded.generate(prompt, **options).text, fingerprint)
            for prompt in (f"{number} name abc 12 " for number in range(8))
        }


def start(server, count):
    """Start clients, and wait for their first answers."""
    clients = Clients(server, count)
    clients.start()
    until = time.monotonic() + 60
    while clients.requests < count:
        assert time.monotonic() < until, clients.failures
        time.sleep(0.01)
    return clients
