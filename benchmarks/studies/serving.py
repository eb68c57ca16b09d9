"""Measure what HTTP costs: `prejit serve` beside the engine in its own process, with the same requests.

    python -m benchmarks.studies.serving [--rounds 5] [--clients 1,8] [--name NAME]

Writes benchmarks/results/NAME.json and .md. GPT-2 124M, float32, prompts of 32 tokens, 64 new tokens each.
Each round starts a fresh server and a fresh process with an engine, in turns. In both, N clients send
requests one after another until each has had several; the first of each is not counted. Clients of the
server are threads of another process, which read bytes from sockets and do not parse them; clients of the
engine are threads of its process.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.harness.measure import progress
from benchmarks.harness.models import decoder_manifest
from benchmarks.harness.report import Table
from benchmarks.harness.results import begin, save, use_two_cores
from benchmarks.harness.workspace import RESULTS, Bench, bench_directory
from benchmarks.studies.engine import GPT2, PROMPT, TOKENS, prompt_of
from prejit.server import Engine

REQUESTS = 4
"""Requests of each client. The first one is not counted."""
MODULE = "benchmarks.studies.serving"


def with_tokenizer(bench: Bench, name: str = "gpt2") -> Path:
    """Return the directory of a model with a byte-level tokenizer, whose tokens are words of four letters."""
    source = bench.model(name)
    directory = bench.directory / f"{name}-text"
    if not directory.is_dir():
        size = json.loads((source / "config.json").read_text())["vocab_size"]
        letters = "abcdefghijklmnopqrst"
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        words = ("\u0120" + "".join(word) for word in itertools.product(letters, repeat=4))
        names = itertools.islice(itertools.chain(alphabet, words), size)
        made = Tokenizer(models.BPE({name: place for place, name in enumerate(names)}, []))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        partial = directory.with_suffix(".partial")
        shutil.copytree(source, partial, copy_function=os.link, dirs_exist_ok=True)
        made.save(str(partial / "tokenizer.json"))
        partial.rename(directory)
    return directory


@dataclass(slots=True)
class Times:
    """Counts and times of requests.

    Attributes:
        firsts: times to the first token in ms.
        spans: beginning and end of each request, in seconds.
    """

    firsts: list[float] = field(default_factory=list)
    spans: list[tuple[float, float]] = field(default_factory=list)

    def add(self, started: float, first: float, tokens: int) -> None:
        """Count a request that ends now."""
        if tokens != TOKENS:
            raise SystemExit(f"expected {TOKENS} tokens, found {tokens}")
        self.firsts.append(1e3 * (first - started))
        self.spans.append((started, time.perf_counter()))

    def figures(self) -> dict[str, float]:
        """Return tokens a second of all clients, and the median time to the first token in ms."""
        seconds = max(end for _, end in self.spans) - min(start for start, _ in self.spans)
        rate = TOKENS * len(self.spans) / seconds
        return {"tokens_per_second": rate, "first_ms": median(self.firsts)}


def prompt(client: int, number: int) -> list[int]:
    """Return the prompt of a client's request."""
    return prompt_of(100 * number + client, PROMPT, 50257)


def in_process(path: str, clients: int) -> None:
    """Print what an engine in this process gives, and when its first token came after exec."""
    from prejit.runtime import load
    from prejit.runtime.base.process_usage import seconds_since_exec

    engine = Engine(load(path, on_mismatch="error"), slots=8, prefix_memory=0)
    times = Times()

    def ask(client: int) -> None:
        for number in range(REQUESTS):
            started, first, tokens = time.perf_counter(), 0.0, 0
            for piece in engine.stream(
                prompt(client, number), max_new_tokens=TOKENS, stop_token_ids=()
            ):
                first = first or time.perf_counter()
                tokens += piece.token_id is not None
            if number:
                times.add(started, first, tokens)

    next(engine.stream(prompt(7, 0), max_new_tokens=TOKENS, stop_token_ids=()))
    ready = seconds_since_exec()
    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(ask, range(clients)))
    print(json.dumps({"ready": ready, **times.figures()}))
    engine.close()


class Client:
    """A client of a server, which sends one request after another."""

    def __init__(self, port: int, number: int) -> None:
        """Send the first request."""
        self.port, self.number = port, number
        self.request = 0
        self.send()

    def send(self) -> None:
        """Send the next request."""
        body = {
            "model": "serving-gpt2",
            "prompt": prompt(self.number, self.request),
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        content = json.dumps(body).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        )
        self.started, self.first, self.last = time.perf_counter(), 0.0, b""
        self.socket = socket.create_connection(("127.0.0.1", self.port))
        self.socket.sendall(head.encode() + content)

    def is_open_after(self, data: bytes, times: Times) -> bool:
        """Take bytes; return whether the response goes on."""
        if data:
            if not self.first and b"data: " in data:
                self.first = time.perf_counter()
            self.last = self.last[-1000:] + data
            return True
        # A token that completes no character has no event; the last event counts all tokens.
        event = self.last.split(b"data: ")[-2].splitlines()[0]
        if self.request:
            times.add(self.started, self.first, json.loads(event)["usage"]["completion_tokens"])
        self.request += 1
        self.socket.close()
        return False


