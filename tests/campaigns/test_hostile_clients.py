"""Hostile clients cannot hurt a server: an honest one beside them gets its tokens, right and in time."""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress

import httpx
import pytest
from tests.integration.test_serve import Process
from tests.lettered import write_lettered

from .campaign import ROOT, facts, machine_facts, setting, write_figures
from .hostile_clients import wide_schema
from .serving import MIB, Watcher, metric

SECONDS = setting("HOSTILE_SECONDS", 5)
KINDS = os.environ.get("PREJIT_HOSTILE_KINDS", "").split()  # of hostile requests; none: all
WHOLE_SECONDS = 300  # from this length on, the figures are checked and written
IS_WHOLE = SECONDS >= WHOLE_SECONDS
CONNECTIONS = 10_000 if IS_WHOLE else 200
ALONE_SECONDS = max(2.0, SECONDS / 10)
REST_SECONDS = 90.0
"""How long the server may take to be at rest again: longer than it waits for a head."""
STEADY_LOOKS = 15
"""How many looks, a second apart, see that a server is at rest: it gives memory back every 10 seconds."""
MOST_SLOWER = 2.0  # how many times longer the 99th percentile between tokens may be than alone
SCRAPE_MS = 500.0
MOST_MEMORY = 1.1
MOST_FILES = 8
"""How many more files a server may keep: the pipes of the process that compiles grammars."""
KEYS = {"honest": "honest-key-0123456789", "hostile": "hostile-key-0123456789"}
pytestmark = pytest.mark.timeout(900 + 4 * SECONDS)


@pytest.fixture(scope="module")
def bundle_dir(make_decoder, lettered_dir, tmp_path_factory):
    """A decoder. Where the figures count, it is for eight texts, and a step takes some milliseconds."""
    if not IS_WHOLE:
        return lettered_dir
    sizes = {"n_embd": 512, "n_head": 8, "n_layer": 8}
    source = write_lettered(tmp_path_factory.mktemp("lettered") / "model", **sizes)
    return make_decoder(source, batch=(1, 8), prompt=(16, 64), context=(512,))


@pytest.mark.thorough
def test_an_honest_client_beside_hostile_ones(bundle_dir, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("".join(f"{name}: {key}\n" for name, key in KEYS.items()))
    server = Process(f"decoder={bundle_dir}", "--keys", keys, "--queue", "64", "--timeout", "60")
    figures = {**facts("jax", "uvicorn", "kernel"), **machine_facts(), "seconds": SECONDS}

    def client(kind, *options):
        module = f"tests.campaigns.{kind}_clients"
        words = [sys.executable, "-m", module, server.port, KEYS[kind], *options]
        return subprocess.Popen([*map(str, words)], cwd=ROOT, stdout=subprocess.PIPE, text=True)

    try:
        server.wait_until_ready()
        told(client("honest", 1))  # the first requests load programs
        fill_grammars(server)
        figures["honest client alone"] = alone = told(client("honest", ALONE_SECONDS))
        before = rested(server)
        watcher = Watcher(server.process.pid, lambda: 0.0, 0.25)
        watcher.start()
        hostile = client("hostile", SECONDS, CONNECTIONS, *KINDS)
        beside = told(client("honest", SECONDS))
        figures |= {
            "honest client beside the hostile ones": beside,
            "hostile clients": told(hostile),
        }
        watcher.end()
        slower = beside["ms between tokens"]["p99"] / alone["ms between tokens"]["p99"]
        rested(server)
        again = told(client("honest", 1))  # the same cache of slots as before
        after = rested(server)
        looks = (before, *watcher.looks, after)
        resident, files = [each.resident_bytes / MIB for each in looks], [x.files for x in looks]
        figures |= {
            "p99 between tokens, times of alone": round(slower, 2),
            "resident MB before, most, after": spread(resident),
            "files before, most, after": spread(files),
        }
        state = httpx.get(f"{server.url}/health/ready", timeout=60).status_code
        assert server.end() == 0, server.said
    finally:
        server.kill()
        print(json.dumps(figures, indent=1))  # a check that fails must not lose what was measured
    if IS_WHOLE and not KINDS:
        write_figures("hostile_clients", figures)
    assert "Traceback" not in server.said, server.said
    assert [alone["failed"], beside["failed"], again["failed"]] == [0, 0, 0], beside["failures"]
    assert state == 200
    assert beside["requests"] > 0
    assert after.files <= before.files + MOST_FILES
    if IS_WHOLE:
        assert slower <= MOST_SLOWER
        assert beside["ms of a scrape"]["most"] < SCRAPE_MS
        assert after.resident_bytes <= MOST_MEMORY * before.resident_bytes
        # The server closes the oldest of those without a head, so they are never all there at once.
        assert figures["hostile clients"]["connections"]["opened"] >= CONNECTIONS


def spread(values):
    return [round(each) for each in (values[0], max(values), values[-1])]


def told(process):
    output, _ = process.communicate()
    assert process.returncode == 0
    return json.loads(output)


def fill_grammars(server):
    """Let a server keep as much of grammars as it ever does: that is on purpose."""
    for number in range(20 if IS_WHOLE else 1):
        body = {"model": "decoder", "prompt": "abc", "max_tokens": 1}
        body["guided_json"] = wide_schema(number, 1000)
        headers = {"Authorization": f"Bearer {KEYS['honest']}"}
        url = f"{server.url}/v1/completions"
        answer = httpx.post(url, json=body, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text


def rested(server):
    """Wait until a server gives no more back, and return what it has then beside what it keeps of prompts."""
    until = time.monotonic() + REST_SECONDS
    looks = []
    while time.monotonic() < until:
        with suppress(httpx.TimeoutException):
            text = httpx.get(f"{server.url}/metrics", timeout=60).text
            kept = metric(text, "prejit_prefix_cache_bytes")
            looks.append(Watcher(server.process.pid, lambda kept=kept: kept, 1.0).look())
        if not IS_WHOLE:
            break
        first, last = looks[-STEADY_LOOKS:][0], looks[-1]
        has_more = first.resident_bytes > last.resident_bytes + MIB or first.files > last.files
        if len(looks) >= STEADY_LOOKS and not has_more:
            break
        time.sleep(1)
    return looks[-1]
