"""Environments of workers, without making one: their specifications, what is found, and the worker in one."""

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from prejit.compiler.targets import environments
from prejit.compiler.targets.environments import MARKER, Environment, EnvironmentSpec
from prejit.compiler.targets.installing import make_environment
from prejit.compiler.targets.target_classes import Target

HOST = Target("cpu-host", "cpu")
GPU = Target("cuda-h200", "cuda")
TPU = Target("tpu-v5e", "tpu")
PINNED = ("jax==0.12.0.1", "jaxlib==0.12.0.1")
WANTED = EnvironmentSpec("cpu-host", "0.12.0.1", PINNED, ("numpy<2.4",))


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("PREJIT_ENVIRONMENTS", str(tmp_path / "environments"))


def fake(wanted, python=sys.executable):
    path = environments.root() / wanted.key
    (path / "bin").mkdir(parents=True)
    (path / "bin" / "python").symlink_to(python)
    marker = {"requirements": wanted.requirements, "versions": {"jax": wanted.jax}}
    (path / MARKER).write_text(json.dumps(marker))
    return path


def test_a_pin_or_an_accelerator_gets_one_of_its_own():
    assert environments.spec_for(HOST, "0.10.2") is None
    assert environments.spec_for(replace(HOST, jax="0.10.2"), "0.10.2") is None
    new, old = "==0.12.0.1", "==0.10.2"
    plugins = [f"jax-cuda13-plugin{new}", f"jax-cuda13-pjrt{new}"]
    for target, pinned in (
        (replace(HOST, jax="0.12.0.1"), [f"jax{new}", f"jaxlib{new}"]),
        (replace(HOST, constraints=("numpy<2.4",)), [f"jax{old}", f"jaxlib{old}"]),
        (TPU, [f"jax[tpu]{old}", f"jaxlib{old}"]),
        (replace(GPU, jax="0.12.0.1"), [f"jax{new}", f"jaxlib{new}", *plugins]),
    ):
        wanted = environments.spec_for(target, "0.10.2")
        assert [text for text in wanted.requirements if "==" in text] == pinned
        assert wanted.constraints == target.constraints


def test_all_that_is_installed_decides_the_key(monkeypatch):
    others = (
        {"requirements": ("jax==0.12.0.1", "jaxlib==0.12.0")},
        {"constraints": ()},
        {"requirements": WANTED.requirements + WANTED.constraints, "constraints": ()},
    )
    keys = {WANTED.key, *(replace(WANTED, **changes).key for changes in others)}
    assert len(keys) == 4
    for same in ({"target": "another"}, {"requirements": WANTED.requirements[::-1]}):
        assert replace(WANTED, **same).key == WANTED.key
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert WANTED.key not in keys


def test_what_is_there_needs_neither_process_nor_network_and_half_of_it_is_none(monkeypatch):
    marker = (path := fake(WANTED)) / MARKER
    expected = Environment(path, path / "bin" / "python", {"jax": "0.12.0.1"})
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", None)
        assert environments.find(WANTED) == make_environment(WANTED) == expected
        assert environments.find(replace(WANTED, constraints=())) is None
    whole = marker.read_bytes()
    os.utime(marker, (0, 0))
    assert environments.find(WANTED) is not None
    assert time.time() - marker.stat().st_mtime < 60, "gc would collect it"
    for damaged in (whole[:20], b"[]"):
        marker.write_bytes(damaged)
        assert environments.find(WANTED) is None
    marker.write_bytes(whole)
    for python, found in (("/gone/python3.13", None), (sys.executable, expected)):
        (path / "bin" / "python").unlink()
        (path / "bin" / "python").symlink_to(python)
        assert environments.find(WANTED) == found
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)  # killed here
    environments.remove(path)
    assert ((path / "bin").is_dir(), environments.find(WANTED)) == (True, None)


def test_who_waited_for_a_lock_that_was_collected_locks_the_new_one(tmp_path):
    path = tmp_path / "key"
    code = """
import sys
from pathlib import Path
from prejit.compiler.targets import environments
print("started", flush=True)
with environments.locked(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""
    with environments.locked(path):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        waiting = subprocess.Popen([sys.executable, "-c", code, str(path)], **pipes)
        assert waiting.stdout.readline() == "started\n"
        time.sleep(0.2)
        environments.lock_path(path).unlink()
    with waiting:
        assert waiting.stdout.readline() == "locked\n"
        with pytest.raises(BlockingIOError), environments.locked(path, wait=False):
            pass


def test_a_worker_sees_prejit_alone_and_holds_its_environment(tmp_path):
    """It finds its own code, and stops at the first package that is missing."""
    path = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(path)], check=True)
    bare = Environment(path, path / "bin" / "python", {})
    command = [*environments.worker_command(bare), "cache", "cpu"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    options = {"stderr": subprocess.PIPE, "text": True, "env": env}
    with environments.locked(path), subprocess.Popen(command, **options) as worker:
        with pytest.raises(subprocess.TimeoutExpired):
            worker.wait(timeout=0.5)
        worker.kill()
    done = subprocess.run(command, check=False, **options)
    assert done.returncode == 1
    assert "compile/worker/__main__.py" in done.stderr
    assert "ModuleNotFoundError: No module named 'numpy'" in done.stderr
