"""Bad releases that pass and good ones that are stopped, by `prejit gate` and by a canary alike."""

import contextlib
import json
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from tests.integration.test_serve import Process
from tests.signers import key_table, signer, write_policy

from prejit.compiler.signing.bundle_signing import sign
from prejit.compiler.targets.target_classes import catalogue
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.machine.fleet_machines import Machine
from prejit.server.releases.gate_run import GateOptions, run_gate

from .campaign import check, facts, figures_file, machine_facts, setting, write_figures
from .honest_clients import Clients, admin_client, changed
from .releases import BAD, BASE, DEEP_BASE, GOOD, base_of, build_release

IS_WHOLE = bool(setting("RELEASES", 0))
SECONDS = 30.0 if IS_WHOLE else 0.0
_SAMPLE = ("another chat template", "other sampling", "a changed byte", "options in another order")
"""Releases that the tests judge: they have the programs of the base."""
_PROMPTS = [f"{number} name abc 12 " for number in range(6)]
_CLIENTS = 2
_PAUSE_SECONDS = 0.01
"""Clients think so long between two requests: a server that they keep busy all the time is overloaded."""
_TIMES = ("first token", "next token", "whole request")
pytestmark = pytest.mark.timeout(14_000 if IS_WHOLE else 900)


@pytest.fixture(scope="module")
def build(tmp_path_factory, build_cache, warm):
    built = {}

    def build(release):
        if release.name not in built:
            at = tmp_path_factory.mktemp("release")
            built[release.name] = build_release(warm, at, build_cache, release)
        return built[release.name]

    return build


def chosen():
    return [each for each in (*BAD, *GOOD) if IS_WHOLE or each.name in _SAMPLE]


def fleet():
    """Return the fingerprints of a fleet: this machine, and one with the CPU of 2009."""
    here = Fingerprint.current()
    old = replace(here, cpu_features=catalogue()["cpu-x86-64-v2"].cpu_features or ())
    return [Machine("new", "new.json", here), Machine("old", "old.json", old)]


def signed(build, release, at):
    """Return copies of the base, which is signed, and of a release, and a policy that wants signatures."""
    old = Path(shutil.copytree(build(BASE), at / "old"))
    new = Path(shutil.copytree(build(release), at / "new"))
    for bundle in (old, new) if release.signed else (old,):
        sign(bundle, signer("release"))
    rule = '[[rules]]\nnames = ["*"]\nkeys = ["release"]\n'
    return old, new, write_policy(at / "trust.toml", key_table("release"), rule)


def judged(build, release, at):
    with pytest.MonkeyPatch.context() as patch:
        if release.signed is None:
            old, new = build(base_of(release)), build(release)
        else:
            old, new, policy = signed(build, release, at)
            patch.setenv("PREJIT_TRUST", str(policy))
        options = GateOptions(machines=fleet(), seconds=SECONDS, groups=3 if IS_WHOLE else 1)
        return run_gate(str(old), str(new), options, lambda _: None)


@pytest.mark.thorough  # unit/server/releases has each check, test_deploy.py a gate that stops one
def test_the_gate_stops_bad_releases_and_lets_good_ones_pass(build, tmp_path):
    before, began = machine_facts(), time.monotonic()
    rows, wrong = [], []
    for number, release in enumerate(chosen()):
        at = tmp_path / str(number)
        at.mkdir()
        verdict = judged(build, release, at)
        failed = [each.name for each in verdict.failed]
        row = {"release": release.name, "failed": failed, "seconds": round(verdict.seconds, 1)}
        row |= {at.name: at.why for at in verdict.checks if at.name in ("CPU time", "start")}
        print(json.dumps(row), flush=True)
        rows.append(row)
        if not ({*failed} & {*release.checks} if release.checks else not failed):
            wrong.append(f"{release.name}: expected {release.checks}, found {verdict.failed}")
    if IS_WHOLE:
        figures = {
            **facts("jax", "kernel"),
            **before,
            **{"bad": len(BAD), "good": len(GOOD)},
            "gate: bad that passed, or good that were stopped": len(wrong),
            "gate: minutes": round((time.monotonic() - began) / 60, 1),
            "gate": rows,
        }
        write_figures("releases", figures)
    check(wrong)


