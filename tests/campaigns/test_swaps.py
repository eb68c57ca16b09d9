"""Swaps of a served bundle under load: no request fails, and no token comes from the wrong bundle.

`make swaps` does 100 swaps under 200 requests at once from four keys, checks the figures and writes them to
swaps.json beside this file; `make test` does some under 16. PREJIT_SWAPS is the number.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from tests.integration.test_serve import Process
from tests.lettered import write_lettered

from .campaign import facts, setting, write_figures
from .honest_clients import KEYS, expected, start
from .hostile_clients import in_ms
from .serving import MIB, metric

SWAPS = setting("SWAPS", 3)
IS_WHOLE = SWAPS >= 20
AT_ONCE = 200 if IS_WHOLE else 16
PAUSE_SECONDS = 1.0
MOST_SLOWER = 2.0
"""How many times longer the 99th percentile between tokens may be than without swaps."""
MOST_MEMORY = 1.05
pytestmark = pytest.mark.timeout(900 + 10 * SWAPS)


def resident_bytes(server: Process) -> float:
    """Return the resident memory of a server at rest, without what it keeps of prompts on purpose."""
    looks: list[float] = []
    until = time.monotonic() + (60 if IS_WHOLE else 0)
    while not looks or time.monotonic() < until:
        headers = {"Authorization": f"Bearer {KEYS[0]}"}
        text = httpx.get(f"{server.url}/metrics", headers=headers, timeout=60).text
        kept = metric(text, "prejit_prefix_cache_bytes")
        looks.append(metric(text, "prejit_host_memory_bytes") - kept)
        time.sleep(1 if IS_WHOLE else 0)
    return looks[-1]


@pytest.fixture(scope="module")
def versions(
    make_decoder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> list[Path]:
    """Two bundles of one name, whose texts differ."""
    found = []
    for layers in (2, 1):
        at = tmp_path_factory.mktemp("version")
        made = make_decoder(
            write_lettered(at / "model", n_layer=layers), batch=(1, 8), prompt=(16,), context=(64,)
        )
        found.append(shutil.copytree(made, at / "bundle", symlinks=True))
    return found


def test_no_request_fails_and_no_token_changes_while_bundles_are_swapped(
    versions: list[Path], tmp_path: Path
) -> None:
    answers = [expected(each) for each in versions]
    assert answers[0].isdisjoint(answers[1])
    keys, socket_path = tmp_path / "keys", tmp_path / "admin"
    keys.write_text("".join(f"k{at}: {key}\n" for at, key in enumerate(KEYS)))
    server = Process(
        f"m={versions[0]}",
        "--keys",
        keys,
        "--admin",
        socket_path,
        "--queue",
        "256",
        "--timeout",
        "60",
    )
    transport = httpx.HTTPTransport(uds=str(socket_path))
    admin = httpx.Client(transport=transport, base_url="http://admin", timeout=60)
    try:
        server.wait_until_ready()
        alone = start(server, AT_ONCE)
        time.sleep(max(PAUSE_SECONDS, SWAPS / 5))
        alone.end()
        before = resident_bytes(server)
        beside = start(server, AT_ONCE)
        seconds = []
        for swap in range(1, SWAPS + 1):
            time.sleep(PAUSE_SECONDS)
            began = time.monotonic()
            answer = admin.post("/swap", json={"bundle": str(versions[swap % 2])})
            assert answer.status_code == 200, answer.text
            seconds.append(time.monotonic() - began)
        time.sleep(PAUSE_SECONDS)
        beside.end()
        last = start(server, 8).end()
        after = resident_bytes(server)
        assert server.end() == 0, server.said
    finally:
        server.kill()
        admin.close()
    figures = {
        **facts("jax", "kernel"),
        "machine": f"{os.cpu_count()} CPUs",
        "load average": [round(each, 1) for each in os.getloadavg()],
        "swaps": SWAPS,
        "requests at once": AT_ONCE,
        "requests": beside.requests,
        "failed": len(alone.failures + beside.failures + last.failures),
        "texts of a wrong bundle": len((alone.texts | beside.texts) - (answers[0] | answers[1])),
        "ms of a swap": in_ms(seconds),
        "ms between tokens, without swaps": in_ms(alone.gaps),
        "ms between tokens, with swaps": in_ms(beside.gaps),
        "resident MB before, after": [round(before / MIB), round(after / MIB)],
    }
    print(json.dumps(figures, indent=1))
    if IS_WHOLE:
        write_figures("swaps", figures)
    assert (figures["failed"], figures["texts of a wrong bundle"]) == (0, 0), beside.failures[:10]
    assert "Traceback" not in server.said, server.said
    assert {each[2] for each in alone.texts} == {each[2] for each in answers[0]}
    assert {each[2] for each in beside.texts} == {each[2] for each in answers[0] | answers[1]}
    assert {each[2] for each in last.texts} == {each[2] for each in answers[SWAPS % 2]}
    assert server.said.count("m: swapped ") == SWAPS
    if IS_WHOLE:
        assert in_ms(beside.gaps)["p99"] <= MOST_SLOWER * in_ms(alone.gaps)["p99"]
        assert after <= MOST_MEMORY * before
