"""Clients that send requests one after another, to a server or to an engine in this process.

    peers/serving_child.py http     PORT:PID  PROMPTS VOCABULARY TOKENS CLIENTS...    of /v1/completions
    peers/serving_child.py engine   BUNDLE    PROMPTS VOCABULARY TOKENS CLIENTS...    prejit's engine
    peers/serving_child.py openvino DIRECTORY PROMPTS VOCABULARY TOKENS CLIENTS...    OpenVINO GenAI

PROMPTS is the length of prompts, or the least and the greatest, as 32-900: the logarithms of lengths are
evenly spread. 1000+32-900 puts the same 1,000 tokens before all, as a system prompt does. For each number of
clients it prints a line of JSON: tokens a second, times to first tokens, times between tokens, and the
process's memory. Clients are threads. In process, one more thread drives the model, and tokens come to the
clients by queues. The standard library only, beside the measured engine.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol

from benchmarks.harness import workload

REQUESTS = 2
"""Requests of each client that count. One more comes before them."""
FIRST_WORD = 256
"""The tokens below are single bytes in prejit's tokenizer: alone they are no text, and give no event."""

Tokens = Iterator[tuple[float, int]]
"""When tokens came, and how many at once."""


class Ask(Protocol):
    """Sends requests of one client."""

    def __call__(self, prompt: list[int], tokens: int) -> Callable[[], Tokens]:
        """Wait for a whole answer; return a function that gives its tokens, to call when nothing is timed."""


@dataclass(frozen=True)
class Prompts:
    """Prompts of random tokens.

    Attributes:
        least: fewest tokens of a prompt.
        greatest: most tokens of a prompt.
        vocabulary: number of tokens of the model.
        shared: tokens that all begin with, beside those.
    """

    least: int
    greatest: int
    vocabulary: int
    shared: int

    @classmethod
    def read(cls, lengths: str, vocabulary: int) -> Prompts:
        """Return the prompts of the module's docstring."""
        shared, _, own = lengths.rpartition("+")
        least, _, greatest = own.partition("-")
        return cls(int(least), int(greatest or least), vocabulary, int(shared or 0))

    def of(self, number: int) -> list[int]:
        """Return the shared beginning and tokens of this number alone. The last tokens are special."""
        values = random.Random(number)
        share = values.random() if self.greatest > self.least else 0
        length = round(self.least * (self.greatest / self.least) ** share)
        return self._words(random.Random(0), self.shared) + self._words(values, length)

    def _words(self, values: random.Random, count: int) -> list[int]:
        return [values.randrange(FIRST_WORD, self.vocabulary - 8) for _ in range(count)]


def ask_all(
    clients: int, prompts: Prompts, tokens: int, connect: Callable[[], Ask]
) -> dict[str, Any]:
    """Return what clients find that ask at the same time.

    Args:
        clients: how many there are.
        prompts: what they ask.
        tokens: new tokens of each request.
        connect: makes a client.
    """
    begin = threading.Barrier(clients)

    def one(client: int) -> list[tuple[float, float, Callable[[], Tokens]]]:
        ask = connect()
        ask(prompts.of(client), tokens)
        begin.wait()
        asked = []
        for number in range(1, REQUESTS + 1):
            prompt = prompts.of(1000 * clients + 100 * number + client)
            started = time.perf_counter()
            answer = ask(prompt, tokens)
            asked.append((started, time.perf_counter(), answer))
        return asked

    with ThreadPoolExecutor(clients) as pool:
        asked = list(itertools.chain(*pool.map(one, range(clients))))
    firsts, gaps = [], []
    for started, _, answer in asked:
        times = [at for at, count in answer() for _ in range(count)]
        if len(times) != tokens:
            raise SystemExit(f"expected {tokens} tokens, found {len(times)}")
        firsts.append(1e3 * (times[0] - started))
        gaps += [1e3 * (later - earlier) for earlier, later in itertools.pairwise(times)]
    seconds = max(end for _, end, _ in asked) - min(start for start, _, _ in asked)
    return {
        "clients": clients,
        "tokens_per_second": len(asked) * tokens / seconds,
        "first_ms": firsts,
        "gap_ms": {str(share): quantile(gaps, share) for share in (50, 95, 99, 100)},
        "mean_gap_ms": statistics.mean(gaps),
    }


