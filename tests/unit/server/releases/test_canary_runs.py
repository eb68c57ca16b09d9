"""A canary that takes a bad release, or shows it to everybody, is worse than none."""

import contextlib
import itertools
import time
from contextlib import closing
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from tests.unit.server.running import running, wait_for
from tests.unit.server.running import served as calling

from prejit.runtime import load
from prejit.runtime.errors import AnswerError, ClosedError, UsageError
from prejit.runtime.format.release_limits import ReleaseLimits
from prejit.server.gate.server_settings import Settings
from prejit.server.releases import canary_runs
from prejit.server.releases.canary_runs import Canaries, share_of
from prejit.server.releases.release_contents import ReleaseCheck
from prejit.server.releases.request_player import PlayedRequest
from prejit.server.served.served import CanaryShare, Models, Served, asking
from prejit.server.telemetry.requestlog import Entry, RecordedCall

TOKENS = [1, 2, 3]


def served(digest, tokens=None, seconds=(0.001,)):
    """A bundle that gives these tokens, or fails where there are none, and takes these times in turn."""
    bundle = SimpleNamespace(digest=digest, tokens=TOKENS if tokens is None else tokens)
    bundle.seconds = itertools.cycle(seconds)
    engine = SimpleNamespace(close=lambda: None, drain=lambda seconds: True, undrain=lambda: None)
    engine.sleeper = contextlib.nullcontext()
    return Served("m", bundle, engine, 0, path=digest)


class StandInPlayer:
    """Plays requests to such bundles."""

    def __init__(self, app_of, models):
        [self._served] = models

    async def play(self, line):
        bundle = self._served.bundle
        return PlayedRequest(entry(bundle.tokens), next(bundle.seconds), 0.0, b"")


def entry(tokens=TOKENS, number="1"):
    found = Entry(number, "POST", "/v1/completions", {}, 0.0, status=200 if tokens else 500)
    found.calls.append(RecordedCall("generate", "m", token_ids=tokens, finish_reason="length"))
    return found


class StandInSwaps:
    """Loads one bundle, or fails."""

    def __init__(self, models, found):
        self._models, self._found, self.dropped = models, found, list[str]()
        self.share = models.share

    def load(self, name, path):
        if isinstance(self._found, Exception):
            raise self._found
        return self._found

    def take(self, after, tried_beside):
        self.drop(self._models.put(after.name, after))

    def drop(self, before):
        self.dropped.append(before.bundle.digest)


class Begun:
    """A canary that has begun, on a model that gives TOKENS."""

    def __init__(self, monkeypatch, new, *checks, shares=True):
        self.said, line = [], {"id": "own", "path": "/v1/completions", "calls": []}
        for name, stand_in in (
            *(("say", self.said.append), ("RequestPlayer", StandInPlayer)),
            ("_one_slot", contextlib.nullcontext),
            ("read_release", lambda path, digest="": SimpleNamespace(digest=path)),
            ("compare_contents", lambda old, new: (list(checks), ReleaseLimits())),
            ("own_requests", lambda served, seed: [line]),
        ):
            monkeypatch.setattr(canary_runs, name, stand_in)
        self.old = served("old")
        self.models = Models(self.old)
        self.swaps = StandInSwaps(self.models, new)
        self.canaries = Canaries(self.models, self.swaps, lambda *_: None, None)
        self.start(shares)

    def start(self, shares=True):
        self.canaries.start("m", "new", 0.5)
        if shares:
            self.wait_for_stage("sharing")

    def wait_for_stage(self, *stages):
        wait_for(lambda: self.canaries.states()[0].stage in stages)
        return self.canaries.states()[0]

    def finish(self, count=0):
        """Let clients send requests until both bundles have answered so many; return the end."""
        for number in range(10 * count):
            [state] = self.canaries.states()
            if state.is_over or state.sampled >= count:
                break
            self.sent = number + 1
            asking.set(str(number))
            self.canaries.end(entry(number=str(number)))
            time.sleep(0.002)
        return self.wait_for_stage("promoted", "rolled back")


def test_a_release_that_gives_the_same_is_promoted(monkeypatch):
    new = served("new")
    begun = Begun(monkeypatch, new)
    assert begun.canaries.tap() is begun.canaries
    state = begun.finish(500)
    assert state.stage == "promoted", state
    assert state.sampled >= 50
    assert 0 < state.answered < begun.sent
    assert begun.models.get("m") is new
    assert begun.canaries.tap() is None
    assert begun.swaps.dropped == ["old"]
    assert dict(begun.models.canary_ends) == {("m", "promoted"): 1}
    assert "canary new promoted: " in begun.said[0]


@pytest.mark.parametrize(("spread", "most"), [(2.0, True), (1.03, False)])
def test_a_busy_machine_gets_its_verdict_from_more_requests(monkeypatch, spread, most):
    monkeypatch.setattr(canary_runs, "LEAST_REQUESTS", 20)
    monkeypatch.setattr(canary_runs, "_MOST_REQUESTS", 160)
    times = tuple(0.001 * spread**step for step in (-1, 1, 1, -1, 0, 1, -1))
    state = Begun(monkeypatch, served("new", seconds=times)).finish(500)
    assert state.stage == "promoted", state
    assert (state.sampled == 160) == most, state
    assert state.why.startswith(f"{state.sampled} requests of clients gave the same")
    assert ("times vary too much to be sure that it is not slower" in state.why) == most