def as_client(port: int, clients: int) -> None:
    """Print what a server gives to clients in this process."""
    times = Times()
    with selectors.DefaultSelector() as selector:
        for number in range(clients):
            client = Client(port, number)
            selector.register(client.socket, selectors.EVENT_READ, client)
        while selector.get_map():
            for key, _ in selector.select():
                client = key.data
                if client.is_open_after(client.socket.recv(65536), times):
                    continue
                selector.unregister(key.fd)
                if client.request < REQUESTS:
                    client.send()
                    selector.register(client.socket, selectors.EVENT_READ, client)
    print(json.dumps(times.figures()))


def served(path: str, clients: int) -> dict[str, float]:
    """Return what a fresh server gives, and when it was ready after exec."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = time.perf_counter()
    command = (sys.executable, "-m", "prejit.runtime", "serve", path, "--port", str(port))
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        while not is_ready(port):
            time.sleep(0.002)
            if server.poll() is not None:
                raise SystemExit(f"the server ended with {server.returncode}")
        ready = time.perf_counter() - started
        client = (sys.executable, "-m", MODULE, "--client", str(port), "--clients", str(clients))
        said = subprocess.run(client, check=True, capture_output=True, text=True)
        return {"ready": ready, **json.loads(said.stdout.splitlines()[-1])}
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


def is_ready(port: int) -> bool:
    """Return whether a server answers that it is ready."""
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", "/health/ready")
        return connection.getresponse().status == 200
    except OSError:
        return False


def in_a_process(path: str, clients: int) -> dict[str, float]:
    """Return what `in_process` prints in a fresh process."""
    command = (sys.executable, "-m", MODULE, "--engine", path, "--clients", str(clients))
    said = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(said.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Build, measure and write; or be one of the processes that are measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", default="1,8")
    parser.add_argument("--name", default=f"{time.strftime('%Y-%m-%d')}-serving")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--client", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.engine:
        return in_process(given.engine, int(given.clients))
    if given.client:
        return as_client(given.client, int(given.clients))
    use_two_cores()
    facts = begin(given.rounds)
    bench = Bench(bench_directory(), given.rounds, quick=False)
    manifest = decoder_manifest("serving-gpt2", str(with_tokenizer(bench)), "float32", GPT2)
    path = bench.built_manifest("serving-gpt2", manifest)
    ways: dict[str, Callable[[str, int], dict[str, float]]] = {
        "engine": in_a_process,
        "server": served,
    }
    found: dict[str, list[dict[str, float]]] = {}
    counts = [int(each) for each in given.clients.split(",")]
    for number in range(given.rounds + 1):
        for clients in counts:
            for way, run in ways.items():
                progress(f"round {number} of {given.rounds}: {clients} clients of the {way}")
                one = run(path, clients)
                if number:
                    found.setdefault(f"{way} {clients}", []).append(one)
    facts |= {"found": found, "load_after": os.getloadavg()[0]}
    save(RESULTS, given.name, facts, page(facts, found, counts))


def page(facts: dict[str, Any], found: dict[str, list[dict[str, float]]], counts: list[int]) -> str:
    """Return the figures as a page."""

    def of(way: str, clients: int, key: str) -> float:
        return median([one[key] for one in found[f"{way} {clients}"]])

    rows = [
        (
            str(clients),
            *(f"{of(way, clients, 'tokens_per_second'):.1f}" for way in ("engine", "server")),
            f"{of('server', clients, 'tokens_per_second') / of('engine', clients, 'tokens_per_second'):.3f}",
            *(f"{of(way, clients, 'first_ms'):.1f}" for way in ("engine", "server")),
        )
        for clients in counts
    ]
    ready = {
        way: median([one["ready"] for clients in counts for one in found[f"{way} {clients}"]])
        for way in ("engine", "server")
    }
    heads = (
        *("clients", "engine, tokens/s", "server, tokens/s", "share"),
        *("engine, first token, ms", "server, first token, ms"),
    )
    starts = [
        ("exec to the first token of an engine, s", f"{ready['engine']:.2f}"),
        ("exec to /health/ready of a server, s", f"{ready['server']:.2f}"),
    ]
    head = (
        f"# Serving\n\n{facts['date']}, medians of {facts['runs']} rounds of fresh processes. "
        "`python -m benchmarks.studies.serving` repeats it.\n\n"
    )
    tables = [
        Table("The same requests in process and over HTTP", heads, rows, ""),
        Table("Starts", ("", "found"), starts, ""),
    ]
    return head + "\n".join(each.markdown() for each in tables)


if __name__ == "__main__":
    main()
