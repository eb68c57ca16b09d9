"""A server under mixed load for a while: every request has its answer, and nothing is left behind."""

import asyncio
import contextlib
import itertools
import json
import os
import random
import threading
import time
from collections import Counter
from concurrent.futures import CancelledError

import httpx
import numpy as np
import pytest
from tests.integration.test_serve import Process
from tests.threads import in_threads
from tests.waiting import wait_for

from prejit.runtime import load
from prejit.runtime.errors import DeadlineError, QueueFullError
from prejit.server.engine.engine import Engine

from . import serving
from .campaign import check, facts, machine_facts, setting, write_figures
from .serving import MIB, Client, Tally, Watcher, metric

SECONDS = setting("SOAK_SECONDS", 4)
pytestmark = [pytest.mark.timeout(900 + 4 * SECONDS), pytest.mark.thorough]
WHOLE_SECONDS = 180  # from this length on, the slopes are checked and the figures are written
CLIENTS = 12
SAMPLES = 300 if SECONDS >= WHOLE_SECONDS else 40
IDLE_SECONDS = 60  # how long what was abandoned may take to end: more than a request may
MAX_GROWTH_MB_PER_MINUTE = 4
THREADS = 40
"""Threads that Starlette keeps for work beside its event loop, at most; it ends them when they are idle."""


@pytest.fixture(scope="module")
def bundle(lettered_dir):
    return load(lettered_dir, on_mismatch="error")


@pytest.fixture(scope="module")
def figures():
    return facts("jax", "uvicorn", "kernel") | machine_facts()


def test_an_engine_that_threads_use_and_leave_at_random(bundle, figures):
    """Threads submit, stream, cancel, drop streams and set deadlines; then all slots are free."""
    engine = Engine(bundle, slots=3, queue=12, prefix_memory=MIB)
    outcomes, failures, texts = Counter(), [], []
    for n in range(24):
        prompt = [(place * 7 + n) % 250 for place in range(1 + n * 11 % 80)]
        options = {"max_new_tokens": 2 + n * 13 % 60, "temperature": n % 3 / 2, "seed": n}
        options["stop_token_ids"] = ()
        texts.append((prompt, options, bundle.generate(prompt, **options).token_ids))

    def use(pick):
        prompt, options, expected = pick.choice(texts)
        options = {**options, "priority": pick.randint(-1, 1), "client": pick.choice("abc")}
        way = pick.choice(["wait", "wait", "read", "cancel", "close", "drop", "late", "task"])
        if way == "wait":
            found = engine.generate(prompt, **options).token_ids
        elif way == "late":
            timeout = pick.uniform(0.0001, 0.1)
            found = engine.generate(prompt, timeout=timeout, **options).token_ids
        elif way == "cancel":
            future = engine.submit(prompt, **options)
            time.sleep(pick.uniform(0, 0.05))
            if future.cancel():
                return "cancelled"
            found = future.result().token_ids
        elif way == "task":
            asyncio.run(leave(engine.stream(prompt, **options), pick.uniform(0, 0.05)))
            return way
        else:
            stream = engine.stream(prompt, **options)
            pieces = [*itertools.islice(stream, None if way == "read" else pick.randint(0, 5))]
            if way == "close":
                stream.close()
            if way != "read":
                return way  # nobody refers to the stream any more
            found = tuple(piece.token_id for piece in pieces if piece.token_id is not None)
        assert found == expected, (way, options)
        return way

    def work(seed):
        pick = random.Random(seed)
        while time.monotonic() < until:
            try:
                outcomes[use(pick)] += 1
            except QueueFullError as error:
                outcomes["queue full"] += 1
                time.sleep(min(error.retry_after, 0.05))
            except DeadlineError:
                outcomes["deadline"] += 1
            except BaseException as error:
                failures.append(f"{type(error).__name__}: {error}")

    until = time.monotonic() + max(2.0, SECONDS / 16)
    in_threads(20, work)
    check(failures)
    assert engine.drain(IDLE_SECONDS), engine.metrics()
    found = engine.metrics()
    assert (found.running, found.waiting, found.kv_cache_usage) == (0, 0, 0.0), found
    assert sum(found.finished.values()) == sum(outcomes.values())
    # A request that makes room for another one is refused, even if nobody reads that any more.
    left = sum(outcomes[way] for way in ("cancelled", "close", "drop", "task"))
    assert 0 <= found.finished["refused"] - outcomes["queue full"] <= left
    assert found.finished["error"] == 0
    assert found.prefix_bytes <= MIB
    engine.close()
    assert not [each for each in threading.enumerate() if each.name == "prejit engine"]
    figures["engine"] = dict(sorted(outcomes.items()))


async def leave(stream, seconds):
    async def read():
        async for _ in stream:
            pass

    task = asyncio.create_task(read())
    await asyncio.sleep(seconds)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, CancelledError):
        await task


