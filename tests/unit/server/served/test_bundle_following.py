"""A server fetches what its tag leads to beside what it serves, and no registry can hurt it."""

from __future__ import annotations

import os
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.fake_registry import FakeRegistry, fake_registry
from tests.served import served
from tests.unit.server.running import running, wait_for

from prejit.runtime.base import process_facts
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.ship import machine_store, registry_client, remote_files
from prejit.runtime.ship.machine_store import BUNDLES, MachineStore
from prejit.runtime.ship.pulling import Wanted, pull
from prejit.runtime.ship.reference import Reference, parse_reference
from prejit.runtime.ship.shipping import TransferProgress, ship
from prejit.server.gate.server_settings import Settings
from prejit.server.served import bundle_following
from prejit.server.served.bundle_following import BundleFollowing
from prejit.server.served.served import Models

EVERY = 0.02


class DiskUsage(NamedTuple):
    """What `shutil.disk_usage` returns."""

    total: int
    used: int
    free: int


@dataclass
class Following:
    """A server that follows a tag.

    Attributes:
        registry, at: where it follows which tag.
        models: what it serves.
        newer: a bundle that it does not serve.
        said: what it has told who started it.
    """

    registry: FakeRegistry
    at: Reference
    models: Models
    newer: Path
    said: list[str]

    def release(self, bundle: Path | str) -> str:
        """Let the tag lead to a bundle; return its digest."""
        return ship(parse_reference(str(bundle)), self.at).digest

    def follow(self) -> closing[BundleFollowing]:  # type: ignore[type-var]
        return closing(BundleFollowing(self.models, EVERY, must_match=False))


@pytest.fixture
def following(
    bundle_dir: Path,
    make_recipe: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Following]:
    said: list[str] = []
    monkeypatch.setattr(bundle_following, "say", said.append)
    monkeypatch.setattr(remote_files, "PAUSES_SECONDS", ())
    monkeypatch.setattr(registry_client, "PAUSES_SECONDS", ())
    monkeypatch.setattr(process_facts, "SYSTEM_POLICY", tmp_path / "system.toml")
    monkeypatch.setenv(BUNDLES, str(tmp_path / "store"))
    newer = make_recipe(score_scale=2.0).write(tmp_path / "newer")
    with fake_registry() as registry:
        at = parse_reference(f"oci://{registry.host}/demo:prod")
        digest = ship(parse_reference(str(bundle_dir)), at).digest
        models = Models(replace(served("m", digest=digest), follows=at))
        yield Following(registry, at, models, newer, said)


def test_a_newer_bundle_is_fetched_beside_what_is_served_and_a_restart_fetches_nothing(
    following: Following, bundle_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = following.models
    [one] = models
    nice = set[int]()

    def noted(self: BundleFollowing, at: TransferProgress) -> None:
        nice.add(os.getpriority(os.PRIO_PROCESS, 0))

    monkeypatch.setattr(BundleFollowing, "_go_on", noted)

    def shown(url: str) -> dict[str, str]:
        with urllib.request.urlopen(f"{url}/metrics") as response:
            families = text_string_to_metric_families(response.read().decode())
        samples = [each for family in families for each in family.samples]
        found = (each.labels for each in samples if each.name == "prejit_bundle_fetched")
        return {each["model_name"]: each["digest"] for each in found}

    with running(models, Settings()) as server, following.follow():
        assert shown(server.url) == {}
        newer = following.release(following.newer)
        wait_for(lambda: models.fetched)
        assert models.fetched == {"m": newer} == shown(server.url)
        with urllib.request.urlopen(f"{server.url}/health/ready") as response:
            assert newer in response.read().decode()
        assert one.bundle.digest != newer
        assert following.said == [f"m: fetched {following.at.at(newer)}; a restart serves it"]
        store = MachineStore(Path(os.environ[BUNDLES]))
        assert pull(following.at, store, Wanted(Fingerprint.current())).moved is None
        following.release(bundle_dir)  # rolled back
        wait_for(lambda: not models.fetched)
        assert shown(server.url) == {}
    assert nice == {19}
    assert os.getpriority(os.PRIO_PROCESS, 0) != 19


def test_a_registry_that_fails_is_asked_ever_less_and_told_once(following: Following) -> None:
    asked: list[float] = []

    def fail(method: str, path: str) -> int:
        asked.append(time.monotonic())
        return 500

    following.registry.fault = fail
    with following.follow():
        wait_for(lambda: len(asked) >= 5)
        pauses = [after - before for before, after in pairwise(asked)]
        assert all(pause >= EVERY * 2 ** (place + 1) for place, pause in enumerate(pauses))
        assert len(following.said) == 1
        assert "m: cannot follow oci://" in following.said[0]
        following.registry.fault = lambda method, path: None
        newer = following.release(following.newer)
        wait_for(lambda: following.models.fetched)
    assert following.models.fetched == {"m": newer}


def test_what_a_policy_refuses_is_not_fetched(
    following: Following, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = tmp_path / "trust.toml"
    policy.write_text('[[rules]]\nnames = ["other"]\nallow = "unsigned"\n')
    monkeypatch.setenv("PREJIT_TRUST", str(policy))
    following.release(following.newer)
    with following.follow():
        wait_for(lambda: following.said)
    assert "cannot follow" in following.said[0]
    assert following.registry.count("GET", "/blobs/") == 0
    assert not following.models.fetched


def test_a_disk_without_room_is_told_before_anything_is_fetched(
    following: Following, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [1000]
    monkeypatch.setattr(
        machine_store.shutil, "disk_usage", lambda path: DiskUsage(10**9, 10**9 - free[0], free[0])
    )
    newer = following.release(following.newer)
    with following.follow():
        wait_for(lambda: following.said)
        assert "free bytes on its disk" in following.said[0]
        assert "found 1000" in following.said[0]
        assert following.registry.count("GET", "/blobs/") == 0
        free[0] = 10**9
        wait_for(lambda: following.models.fetched)
    assert following.models.fetched == {"m": newer}


def test_a_server_that_ends_waits_for_no_transfer(following: Following) -> None:
    sent: list[str] = []

    def stall(method: str, path: str) -> str | None:
        if method == "GET" and "/blobs/" in path:
            sent.append(path)
            return "stall"
        return None

    following.registry.fault = stall
    following.release(following.newer)
    with following.follow():
        wait_for(lambda: sent)
        began = time.monotonic()
    assert time.monotonic() - began < 10
    assert not following.models.fetched