@pytest.mark.parametrize(
    ("new", "checks", "why"),
    [
        (served("new", [1, 2, 9]), (), "tokens: expected at most 0 %"),
        (served("new", []), (), "answers: own 1: expected status 200, found 500"),
        (AnswerError("a golden answer is wrong"), (), "wrong-answer: a golden answer is wrong"),
        (RuntimeError("no memory"), (), "RuntimeError: no memory"),
        (served("new"), (ReleaseCheck("targets", "failed", why="lost"),), "targets: lost"),
    ],
)
def test_a_bad_release_is_dropped_before_a_client_sees_it(monkeypatch, new, checks, why):
    begun = Begun(monkeypatch, new, *checks, shares=False)
    state = begun.finish()
    assert (state.stage, state.answered) == ("rolled back", 0)
    assert why in state.why
    assert begun.models.get("m") is begun.old
    assert begun.models.canaries == {}
    assert dict(begun.models.canary_ends) == {("m", "rolled_back"): 1}


def test_what_only_requests_of_clients_show_is_found_live(monkeypatch):
    new = served("new")
    begun = Begun(monkeypatch, new)
    vars(new.bundle)["tokens"] = [1, 2, 9]
    state = begun.finish(5)
    assert state.stage == "rolled back"
    assert "tokens" in state.why
    assert begun.swaps.dropped == ["new"]
    begun = Begun(monkeypatch, served("new"))
    share = begun.models.canaries["m"]
    asking.set(next(str(each) for each in range(99) if share.takes(str(each))))
    begun.canaries.end(entry([]))
    state = begun.finish()
    assert (state.stage, state.answered, state.failed) == ("rolled back", 1, 1)
    assert state.why == "answers: 1 of 1 requests failed with status 500"


def test_an_operator_decides_only_one_canary_runs_and_a_server_that_ends_ends_it(monkeypatch):
    begun = Begun(monkeypatch, served("new"))
    with pytest.raises(UsageError, match="expected no other canary of 'm', found one of new"):
        begun.canaries.start("m", "other", 0.5)
    assert begun.canaries.finish("m", "abort").why == "ended by POST /canary"
    with pytest.raises(UsageError, match="that runs, found none"):
        begun.canaries.finish("m", "promote")
    begun.start()
    assert begun.canaries.finish("m", "promote").stage == "promoted"
    begun.models.drain(ends=True)
    with pytest.raises(ClosedError, match="draining"):
        begun.canaries.start("m", "new", 0.5)
    begun = Begun(monkeypatch, served("new"))
    assert begun.canaries.close()
    assert begun.canaries.states()[0].is_over
    assert begun.said == []


def test_the_same_clients_get_the_share(monkeypatch):
    old, new = served("old"), served("new")
    models = Models(old)
    models.canaries["m"] = CanaryShare(new, 0.05)

    def takers(canary):
        return {str(each) for each in range(4000) if canary.takes(str(each))}

    taken = takers(models.canaries["m"])
    assert 150 < len(taken) < 250
    assert taken < takers(CanaryShare(new, 0.2))
    assert taken != takers(CanaryShare(served("x"), 0.05))
    for who, expected in ((next(iter(taken)), new), ("", old)):
        asking.set(who)
        assert models.get("m") is expected
    assert not CanaryShare(new, 1.0).takes("")  # nobody asks: a swap, or another thread
    assert CanaryShare(new, 1.0).takes("a")
    assert not CanaryShare(new, 0.0).takes("a")
    assert share_of("5%") == pytest.approx(0.05)
    for text in ("5", "101%", "-1%", "half"):
        with pytest.raises(UsageError, match="share: expected"):
            share_of(text)


def test_functions_are_shared_too(bundle_dir, make_recipe, tmp_path):
    x = np.ones((2, 16), np.float32)
    inputs = [{"name": "x", "datatype": "FP32", "shape": [2, 16], "data": x.tolist()}]
    with (
        load(bundle_dir) as old,
        load(make_recipe(score_scale=2.0).write(tmp_path / "new")) as new,
        closing(Models(calling(old, "m"))) as models,
        closing(calling(new, "m")) as release,
        running(models, Settings()) as server,
    ):
        found = {
            name: each.call("score", x=np.array(x, np.float32)).ravel().tolist()
            for name, each in (("old", old), ("new", new))
        }

        def answered(who, model):
            url = f"{server.url}/v2/models/{model}/infer"
            answer = httpx.post(url, json={"inputs": inputs}, headers={"X-Request-Id": who})
            data = answer.json()["outputs"][0]["data"]
            return next(name for name, values in found.items() if data == pytest.approx(values))

        everybody = [*map(str, range(12))]
        assert {answered(who, "score") for who in everybody} == {"old"}
        canary = CanaryShare(release, 0.5)
        models.share("m", canary)
        taken = {who for who in everybody if canary.takes(who)}
        assert 0 < len(taken) < len(everybody)
        for model in ("score", "m.score"):
            assert {who for who in everybody if answered(who, model) == "new"} == taken
        models.share("m", None)
        assert {answered(who, "score") for who in everybody} == {"old"}
