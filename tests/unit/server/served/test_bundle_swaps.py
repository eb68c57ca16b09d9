"""A swap that fails leaves the server as it was, and nobody loses a bundle that a request still uses."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tests.unit.server.running import wait_for

from prejit.runtime.errors import AnswerError, ClosedError, RejectError, UsageError
from prejit.runtime.programs.ready_programs import ProgramReport
from prejit.server.engine.memory import NoRoomError
from prejit.server.served import bundle_swaps
from prejit.server.served.bundle_swaps import BundleSwaps
from prejit.server.served.served import ModelNotFoundError, Models, RunningRequests, Served


class StandInBundle:
    """A bundle that notes what is done with it."""

    config = SimpleNamespace(decoder=None)

    def __init__(self, digest, wrong=(), seconds=(0.0, 0.0), *, matched=True):
        self.digest, self._wrong, self.done = digest, wrong, list[str]()
        self._seconds, self.matched = seconds, matched

    def report(self):
        names = ("decode", "prefill", "copy")[: len(self._seconds)]
        return [ProgramReport(name, "", s) for name, s in zip(names, self._seconds, strict=True)]

    def finish(self):
        self.done.append("finish")

    def prepare(self, *names):
        self.done += names

    def wrong_answers(self):
        return iter(self._wrong)

    def sleep(self):
        self.done.append("sleep")

    def close(self):
        self.done.append("close")


def served(digest, name="m", path="v1", **options):
    bundle = StandInBundle(digest, **options)
    engine = SimpleNamespace(
        close=lambda: None,
        drain=lambda seconds: False,
        wake=lambda: bundle.done.append("wake"),
        begin_after=lambda earlier: None,
        sleeper=SimpleNamespace(is_sleeping=False),
    )
    return Served(name, bundle, engine, 0, path=path)


@pytest.fixture
def said(monkeypatch):
    found = []
    monkeypatch.setattr(bundle_swaps, "say", found.append)
    return found


class StandInLoads:
    """Loads one bundle, or fails. `room` is raised where a model wakes."""

    def __init__(self, found):
        self._found = found
        self.fetched, self.stalls, self.room = [], {}, None

    def fetch(self, path):
        self.fetched.append(path)
        if path in self.stalls:
            assert self.stalls[path].wait(60)
        return path

    def __call__(self, source):
        if isinstance(self._found, Exception):
            raise self._found
        assert source.path == "v2"
        return self._found

    def check_wake(self, served):
        if self.room is not None:
            raise self.room


def swapping(models, found):
    """Swaps to one bundle, or a load that fails."""
    return BundleSwaps(models, StandInLoads(found), 60)


def test_what_was_replaced_is_closed_after_the_last_request_that_may_use_it(said):
    before = served("sha256:1", seconds=(0.2, 0.0, 0.1))
    after = served("sha256:2")
    models = Models(before)
    epoch = models.running.begin()
    assert swapping(models, after).swap("m", "v2").path == "v2"
    later = models.running.begin()  # of a request to the new bundle, which keeps nothing
    assert models.get("m").bundle is after.bundle
    assert after.bundle.done == ["wake", "finish", "decode"]
    assert not models.drain()  # the engine of the bundle before has not ended
    models.undrain = lambda: True
    assert before.bundle.done == []
    models.running.end(epoch)
    wait_for(lambda: before.bundle.done == ["close"])
    models.running.end(later)
    assert "m: swapped sha256:1 for sha256:2 of v2" in said[0]
    assert dict(models.swaps) == {("m", "done"): 1}
    asleep = served("sha256:3")
    asleep.engine.sleeper.is_sleeping = True
    swapping(Models(served("sha256:1")), asleep).swap("m", "v2")
    assert asleep.bundle.done[-1] == "sleep"  # it keeps no programs after its trial


@pytest.mark.parametrize(
    "found",
    [
        RejectError("v2/index.json", "expected a digest, found none"),
        served("sha256:2", wrong=("score: expected 1, found 2",)),
    ],
)
def test_a_bundle_that_cannot_serve_leaves_the_one_before(said, found):
    before = served("sha256:1")
    models = Models(before)
    with pytest.raises((RejectError, AnswerError)):
        swapping(models, found).swap("m", "v2")
    assert models.get("m") is before
    assert before.bundle.done == []
    assert not isinstance(found, Served) or found.bundle.done[-1] == "close"
    assert dict(models.swaps) == {("m", "failed"): 1}
    assert said == []


def test_the_same_bundle_or_what_an_operator_has_swapped_meanwhile_stays(said):
    before, again = served("sha256:1"), served("sha256:1")
    models = Models(before)
    assert swapping(models, again).swap("m", "v2").bundle is before.bundle
    assert models.get("m") == replace(before, path="v2")  # which is followed from now on
    assert again.bundle.done[-1] == "close"
    assert (said, dict(models.swaps)) == ([], {})
    before, by_operator = served("sha256:1"), served("sha256:2", path="v3")
    models = Models(by_operator)
    assert swapping(models, served("sha256:4")).swap("m", "v2", only=before) is by_operator
    assert models.get("m") is by_operator
    assert (said, dict(models.swaps)) == ([], {})


def test_a_server_that_drains_or_has_no_such_model_swaps_nothing(said):
    models, loads = Models(served("sha256:1")), StandInLoads(served("sha256:2"))
    swaps = BundleSwaps(models, loads, 60)
    with pytest.raises(ModelNotFoundError, match="'other'"):
        swaps.swap("other", "v2")
    models.drain(ends=True)
    changes = (
        lambda: swaps.swap("m", "v2"),
        lambda: swaps.add("n", "v2"),
        lambda: swaps.wake("m"),
        lambda: BundleSwaps(Models(), loads, 60).swap("m", "v2"),
    )
    for change, state in zip(changes, ("draining",) * 3 + ("loading",), strict=True):
        with pytest.raises(ClosedError, match=f": the server is {state}") as caught:
            change()
        assert ("POST /undrain" in str(caught.value.hint)) == (state == "draining")
    assert loads.fetched == []


def test_a_fetch_that_stalls_holds_up_no_other_change_and_comes_too_late(said):
    before, after = served("sha256:1"), served("sha256:2")
    models = Models(before, served("sha256:3", name="other"))
    loads = StandInLoads(after)
    loads.stalls = {"slow": threading.Event()}
    swaps = BundleSwaps(models, loads, 60)
    with ThreadPoolExecutor(1) as pool:
        stalled = pool.submit(swaps.swap, "m", "slow")
        wait_for(lambda: loads.fetched == ["slow"])
        swaps.remove("other")
        assert swaps.swap("m", "v2").bundle is after.bundle
        loads.stalls["slow"].set()
    message = "m: expected no later change while slow was fetched, found sha256:2"
    with pytest.raises(UsageError, match=message):
        stalled.result()
    assert models.get("m").bundle is after.bundle
    assert models.swaps == {("m", "done"): 1, ("m", "failed"): 1}


def test_a_release_is_not_taken_for_a_model_that_was_changed_or_removed(said):
    old = served("sha256:1")
    models = Models(old)
    release, later = served("sha256:2"), served("sha256:3")
    models.put("m", later)
    swaps = swapping(models, release)
    assert swaps.load("m", "v2").bundle is release.bundle
    with pytest.raises(UsageError, match=r"m: expected sha256:1, beside which .* found sha256:3"):
        swaps.take(release, old)
    assert models.get("m") is later
    swaps.remove("m")
    with pytest.raises(ModelNotFoundError):
        swaps.take(release, later)
    assert len(models) == 0


def test_a_model_that_is_added_is_tried_first_and_one_that_is_removed_is_freed_last(said):
    before, after = served("sha256:1"), served("sha256:2", name="other", matched=False)
    models = Models(before)
    swaps = swapping(models, after)
    with pytest.raises(UsageError, match="a name that no model has, found 'm'"):
        swaps.add("m", "v2")
    assert after.bundle.done == []
    assert swaps.add("", "v2") is models.get("other")
    assert after.bundle.done == ["wake", "finish", "decode", "prefill"]
    epoch = models.running.begin()
    assert swaps.remove("m") is before
    with pytest.raises(ModelNotFoundError, match=r"\('other'\), found 'm'"):
        models.get("m")
    assert before.bundle.done == []
    models.running.end(epoch)
    wait_for(lambda: before.bundle.done == ["close"])
    swaps.remove("other")
    assert not models.is_ready  # without a model
    texts = [text.rpartition(" in ")[0] for text in said]
    ends = ["m: removed sha256:1", "other: removed sha256:2"]
    assert texts == ["other: added sha256:2 of v2", *ends]
    assert models.changes == 4


def test_a_model_that_has_no_room_or_has_the_name_of_another_leaves_nothing_behind(said):
    models = Models(served("sha256:1"))
    same = served("sha256:2")  # whose own name is that of the model
    with pytest.raises(UsageError, match="found 'm'"):
        swapping(models, same).add("", "v2")
    assert same.bundle.done[-1] == "close"
    large = served("sha256:2", name="large")
    loads = StandInLoads(large)
    loads.room = NoRoomError("large: expected 5 bytes, found 4")
    swaps = BundleSwaps(models, loads, 60)
    with pytest.raises(NoRoomError):
        swaps.add("large", "v2")
    assert large.bundle.done == ["close"]
    with pytest.raises(NoRoomError):
        swaps.wake("m")
    assert models.get("m").bundle.done == []
    assert [one.name for one in models] == ["m"]
    assert said == []


def test_an_epoch_ends_with_the_requests_that_began_before_it():
    running = RunningRequests()
    assert running.wait_for_earlier(0)
    first = [running.begin(), running.begin()]
    assert not running.wait_for_earlier(0.01)
    second = running.begin()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(running.wait_for_earlier, 60)
        for epoch in first:
            running.end(epoch)
        assert not waiting.done()
        running.end(second)
        assert waiting.result()