def quantile(values: list[float], percent: int) -> float:
    """Return the smallest value that at least this share of all does not exceed."""
    return sorted(values)[-(-len(values) * percent // 100) - 1]


class Http:
    """A client that reads bytes, and parses them when nothing is timed.

    Each request has a connection of its own: llama.cpp's server closes that of a stream.
    """

    def __init__(self, port: int, reuse: bool) -> None:
        """Remember a port of this machine, and whether llama.cpp may reuse beginnings of prompts."""
        self._port = port
        self._reuse = reuse

    def __call__(self, prompt: list[int], tokens: int) -> Callable[[], Tokens]:
        """Stream a completion."""
        body = {
            "prompt": prompt,
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **GREEDY,
            "cache_prompt": self._reuse,
        }
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
        )
        response = connection.getresponse()
        if response.status != 200:
            raise SystemExit(f"{response.status}: {response.read()!r}")
        found = []
        while data := response.read1():
            found.append((time.perf_counter(), data))
        connection.close()
        return lambda: counted(found, tokens)


GREEDY = {"temperature": 0, "top_k": 1}
"""Options of requests: greedy for both servers."""


def counted(found: list[tuple[float, bytes]], tokens: int) -> Tokens:
    """Yield the tokens of an event stream: one for each event with text, and the rest of `usage` at the end.

    A token that completes no character gives no event.
    """
    lines = b"".join(data for _, data in found).split(b"\n")
    ends = list(itertools.accumulate(len(data) for _, data in found))
    position, seen, chunk, usage = 0, 0, 0, 0
    for line in lines:
        position += len(line) + 1
        while chunk < len(ends) - 1 and ends[chunk] < position:
            chunk += 1
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            usage = (event.get("usage") or {}).get("completion_tokens", usage)
            if any(choice["text"] for choice in event["choices"]):
                seen += 1
                yield found[chunk][0], 1
    if usage != tokens:
        raise SystemExit(f"expected {tokens} tokens, found {usage}")
    yield found[-1][0], usage - seen


def http_client(
    target: str, slots: int, reuse: bool
) -> tuple[Callable[[], Ask], Callable[[], None]]:
    """Return how to make a client of a server at PORT:PID, and a function that closes nothing."""
    del slots  # the server has them
    port = int(target.partition(":")[0])
    return lambda: Http(port, reuse), lambda: None


def engine_client(
    bundle_path: str, slots: int, reuse: bool
) -> tuple[Callable[[], Ask], Callable[[], None]]:
    """Return how to make a client of prejit's engine, and how to close it."""
    from prejit.runtime import load  # OpenVINO's environment has no prejit
    from prejit.server import Engine

    bundle = load(bundle_path, on_mismatch="error")
    engine = Engine(bundle, slots=slots, prefix_memory=None if reuse else 0)

    def ask(prompt: list[int], tokens: int) -> Callable[[], Tokens]:
        found = []
        options: dict[str, Any] = {"max_new_tokens": tokens, "stop_token_ids": ()}
        for piece in engine.stream(prompt, **options):
            found.append((time.perf_counter(), int(piece.token_id is not None)))
        return lambda: iter(found)

    return lambda: ask, engine.close


def openvino_client(
    path: str, slots: int, reuse: bool
) -> tuple[Callable[[], Ask], Callable[[], None]]:
    """Return how to make a client of OpenVINO's continuous batching, and how to close it."""
    import numpy as np
    import openvino
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.max_num_seqs = slots
    scheduler.enable_prefix_caching = reuse
    options = {
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": workload.threads(),
        "KV_CACHE_PRECISION": "f32",
        "CACHE_DIR": f"{path}-cache-batching",
    }
    pipeline = genai.ContinuousBatchingPipeline(path, scheduler, "CPU", options)
    changed = threading.Condition()
    running: dict[int, tuple[Any, SimpleQueue[tuple[float, int]]]] = {}
    numbers = itertools.count()
    ends = [False]

    def drive() -> None:
        while True:
            with changed:
                changed.wait_for(lambda: running or ends[0])
                if ends[0]:
                    return
            pipeline.step()
            now = time.perf_counter()
            with changed:
                asked = list(running.items())
            for number, (handle, arrived) in asked:
                while handle.can_read():
                    for output in handle.read().values():
                        arrived.put((now, len(output.generated_ids)))
                if handle.get_status() != genai.GenerationStatus.RUNNING:
                    with changed:
                        del running[number]
                    arrived.put((now, 0))

    thread = threading.Thread(target=drive)
    thread.start()

    def ask(prompt: list[int], tokens: int) -> Callable[[], Tokens]:
        config = genai.GenerationConfig(
            max_new_tokens=tokens, ignore_eos=True, do_sample=False, apply_chat_template=False
        )
        given = openvino.Tensor(np.array([prompt], np.int64))
        arrived: SimpleQueue[tuple[float, int]] = SimpleQueue()
        with changed:
            number = next(numbers)
            running[number] = pipeline.add_request(number, given, config), arrived
            changed.notify()
        found = []
        while (item := arrived.get())[1]:
            found.append((time.perf_counter(), item[1]))
        return lambda: iter(found)

    def close() -> None:
        with changed:
            ends[0] = True
            changed.notify()
        thread.join()

    return lambda: ask, close


def memory_bytes(process: str) -> int:
    """Return the largest resident memory that a process has had, pages of mapped files included."""
    with open(f"/proc/{process}/status", encoding="ascii") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM:"))


def cpu_seconds(process: str) -> float:
    """Return the CPU time that all threads of a process have taken."""
    with open(f"/proc/{process}/stat", encoding="ascii") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main(way: str, target: str, lengths: str, *sizes: str) -> None:
    """Ask with each number of clients, and print what they found."""
    vocabulary, tokens, *counts = map(int, sizes)
    prompts = Prompts.read(lengths, vocabulary)
    make = {"http": http_client, "engine": engine_client, "openvino": openvino_client}[way]
    connect, close = make(target, max(counts), bool(prompts.shared))
    process = target.rpartition(":")[2] if way == "http" else "self"
    for clients in counts:
        before = cpu_seconds(process)
        found = ask_all(clients, prompts, tokens, connect)
        spent = cpu_seconds(process) - before
        asked = clients * (REQUESTS + 1) * tokens
        facts = {"cpu_ms_per_token": 1e3 * spent / asked, "memory": memory_bytes(process)}
        print(json.dumps({**found, **facts}), flush=True)
    close()


if __name__ == "__main__":
    main(*sys.argv[1:])
