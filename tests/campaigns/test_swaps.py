"""Swaps and canaries of a served bundle under load: no request fails, and no token is of the wrong bundle."""

import json
import shutil
import time
from dataclasses import dataclass

import httpx
import pytest
from tests.integration.test_serve import Process
from tests.lettered import write_lettered
from tests.waiting import wait_for

from .campaign import check, facts, machine_facts, setting, write_figures
from .honest_clients import KEYS, admin_client, expected, in_ms, start
from .serving import MIB, metric

SWAPS = setting("SWAPS", 3)
IS_WHOLE = SWAPS >= 20
AT_ONCE = 200 if IS_WHOLE else 16
CANARIES = 10 if IS_WHOLE else 1
PAUSE_SECONDS = 1.0
MOST_SLOWER = 2.0
"""How many times longer the 99th percentile between tokens may be than without swaps."""
MOST_MEMORY = 1.05
MOST_ROLLBACK_SECONDS = 5.0
pytestmark = pytest.mark.timeout(900 + 10 * SWAPS)


def resident_bytes(server):
    """Return the resident memory of a server at rest, without what it keeps of prompts on purpose."""
    looks = []
    until = time.monotonic() + (60 if IS_WHOLE else 0)
    while not looks or time.monotonic() < until:
        headers = {"Authorization": f"Bearer {KEYS[0]}"}
        text = httpx.get(f"{server.url}/metrics", headers=headers, timeout=60).text
        kept = metric(text, "prejit_prefix_cache_bytes")
        looks.append(metric(text, "prejit_host_memory_bytes") - kept)
        time.sleep(1 if IS_WHOLE else 0)
    return looks[-1]


@pytest.fixture(scope="module")
def versions(make_decoder, tmp_path_factory):
    """Two bundles of one name whose texts differ, and one with the texts of the first."""
    found = []
    for layers, prompts in ((2, (16,)), (1, (16,)), (2, (8, 16))):
        at = tmp_path_factory.mktemp("version")
        model = write_lettered(at / "model", n_layer=layers)
        made = make_decoder(model, batch=(1, 8), prompt=prompts, context=(64,))
        found.append(shutil.copytree(made, at / "bundle", symlinks=True))
    return found


@dataclass(frozen=True)
class Running:
    """A server of the first bundle with four keys, and a client of its admin address."""

    server: Process
    admin: httpx.Client

    def post(self, path, expected=200, **body):
        answer = self.admin.post(path, json=body)
        assert answer.status_code == expected, answer.text
        return dict(answer.json())

    def canary(self):
        return dict(self.admin.get("/canary").json()["canaries"][0])

    def wait_for(self, *stages):
        seen = []

        def is_there():
            seen.append(self.canary())
            return seen[-1]["stage"] in stages

        wait_for(is_there, 120, f"the canary does not come to {stages}")
        return seen[-1]

    def share(self, bundle):
        """Start a canary, and wait until it has its share. A busy machine may say that it is slower."""
        for _ in range(5):
            self.post("/canary", 202, bundle=str(bundle), share="99%")
            state = self.wait_for("sharing", "rolled back")
            if state["stage"] == "sharing":
                return
        raise AssertionError(state)


@pytest.fixture
def running(versions, tmp_path):
    keys, socket_path = tmp_path / "keys", tmp_path / "admin"
    keys.write_text("".join(f"k{at}: {key}\n" for at, key in enumerate(KEYS)))
    options = ("--keys", keys, "--admin", socket_path, "--queue", "256", "--timeout", "60")
    server = Process(f"m={versions[0]}", *options)
    try:
        with admin_client(socket_path) as admin:
            server.wait_until_ready()
            yield Running(server, admin)
        assert server.end() == 0, server.said
        assert "Traceback" not in server.said, server.said
    finally:
        server.kill()


def measured(figures):
    found = {**facts("jax", "kernel"), **machine_facts(), "requests at once": AT_ONCE, **figures}
    print(json.dumps(found, indent=1))
    return found