def test_a_server_under_mixed_load(bundle, lettered_dir, tmp_path, figures):
    keys, log = tmp_path / "keys", tmp_path / "requests.jsonl"
    keys.write_text("".join(f"client-{n}: {key}\n" for n, key in enumerate(serving.KEYS)))
    arguments = ("--log", log, "--keys", keys, "--queue", "32", "--timeout", "4")
    server = Process(f"decoder={lettered_dir}", *arguments)
    try:
        server.wait_until_ready()
        tally, watcher = _load(server)
        rested = _rest(server)
        process = _of_the_process(watcher.looks, rested)
        text = _metrics(server)
        assert server.end() == 0, server.said
    finally:
        server.kill()
    print(json.dumps(process))  # a failed check below must not lose what an hour measured
    assert "Traceback" not in server.said, server.said
    assert "warning" not in server.said, server.said
    check(tally.failures)
    assert tally.texts > SECONDS, tally.statuses
    entries = _entries(log)
    _check_the_log(entries, text, tally)
    for sample in tally.samples:
        _check_tokens(bundle, sample, entries[sample.id])
    figures["server"] = {
        "seconds": SECONDS,
        "clients": CLIENTS,
        "answers by status": {f"{at}": count for at, count in sorted(tally.statuses.items())},
        "left by their client": dict(sorted(tally.abandoned.items())),
        "texts": tally.texts,
        "new tokens": round(metric(text, "vllm:generation_tokens_total")),
        "texts generated again without a server, equal": len(tally.samples),
        **process,
    }
    if SECONDS >= WHOLE_SECONDS:
        figures["load average after"] = [round(each, 1) for each in os.getloadavg()]
        write_figures("serving", figures)
        slopes = process["slopes per minute after a quarter of the time"]
        assert slopes["MB"] < MAX_GROWTH_MB_PER_MINUTE, process
        assert abs(slopes["files"]) < 5, process
        assert abs(slopes["threads"]) < 5, process
    assert rested.files <= watcher.looks[0].files, process
    assert rested.threads <= watcher.looks[0].threads + THREADS, process


def _load(server):
    """Let clients send every kind of request at least once, and then at random until the time is over."""
    tally, watcher = Tally(SAMPLES), _watcher(server, max(0.25, SECONDS / 400))
    until = time.monotonic() + SECONDS
    clients = [Client(server.port, n, until, tally, pause=0.05) for n in range(CLIENTS)]
    for each in (watcher, *clients):
        each.start()
    once = Client(server.port, CLIENTS, until, tally, pause=0.0)
    for kind in serving.KINDS:
        once.send(kind)
    for each in clients:
        each.join()
    watcher.end()
    return tally, watcher


def _watcher(server, every):
    kept = "prejit_prefix_cache_bytes"
    return Watcher(server.process.pid, lambda: metric(_metrics(server), kept), every)


def _metrics(server):
    return httpx.get(f"{server.url}/metrics", timeout=serving.ANSWER_SECONDS).text


def _rest(server):
    """Wait until nothing runs and waits, and return what the process has then."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    wait_for(lambda: not any(metric(_metrics(server), name) for name in names), IDLE_SECONDS)
    time.sleep(0.5)  # connections are closed a moment later
    return _watcher(server, 1.0).look()


def _of_the_process(looks, rested):
    """Return how memory, files and threads changed after a quarter of the time, and what is left at rest."""
    later = [each for each in looks if each.seconds > SECONDS / 4]
    minutes = [each.seconds / 60 for each in later]
    seen = {
        "MB": [each.resident_bytes / MIB for each in later],
        "files": [each.files for each in later],
        "threads": [each.threads for each in later],
    }
    slopes = {name: round(float(np.polyfit(minutes, s, 1)[0]), 3) for name, s in seen.items()}
    resident = [round(at.resident_bytes / MIB) for at in (looks[0], later[0], later[-1], rested)]
    return {
        "slopes per minute after a quarter of the time": slopes,
        "resident MB at the beginning, after a quarter, at the end, at rest": resident,
        "most resident MB": round(max(each.resident_bytes for each in looks) / MIB),
        "most files, at rest": [max(each.files for each in looks), rested.files],
        "most threads, at rest": [max(each.threads for each in looks), rested.threads],
    }


def _entries(log):
    """Return the requests of a log by id: each must be there once."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    requests = [line for line in lines if line["event"] == "request"]
    found = {line["id"]: line for line in requests}
    assert len(found) == len(requests)
    return found


def _check_the_log(entries, text, tally):
    """Check that metrics, log and clients agree on how many requests there were."""

    def ended(reason):
        return metric(text, "prejit_requests_total", f'reason="{reason}"')

    calls = [call for each in entries.values() if each["status"] != 400 for call in each["calls"]]
    assert len(calls) == metric(text, "prejit_requests_total"), text
    logged = sum(bool(call["finish_reason"]) for call in calls)
    # A text may end before its server sees that the client has gone: the engine counts it, nobody has it.
    assert tally.texts <= logged <= sum(map(ended, ("stop", "length", "context", "mask")))
    assert tally.new_tokens <= metric(text, "vllm:generation_tokens_total")
    assert (ended("error"), ended("nan")) == (0, 0)


def _check_tokens(bundle, sample, entry):
    """Check that `Bundle.generate` gives the tokens that a client of the server got."""
    body = sample.body
    if "messages" in body:
        prompt = bundle.apply_chat_template(body["messages"])
    else:
        prompt = bundle.tokenizer.encode(body["prompt"])
    names = ("temperature", "top_p", "frequency_penalty", "stop")
    options = {name: body[name] for name in names if name in body}
    if body.get("ignore_eos"):
        options["stop_token_ids"] = ()
    for place, text in enumerate(sample.texts):
        seed = body["seed"] + place
        found = bundle.generate(prompt, max_new_tokens=body["max_tokens"], seed=seed, **options)
        assert found.text == text, f"{sample}: expected {found.text!r}"
        reason = "length" if found.finish_reason == "context" else found.finish_reason
        assert reason == sample.reasons[place], f"{sample}: expected {reason}"
        [logged] = [call["token_ids"] for call in entry["calls"] if call["seed"] == seed]
        assert tuple(logged) == found.token_ids, sample
