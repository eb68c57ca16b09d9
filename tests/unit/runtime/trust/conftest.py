"""No policy of the machine or of the environment applies, and channels have a state of each test's own."""

import importlib.util

import pytest

from prejit.runtime.base import process_facts

if importlib.util.find_spec("cryptography") is None:  # it comes with the extra trust
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def no_other_policies(tmp_path, monkeypatch):
    monkeypatch.delenv("PREJIT_TRUST", raising=False)
    monkeypatch.setattr(process_facts, "SYSTEM_POLICY", tmp_path / "system.toml")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
