"""A server serves what its tag or directory leads to now, and no registry can hurt it."""

import os
import threading
import time
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.fake_registry import FakeRegistry, fake_registry
from tests.served import served
from tests.unit.server.running import wait_for

from prejit.runtime.base import process_facts
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.root import read_root
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.ship import machine_store, registry_client, repository
from prejit.runtime.ship.machine_store import BUNDLES, MachineStore
from prejit.runtime.ship.pulling import Wanted, pull
from prejit.runtime.ship.reference import Reference, parse_reference
from prejit.runtime.ship.shipping import ship
from prejit.server.engine.memory import NoRoomError
from prejit.server.served import bundle_swaps
from prejit.server.served.bundle_swaps import BundleFollowing
from prejit.server.served.served import Models

EVERY = 0.02


def priority():
    """Return that of this thread."""
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


class NotedSwaps:
    """Swaps that load nothing. `done` is the path of each, and the priority of its thread."""

    def __init__(self, models):
        self._models, self.done = models, list[tuple[str, int]]()
        self.has_room = True

    def swap(self, name, path, followed, only):
        assert self._models.get(name) is only
        self.done.append((path, priority()))
        if not self.has_room:
            raise NoRoomError("m: expected 5 bytes for its programs, found 4 left", hint="more")
        reference = parse_reference(path)
        digest = reference.digest if reference.is_remote else read_root(Layout(path)).digest
        self._models.put(name, replace(served(name, digest=digest), path=followed))


@dataclass
class Following:
    """A server that follows a tag, and a newer bundle that it does not serve."""

    registry: FakeRegistry
    at: Reference
    models: Models
    newer: Path
    said: list[str]
    swaps: NotedSwaps

    @property
    def digest(self):
        return self.models.get("m").bundle.digest

    def release(self, bundle):
        """Let the tag lead to a bundle; return its digest."""
        return ship(parse_reference(str(bundle)), self.at).digest

    def follow(self, every=EVERY):
        return closing(BundleFollowing(self.models, self.swaps, every, must_match=False))


@pytest.fixture
def following(bundle_dir, make_recipe, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(bundle_swaps, "say", said.append)
    monkeypatch.setattr(repository, "PAUSES_SECONDS", ())
    monkeypatch.setattr(registry_client, "PAUSES_SECONDS", ())
    monkeypatch.setattr(process_facts, "SYSTEM_POLICY", tmp_path / "system.toml")
    monkeypatch.setenv(BUNDLES, str(tmp_path / "store"))
    newer = make_recipe(score_scale=2.0).write(tmp_path / "newer")
    with fake_registry() as registry:
        at = parse_reference(f"oci://{registry.host}/demo:prod")
        digest = ship(parse_reference(str(bundle_dir)), at).digest
        models = Models(replace(served("m", digest=digest), path=str(at)))
        yield Following(registry, at, models, newer, said, NotedSwaps(models))


def test_a_newer_bundle_is_served_and_an_older_one_too(following, bundle_dir, monkeypatch):
    nice = set[int]()

    monkeypatch.setattr(BundleFollowing, "_go_on", lambda self, at: nice.add(priority()))
    older = following.digest
    with following.follow():
        newer = following.release(following.newer)
        wait_for(lambda: following.digest == newer)
        store = MachineStore(Path(os.environ[BUNDLES]))
        assert pull(following.at, store, Wanted(Fingerprint.current())).moved is None
        following.release(bundle_dir)  # rolled back
        wait_for(lambda: following.digest == older)
    assert following.said == []
    # What loads a bundle starts threads that generate later: they must not have the priority of transfers.
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert following.swaps.done == [(str(following.at.at(each)), own) for each in (newer, older)]
    assert nice == {19}
    following.release(following.newer)
    with following.follow(every=3600) as found:
        found.look()  # it need not wait for the interval
        wait_for(lambda: following.digest == newer)


def test_a_directory_that_becomes_another_bundle_is_served(following, bundle_dir, tmp_path):
    link = tmp_path / "current"
    link.symlink_to(bundle_dir)
    digest = following.digest
    following.models.put("m", replace(served("m", digest=digest), path=str(link)))
    with following.follow():
        link.unlink()
        wait_for(lambda: following.said)  # an operator replaces it in two steps
        assert "m: cannot follow" in following.said[0]
        link.symlink_to(following.newer)
        wait_for(lambda: following.digest != digest)
    assert [path for path, _ in following.swaps.done] == [str(link)]


def test_a_registry_that_fails_is_asked_ever_less_and_told_once(following):
    asked = []
    following.registry.fault = lambda *_: asked.append(time.monotonic()) or 500
    with following.follow():
        wait_for(lambda: len(asked) >= 5)
        pauses = [after - before for before, after in pairwise(asked)]
        assert all(pause >= EVERY * 2 ** (place + 1) for place, pause in enumerate(pauses))
        assert len(following.said) == 1
        assert "m: cannot follow oci://" in following.said[0]
        following.registry.fault = lambda method, path: None
        newer = following.release(following.newer)
        wait_for(lambda: following.digest == newer)


def test_what_a_policy_refuses_is_not_fetched(following, tmp_path, monkeypatch):
    policy = tmp_path / "trust.toml"
    policy.write_text('[[rules]]\nnames = ["other"]\nallow = "unsigned"\n')
    monkeypatch.setenv("PREJIT_TRUST", str(policy))
    following.release(following.newer)
    with following.follow():
        wait_for(lambda: following.said)
    assert "cannot follow" in following.said[0]
    assert following.registry.count("GET", "/blobs/") == 0
    assert not following.swaps.done


def test_a_disk_without_room_is_told_before_anything_is_fetched(following, monkeypatch):
    disk = SimpleNamespace(total=10**9, free=1000)
    monkeypatch.setattr(machine_store.shutil, "disk_usage", lambda path: disk)
    newer = following.release(following.newer)
    with following.follow():
        wait_for(lambda: following.said)
        assert "free bytes on its disk" in following.said[0]
        assert "found 1000" in following.said[0]
        assert following.registry.count("GET", "/blobs/") == 0
        disk.free = 10**9
        wait_for(lambda: following.digest == newer)


def test_a_bundle_without_room_is_loaded_again_only_when_there_may_be_some(following):
    swaps, models = following.swaps, following.models
    swaps.has_room = False
    newer = following.release(following.newer)
    with following.follow() as found:
        changes = (lambda: None), found.look, (lambda: models.put("x", None))
        for count, change in enumerate(changes, 1):
            change()
            wait_for(lambda count=count: len(swaps.done) == count)
            asked = following.registry.count("GET", "/manifests/")
            wait_for(lambda asked=asked: following.registry.count("GET", "/manifests/") > asked + 5)
            assert len(swaps.done) == count
        at = f"m: no room for {newer} of {following.at}: m: expected 5 bytes"
        assert [text.startswith(at) for text in following.said] == [True, True]
        swaps.has_room = True
        found.look()
        wait_for(lambda: following.digest == newer)


def test_a_server_that_ends_waits_for_no_transfer(following):
    following.registry.fault = lambda method, path: (
        "stall" if method == "GET" and "/blobs/" in path else None
    )
    following.release(following.newer)
    with following.follow():
        wait_for(lambda: following.registry.count("GET", "/blobs/"))
        began = time.monotonic()
    assert time.monotonic() - began < 10
    assert not following.swaps.done
