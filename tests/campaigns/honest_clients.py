"""Clients that send one request after the other, and what a bundle should answer to them."""

import asyncio
import json
import sys
import threading
import time
from collections import Counter
from itertools import cycle

import httpx

from prejit.runtime import load
from prejit.server.load.http_client import HttpClient
from prejit.server.load.workload import LoadRequest

KEYS = [f"key-{number}-0123456789" for number in range(4)]
TOKENS = 24
LIMIT_SECONDS = 120
SCRAPE_SECONDS = 0.25  # pause between two scrapes of /metrics
PROMPTS = [f"{number} name abc 12 " for number in range(8)]
LETTERS = {str(byte - ord("!")): 100 for byte in range(ord("a"), ord("z") + 1)}
"""A bias towards the tokens of letters, so that each token is text: an event tells the time of one token."""


class Clients(threading.Thread):
    """Clients in one event loop: a thread for each of 200 would measure how threads wait for each other."""

    def __init__(self, url, prompts, *, keys=KEYS, scrapes=False, pause=0.0, **fields):
        super().__init__(daemon=True)  # a test that fails does not wait for it
        self._url, self._prompts, self._keys, self._is_scraping = url, prompts, keys, scrapes
        self._fields = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, **fields}
        self._pause = pause
        self._ends = threading.Event()
        self.gaps = []  # seconds between two events of a stream, by the times when their bytes came
        self.firsts = []  # seconds to the first event of each
        self.scrapes = []
        self.texts = set()  # with the prompt and the fingerprint of the bundle that gave it
        self.requests = 0
        self.failures = []

    def run(self):
        asyncio.run(self._send_all())

    def end(self):
        self._ends.set()
        self.join()
        return self

    async def _send_all(self):
        client = HttpClient(self._url)
        tasks = [self._send(client, *each) for each in enumerate(self._prompts)]
        await asyncio.gather(*tasks, *([self._scrape(client)] if self._is_scraping else []))
        client.close()

    async def _send(self, client, number, prompts):
        headers = {
            "Authorization": f"Bearer {self._keys[number % len(self._keys)]}",
            "Content-Type": "application/json",
        }
        for prompt in cycle(prompts):
            if self._ends.is_set():
                return
            content = json.dumps({"prompt": prompt, "stream": True, **self._fields}).encode()
            request = LoadRequest("/v1/completions", content, headers, is_streamed=True)
            answer = await client.exchange_within(request, LIMIT_SECONDS)
            await self._check(answer, lambda answer, of=prompt: self._read(of, answer))
            await asyncio.sleep(self._pause)

    async def _scrape(self, client):
        headers = {"Authorization": f"Bearer {self._keys[0]}"}
        request = LoadRequest("/metrics", b"", headers, is_streamed=False)
        while not self._ends.is_set():
            began = time.monotonic()
            answer = await client.exchange_within(request, LIMIT_SECONDS, "GET")
            await self._check(answer, lambda found: found.body.index(b"vllm:num_requests_running"))
            self.scrapes.append(time.monotonic() - began)
            await asyncio.sleep(SCRAPE_SECONDS)

    async def _check(self, answer, read):
        try:
            if answer.status != 200 or answer.failed:
                raise ValueError(f"{answer.status}: {answer.failed} {answer.body[-300:]!r}")
            read(answer)
        except Exception as error:
            self.failures.append(f"{type(error).__name__}: {error}"[:300])
            await asyncio.sleep(0.1)  # a server that has ended fails thousands a second

    def _read(self, prompt, answer):
        text, fingerprints, last, is_whole, rest = "", set(), None, False, b""
        for came, part in answer.parts:
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                if line == b"data: [DONE]":
                    is_whole = True
                elif line.startswith(b"data: "):
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        raise ValueError(chunk["error"])
                    if last is None:
                        self.firsts.append(came - answer.begun)
                    else:
                        self.gaps.append(came - last)
                    last = came
                    text += "".join(each["text"] for each in chunk["choices"])
                    fingerprints.add(chunk["system_fingerprint"])
        if not is_whole or len(fingerprints) != 1:
            raise ValueError(f"expected a whole text of one bundle, found {fingerprints}: {text!r}")
        self.texts.add((prompt, text, fingerprints.pop()))
        self.requests += 1


def changed(texts):
    """Return the texts of prompts that one bundle answered in more than one way."""
    counts = Counter((prompt, bundle) for prompt, _, bundle in texts)
    return [f"other texts: {each}" for each in texts if counts[each[0], each[2]] > 1]


def admin_client(socket_path):
    transport = httpx.HTTPTransport(uds=str(socket_path))
    return httpx.Client(transport=transport, base_url="http://admin", timeout=300)


def expected(bundle):
    """Return what a bundle answers to every prompt, with its fingerprint."""
    with load(bundle, on_mismatch="error") as loaded:
        fingerprint = f"fp_{loaded.digest.removeprefix('sha256:')[:12]}"
        options = {"max_new_tokens": TOKENS, "temperature": 0, "stop_token_ids": ()}
        return {(text, loaded.generate(text, **options).text, fingerprint) for text in PROMPTS}


def start(server, count):
    """Start clients, and wait for their first answers."""
    clients = Clients(server.url, [PROMPTS[number % 8 :][:1] for number in range(count)])
    clients.start()
    until = time.monotonic() + 60
    while clients.requests < count:
        assert time.monotonic() < until, clients.failures
        time.sleep(0.01)
    return clients


def in_ms(seconds):
    """Return the median, the 99th percentile and the most of some times."""
    ordered = sorted(seconds) or [0.0]
    places = {"median": len(ordered) // 2, "p99": len(ordered) * 99 // 100, "most": -1}
    return {name: round(ordered[place] * 1000, 2) for name, place in places.items()}


def main(port, key, seconds):
    """Read four streams at once for a time, scrape /metrics meanwhile, and print what was seen as JSON."""
    prompts = [[f"{at} {turn} " + "name abc 12 " * 4 for turn in range(16)] for at in range(4)]
    more = {"max_tokens": 64, "logit_bias": LETTERS}
    clients = Clients(f"http://127.0.0.1:{port}", prompts, keys=[key], scrapes=True, **more)
    clients.start()
    time.sleep(float(seconds))
    clients.end()
    failures = clients.failures + changed(clients.texts)
    found = {
        "requests": clients.requests,
        "failed": len(failures),
        "failures": failures[:10],
        "tokens": len(clients.gaps) + len(clients.firsts),
        "ms between tokens": in_ms(clients.gaps),
        "ms to the first token": in_ms(clients.firsts),
        "scrapes": len(clients.scrapes),
        "ms of a scrape": in_ms(clients.scrapes),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
