"""Clients that send one request after the other, and what a bundle should answer to them."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import httpx
from tests.integration.test_serve import Process

from prejit.runtime import load

KEYS = [f"key-{number}-0123456789" for number in range(4)]
TOKENS = 24


class Clients(threading.Thread):
    """Threads that send one request after the other, each with its own prompt.

    Attributes:
        gaps: seconds between two events of a stream.
        texts: each text with its prompt and the fingerprint of the bundle that gave it.
        failures: what should not have happened.
    """

    def __init__(self, server: Process, count: int) -> None:
        super().__init__(daemon=True)  # a test that fails does not wait for it
        self._server, self._count, self._ends = server, count, threading.Event()
        self.gaps: list[float] = []
        self.texts: set[tuple[str, str, str]] = set()
        self.requests = 0
        self.failures: list[str] = []

    def run(self) -> None:
        threads = [
            threading.Thread(target=self._send, args=(at,), daemon=True)
            for at in range(self._count)
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join()

    def end(self) -> Clients:
        self._ends.set()
        self.join()
        return self

    def _send(self, number: int) -> None:
        prompt = f"{number % 8} name abc 12 "
        body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": True}
        headers = {"Authorization": f"Bearer {KEYS[number % len(KEYS)]}"}
        url = f"{self._server.url}/v1/completions"
        with httpx.Client(timeout=120, headers=headers) as client:
            while not self._ends.is_set():
                try:
                    with client.stream("POST", url, json={**body, "ignore_eos": True}) as answer:
                        self._read(prompt, answer)
                except Exception as error:
                    self.failures.append(f"{type(error).__name__}: {error}"[:300])
                    time.sleep(0.1)  # a server that has ended fails thousands a second

    def _read(self, prompt: str, answer: httpx.Response) -> None:
        text, fingerprints, last, is_whole = "", set[str](), None, False
        if answer.status_code != 200:
            raise ValueError(f"{answer.status_code}: {answer.read()[-300:]!r}")
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                is_whole = True
            elif line.startswith("data: "):
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise ValueError(chunk["error"])
                now = time.monotonic()
                if last is not None:
                    self.gaps.append(now - last)
                last = now
                text += "".join(each["text"] for each in chunk["choices"])
                fingerprints.add(chunk["system_fingerprint"])
        if not is_whole or len(fingerprints) != 1:
            raise ValueError(f"expected a whole text of one bundle, found {fingerprints}: {text!r}")
        self.texts.add((prompt, text, fingerprints.pop()))
        self.requests += 1


def expected(bundle: Path) -> set[tuple[str, str, str]]:
    """Return what a bundle answers to every prompt, with its fingerprint."""
    with load(bundle, on_mismatch="error") as loaded:
        fingerprint = f"fp_{loaded.digest.removeprefix('sha256:')[:12]}"
        options: dict[str, Any] = {"max_new_tokens": TOKENS, "temperature": 0, "stop_token_ids": ()}
        return {
            (prompt, loaded.generate(prompt, **options).text, fingerprint)
            for prompt in (f"{number} name abc 12 " for number in range(8))
        }


def start(server: Process, count: int) -> Clients:
    """Start clients, and wait for their first answers."""
    clients = Clients(server, count)
    clients.start()
    until = time.monotonic() + 60
    while clients.requests < count:
        assert time.monotonic() < until, clients.failures
        time.sleep(0.01)
    return clients