class Live:
    """A server that serves the base, and clients that never stop asking."""

    def __init__(self, base, at, **environment):
        self._base = base
        self.server = Process(f"m={base}", "--admin", at / "admin", **environment)
        self.server.wait_until_ready()
        self._admin = admin_client(at / "admin")
        more = {"pause": _PAUSE_SECONDS, "max_tokens": 16}
        self.clients = Clients(self.server.url, [_PROMPTS] * _CLIENTS, **more)
        self.clients.start()

    def try_release(self, bundle):
        """Return how a canary of a release ends. The base serves again after it."""
        began = time.monotonic()
        answer = self._admin.post("/canary", json={"bundle": str(bundle), "share": "50%"})
        assert answer.status_code == 202, answer.text

        while True:
            [found] = self._admin.get("/canary").json()["canaries"]
            if found["stage"] in ("promoted", "rolled back"):
                break
            assert time.monotonic() < began + 3900, found
            time.sleep(0.05)
        if found["stage"] == "promoted":
            answer = self._admin.post("/swap", json={"bundle": str(self._base)})
            assert answer.status_code == 200, answer.text
        return {**found, "seconds": round(time.monotonic() - began, 1)}

    def ends(self):
        """Return how many canaries ended in each way, by the metrics of the server."""
        text = httpx.get(f"{self.server.url}/metrics", timeout=60).text
        found = re.findall(r'^prejit_canaries_total{.*outcome="(\w+)"} (\d+)', text, re.MULTILINE)
        return {"promoted": 0, "rolled_back": 0} | {name: int(count) for name, count in found}

    def close(self):
        self.clients.end()
        self._admin.close()
        try:
            assert self.server.end() == 0, self.server.said
        finally:
            self.server.kill()


def tried(live, bundle, release, wrong):
    state = live.try_release(bundle)
    again = 0
    # In `make test` a busy machine may say that it is slower.
    while state["stage"] != "promoted" and not (IS_WHOLE or release.checks) and again < 3:
        state, again = live.try_release(bundle), again + 1
    row = {"release": release.name, "stage": state["stage"], "again": again}
    row |= {name: state[name] for name in ("sampled", "answered", "seconds", "why")}
    row |= {each["name"]: each["why"] for each in state["checks"] if each["name"] in _TIMES}
    print(json.dumps(row), flush=True)
    if state["stage"] != ("rolled back" if release.checks else "promoted"):
        wrong.append(f"{release.name}: {state['stage']}: {state['why']}")
    return row


@pytest.mark.thorough  # test_swaps.py has a canary of a real server, test_canary_runs.py each verdict
def test_a_canary_stops_bad_releases_and_promotes_good_ones(build, tmp_path):
    rows, wrong, lives = [], [], []
    for base in (BASE, DEEP_BASE):
        tries = [each for each in chosen() if each.signed is None and base_of(each) is base]
        if tries:
            bundles = [build(each) for each in (base, *tries)]
            at = tmp_path / base.name
            at.mkdir()
            with contextlib.closing(Live(bundles[0], at)) as live:
                lives.append(live)
                for release, bundle in zip(tries, bundles[1:], strict=True):
                    rows.append(tried(live, bundle, release, wrong))
                ends = live.ends()
            count = len([each for each in tries if each.checks])
            again = sum(row["again"] for row in rows)
            assert wrong or ends == {"promoted": len(tries) - count, "rolled_back": count + again}
    for release in (each for each in (*BAD, *GOOD) if IS_WHOLE and each.signed is not None):
        at = tmp_path / release.name.replace(" ", "-")
        at.mkdir()
        old, new, policy = signed(build, release, at)
        with contextlib.closing(Live(old, at, PREJIT_TRUST=str(policy))) as live:
            lives.append(live)
            rows.append(tried(live, new, release, wrong))
    failures = [each for live in lives for each in live.clients.failures]
    others = [each for live in lives for each in changed(live.clients.texts)]
    if IS_WHOLE:
        written = json.loads(figures_file("releases").read_text())
        written |= {
            "canary: date": facts()["date"],
            "canary: bad that were promoted, or good that were rolled back": len(wrong),
            "canary: requests of clients": sum(live.clients.requests for live in lives),
            "canary: failed requests": len(failures),
            "canary: changed texts of a bundle": len(others),
            "canary": rows,
        }
        write_figures("releases", written)
    check([*wrong, *failures, *others])
    for said in (live.server.said for live in lives):
        assert said.count("Traceback") == said.count("NumbersError: "), said
