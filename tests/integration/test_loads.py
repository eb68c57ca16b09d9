"""A sample of `make fuzz`: hostile bundles through the full loader, each in a child process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="cryptography comes with the extra trust")

from tests.campaigns.loads import BY_CODE, sign_all

ROOT = Path(__file__).parents[2]
EXAMPLES = 30


def test_hostile_bundles_end_no_process_and_give_no_wrong_answer(
    bundle_dir, kernel_recipe, tmp_path
):
    bundles = [bundle_dir, kernel_recipe.write(tmp_path / "kernels")]
    policy = tmp_path / "trust.toml"
    sign_all(bundles, policy)
    command = [sys.executable, "-m", "tests.campaigns.loads", "--policy", str(policy), "--bundles"]
    done = subprocess.run(
        [*command, *map(str, bundles)],
        cwd=ROOT,
        env={**os.environ, "PREJIT_LOADS_EXAMPLES": str(EXAMPLES)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout)
    assert figures["bad_count"] == 0
    outcomes = [name for kind in figures["outcomes"].values() for name in kind]
    assert {"RejectError", "right"} <= set(outcomes)
    assert figures["policy"]["UntrustedError"] > EXAMPLES / 4
    assert BY_CODE in figures
