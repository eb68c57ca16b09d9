"""Builds that are repeated, killed, damaged or impossible."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from prejit.runtime import PrejitError, load

from .conftest import ROOT, Run

pytestmark = pytest.mark.e2e

MANIFEST = """
[bundle]
name = "tiny"
[[program]]
name = "p"
function = "tiny_model:f"
args = { x = "float32[{n}]" }
buckets = { n = [1, 2, 3, 4, 5, 6] }
[[target]]
name = "cpu-host"
[[target]]
name = "cpu-x86-64-v3"
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "tiny_model.py").write_text("def f(x):\n    return x * 2 + 1\n")
    (tmp_path / "tiny.toml").write_text(MANIFEST)
    return tmp_path


def build(run: Run, project: Path, **options: int) -> dict[str, object]:
    done = run(
        *("build", project / "tiny.toml", "-o", project / "out"),
        *("--cache", project / "cache", "--json"),
        **options,
    )
    [built] = json.loads(done.stdout)
    assert isinstance(built, dict)
    return built


def test_a_build_that_changes_nothing_compiles_and_writes_nothing(run: Run, project: Path) -> None:
    first, second = build(run, project), build(run, project)
    assert (first["compiled"], first["written"]) == (12, True)
    assert (second["compiled"], second["cached"], second["written"]) == (0, 12, False)
    assert first["digest"] == second["digest"]
    plan = run("plan", project / "tiny.toml", "--cache", project / "cache", "--json")
    assert json.loads(plan.stdout)["to_compile"] == 0


def test_a_change_compiles_what_it_touches_and_the_plan_says_why(run: Run, project: Path) -> None:
    build(run, project)
    (project / "tiny_model.py").write_text("def f(x):\n    return x * 3 + 1\n")
    plan = run("plan", project / "tiny.toml", "--cache", project / "cache", status=8)
    assert "stablehlo: sha256:" in plan.stdout
    wider = MANIFEST.replace("5, 6]", "5, 6, 7]")
    (project / "tiny.toml").write_text(wider)
    (project / "tiny_model.py").write_text("def f(x):\n    return x * 2 + 1\n")
    assert build(run, project)["compiled"] == 2


def test_keys_do_not_depend_on_the_directory(run: Run, project: Path, tmp_path: Path) -> None:
    build(run, project)
    elsewhere = tmp_path / "else" / "where"
    elsewhere.mkdir(parents=True)
    for name in ("tiny_model.py", "tiny.toml"):
        shutil.copy(project / name, elsewhere / name)
    shutil.copytree(project / "cache", elsewhere / "cache")
    assert build(run, elsewhere)["compiled"] == 0


def test_a_damaged_bundle_and_a_damaged_cache_are_mended_by_the_next_build(
    run: Run, project: Path
) -> None:
    digest = build(run, project)["digest"]
    for directory in (project / "out" / "tiny", project / "cache"):
        for blob in directory.rglob("blobs/sha256/*"):
            content = bytearray(blob.read_bytes())
            content[len(content) // 2] ^= 1
            blob.write_bytes(content)
    run("verify", project / "out" / "tiny", status=4)
    built = build(run, project)
    assert built["written"]
    run("verify", project / "out" / "tiny")
    assert isinstance(digest, str)


def test_a_build_killed_at_any_moment_leaves_no_bundle_that_opens_wrongly(
    run: Run, project: Path
) -> None:
    build(run, project)  # warms the cache, so that kills fall on packing and writing too
    shutil.rmtree(project / "out")
    command = [sys.executable, "-m", "prejit.runtime", "build", str(project / "tiny.toml")]
    command += ["-o", str(project / "out"), "--cache", str(project / "cache")]
    pick = random.Random(0)
    opened = 0
    for _ in range(12):
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
        time.sleep(pick.uniform(0.5, 3.0))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        try:
            load(project / "out" / "tiny").call("p", x=_ones(3))
            opened += 1
        except PrejitError:
            pass
        shutil.rmtree(project / "out", ignore_errors=True)
    assert build(run, project)["compiled"] == 0
    assert load(project / "out" / "tiny").call("p", x=_ones(3)).tolist() == [3, 3, 3]


def test_a_full_disk_is_told_and_loses_nothing(run: Run, project: Path) -> None:
    digest = build(run, project)["digest"]
    (project / "tiny_model.py").write_text("def f(x):\n    return x * 5\n")
    script = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "from prejit.runtime.__main__ main\n"
    )
    script = (
        script.replace("__main__ main", "__main__ import main") + "sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", script, "build", str(project / "tiny.toml")]
    command += ["-o", str(project / "out"), "--cache", str(project / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 6, done.stderr
    assert "error[store]" in done.stderr
    assert load(project / "out" / "tiny").digest == digest


def test_unknown_targets_and_manifests_are_usage_errors(run: Run, project: Path) -> None:
    wrong = run("build", project / "tiny.toml", "--target", "cpu-x86-64-v9", status=2)
    assert "cpu-x86-64-v" in wrong.stderr
    assert "error[store]" in run("build", project / "missing.toml", status=6).stderr
    assert run("build", status=2).stderr
    assert run("plan", "--nonsense", status=2).stderr


def test_the_demo_is_built_once_and_fits_this_machine(run: Run, demo: Path) -> None:
    options = ("-o", demo.parent, "--skip-unbuildable", "--json")
    again = run("build", ROOT / "manifests" / "demo.toml", *options)
    [built] = json.loads(again.stdout)
    assert (built["compiled"], built["written"]) == (0, False)
    explained = json.loads(run("explain", demo, "--json").stdout)
    assert explained["target"] == "cpu-host"
    assert "cpu-host" in [verdict["target"] for verdict in explained["verdicts"]]


def _ones(count: int) -> object:
    import numpy as np

    return np.ones(count, np.float32)
