"""No policy of the machine or of the environment applies, and channels have a state of each test's own."""

import pytest

from prejit.runtime.base import process_facts


@pytest.fixture(autouse=True)
def no_other_policies(tmp_path, monkeypatch):
    monkeypatch.delenv("PREJIT_TRUST", raising=False)
    monkeypatch.setattr(process_facts, "SYSTEM_POLICY", tmp_path / "system.toml")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
