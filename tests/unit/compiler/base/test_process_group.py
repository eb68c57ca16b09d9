"""One kill ends a process and what it started."""

from __future__ import annotations

import subprocess
import sys

import pytest

from prejit.compiler.base.process_group import ProcessGroup

_PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(600)"])
time.sleep(600)
"""


@pytest.fixture
def leader() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", _PARENT], stdout=subprocess.PIPE, start_new_session=True
    )


def test_a_kill_ends_what_the_process_started(leader: subprocess.Popen[bytes]) -> None:
    group = ProcessGroup(leader)
    assert leader.stdout is not None
    leader.stdout.readline()  # the child has started
    assert group.alive
    group.kill()
    assert not group.alive
    assert leader.stdout.read() == b""  # both have closed it
    group.release()
    assert leader.returncode == -9
    assert leader.stdout.closed


def test_a_second_kill_meets_nobody_else(
    leader: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the leader has been waited for, its number may be that of another process."""
    group = ProcessGroup(leader)
    group.release()
    monkeypatch.setattr("os.killpg", lambda *_: pytest.fail("killed again"))
    group.kill()
    group.release()
