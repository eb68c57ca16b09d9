"""A sample of `make fuzz`: hostile bundles through the full loader, each in a child process."""

import json
import os
import sys
from pathlib import Path

import pytest
from tests.processes import ran

pytest.importorskip("cryptography", reason="cryptography comes with the extra trust")

from tests.campaigns.loads import BY_CODE, sign_all

ROOT = Path(__file__).parents[2]
EXAMPLES = 30


def test_hostile_bundles_end_no_process_nor_answer_wrongly(bundle_dir, kernel_recipe, tmp_path):
    bundles = [bundle_dir, kernel_recipe.write(tmp_path / "kernels")]
    policy = tmp_path / "trust.toml"
    sign_all(bundles, policy)
    command = [sys.executable, "-m", "tests.campaigns.loads", "--policy", str(policy), "--bundles"]
    env = {**os.environ, "PREJIT_LOADS_EXAMPLES": str(EXAMPLES)}
    done = ran(*command, *bundles, cwd=ROOT, env=env)
    figures = json.loads(done.stdout)
    assert figures["bad_count"] == 0
    outcomes = [name for kind in figures["outcomes"].values() for name in kind]
    assert {"RejectError", "right"} <= set(outcomes)
    assert figures["policy"]["UntrustedError"] > EXAMPLES / 4
    assert BY_CODE in figures
