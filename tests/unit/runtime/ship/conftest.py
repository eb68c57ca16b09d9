"""A store of this machine for each test, and no pauses between attempts."""

from __future__ import annotations

from pathlib import Path

import pytest

from prejit.runtime.base import process_facts
from prejit.runtime.ship import registry_client, remote_files
from prejit.runtime.ship.machine_store import BUNDLES, MachineStore


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(remote_files, "PAUSES_SECONDS", (0.0, 0.0, 0.0))
    monkeypatch.setattr(registry_client, "PAUSES_SECONDS", (0.0, 0.0, 0.0))
    monkeypatch.setattr(process_facts, "SYSTEM_POLICY", tmp_path / "system.toml")
    monkeypatch.delenv("PREJIT_TRUST", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MachineStore:
    monkeypatch.setenv(BUNDLES, str(tmp_path / "store"))
    return MachineStore(tmp_path / "store")
