"""A test that hangs fails and shows where, with the settings of this project."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.extent import cases

SETTINGS = Path(__file__).parents[2] / "pyproject.toml"
IN_PYTHON = "import time\n\ndef test_hangs():\n    time.sleep(600)\n"
IN_C = "import ctypes\n\ndef test_hangs():\n    ctypes.PyDLL(None).sleep(600)\n"
"""No handler of a signal runs meanwhile, because the call keeps the interpreter's lock."""


def test_every_test_has_a_time_limit(request):
    config = request.config
    assert 0 < float(config.getini("timeout")) < float(config.getini("faulthandler_timeout"))


TIMEOUT = (IN_PYTHON, "timeout", "Timeout (>1.0s)")
FAULT = (IN_C, "faulthandler_timeout", "Timeout (0:00:01)")


@pytest.mark.parametrize(
    ("code", "limit", "shown", "workers"),
    cases([(*TIMEOUT, 1)], others=[(*FAULT, 0), (*TIMEOUT, 0), (*FAULT, 1)]),
)
def test_a_hang_ends_the_test_with_its_stack(tmp_path, code, limit, shown, workers):
    (tmp_path / "test_one.py").write_text(code)
    options = ["-c", SETTINGS, "--noconftest", "-n", str(workers), "-o", f"{limit}=1"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-p", "no:cacheprovider", tmp_path],
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert shown in said, said
    assert "in test_hangs" in said or "time.sleep(600)" in said, said