@pytest.mark.thorough
def test_no_request_fails_and_no_token_changes_while_bundles_are_swapped(versions, running):
    answers = [expected(each) for each in versions[:2]]
    assert answers[0].isdisjoint(answers[1])
    server = running.server
    alone = start(server, AT_ONCE)
    time.sleep(max(PAUSE_SECONDS, SWAPS / 5))
    alone.end()
    before = resident_bytes(server)
    beside = start(server, AT_ONCE)
    seconds = []
    for swap in range(1, SWAPS + 1):
        time.sleep(PAUSE_SECONDS)
        began = time.monotonic()
        running.post("/swap", bundle=str(versions[swap % 2]))
        seconds.append(time.monotonic() - began)
    time.sleep(PAUSE_SECONDS)
    beside.end()
    last = start(server, 8).end()
    after = resident_bytes(server)
    failures = alone.failures + beside.failures + last.failures
    wrong = (alone.texts | beside.texts) - (answers[0] | answers[1])
    figures = measured(
        {
            **{"swaps": SWAPS, "requests": beside.requests, "failed": len(failures)},
            "texts of a wrong bundle": len(wrong),
            "ms of a swap": in_ms(seconds),
            "ms between tokens, without swaps": in_ms(alone.gaps),
            "ms between tokens, with swaps": in_ms(beside.gaps),
            "resident MB before, after": [round(before / MIB), round(after / MIB)],
        }
    )
    if IS_WHOLE:
        write_figures("swaps", figures)
    check([*failures, *map(str, wrong)])
    assert {each[2] for each in alone.texts} == {each[2] for each in answers[0]}
    assert {each[2] for each in beside.texts} == {each[2] for each in answers[0] | answers[1]}
    assert {each[2] for each in last.texts} == {each[2] for each in answers[SWAPS % 2]}
    assert server.said.count("m: swapped ") == SWAPS
    if IS_WHOLE:
        assert in_ms(beside.gaps)["p99"] <= MOST_SLOWER * in_ms(alone.gaps)["p99"]
        assert after <= MOST_MEMORY * before


@pytest.mark.thorough  # unit/server/releases has each verdict, and what becomes of requests
def test_a_canary_leaves_the_others_alone_and_is_gone_within_seconds(versions, running):
    """A release of other texts is dropped, one of the same texts shares, is taken back, and then taken."""
    old, other, same = (expected(each) for each in versions)
    server = running.server
    alone = start(server, AT_ONCE)
    time.sleep(PAUSE_SECONDS)
    alone.end()
    beside = start(server, AT_ONCE)
    began = time.monotonic()
    running.post("/canary", 202, bundle=str(versions[1]), share="50%")
    dropped = running.wait_for("promoted", "rolled back")
    dropped_after = time.monotonic() - began
    taken_back = []
    for _ in range(CANARIES):
        running.share(versions[2])
        time.sleep(PAUSE_SECONDS)
        began = time.monotonic()
        state = running.post("/canary", action="abort")
        taken_back.append(time.monotonic() - began)
        assert state["stage"] == "rolled back", state
    time.sleep(PAUSE_SECONDS)
    beside.end()
    again = start(server, 8).end()
    running.share(versions[2])
    sharing = start(server, AT_ONCE)
    running.post("/canary", action="promote")
    sharing.end()
    last = start(server, 8).end()
    failures = [each for one in (alone, beside, again, sharing, last) for each in one.failures]
    seen = alone.texts | beside.texts | again.texts | sharing.texts | last.texts
    figures = measured(
        {
            **{"requests": beside.requests + sharing.requests, "failed": len(failures)},
            "texts of a wrong bundle": len(seen - old - same),
            "seconds until a release of other texts was gone": round(dropped_after, 2),
            "seconds of a rollback": [round(each, 2) for each in taken_back],
            "ms between tokens, without a canary": in_ms(alone.gaps),
            "ms between tokens, with canaries": in_ms(beside.gaps),
        }
    )
    if IS_WHOLE:
        write_figures("canaries", figures)
    check([*failures, *map(str, seen - old - same)])
    assert dropped["stage"] == "rolled back", dropped
    assert "tokens" in dropped["why"] or "programs" in dropped["why"], dropped
    assert not seen & other
    assert beside.texts & same, "no key had its share"
    assert again.texts <= old
    assert last.texts <= same
    if IS_WHOLE:
        assert max(taken_back) < MOST_ROLLBACK_SECONDS
