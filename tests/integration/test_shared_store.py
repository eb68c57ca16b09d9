"""Machines that share a store: what one compiled no other compiles, and nothing wrong gets in."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from tests.decoders import write_random
from tests.extent import sampled
from tests.warm import WarmPython

MANIFEST = """
[bundle]
name = "decoder"
[model]
source = "model"
[generate]
batch = [1]
prompt = [4]
context = [24]
draft_tokens = 0
[[target]]
name = "cpu-host"
"""


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("manifest")
    write_random("gpt2", directory / "model")
    (directory / "decoder.toml").write_text(MANIFEST)
    return directory / "decoder.toml"


Build = Callable[..., CompletedProcess[str]]


@pytest.fixture(scope="module")
def build(warm: WarmPython, manifest: Path) -> Build:
    """`build(machine, store)`: a build on a machine, which is a directory."""

    def run(machine: Path, store: str | Path, *, plan: bool = False) -> CompletedProcess[str]:
        arguments = ["--cache", str(machine / "cache"), "--store", str(store), "--json"]
        if plan:
            return warm.prejit("plan", str(manifest), *arguments, quick=True)
        output = ["-o", str(machine / "artifacts")]
        done = warm.prejit("build", str(manifest), *output, *arguments, quick=True)
        assert done.returncode == 0, done.stderr
        return done

    return run


def counts(done: CompletedProcess[str]) -> tuple[int, int, str]:
    (built,) = json.loads(done.stdout)
    return built["compiled"], built["cached"], built["digest"]


@pytest.fixture(scope="module")
def first(build: Build, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory store with what a first machine made."""
    machine = tmp_path_factory.mktemp("first")
    assert counts(build(machine, machine / "store"))[0] > 0
    return machine


@pytest.fixture
def store(first: Path, tmp_path: Path) -> Path:
    """A copy of that store, to be damaged."""
    shutil.copytree(first / "store", tmp_path / "store")
    return tmp_path / "store"


def states(done: CompletedProcess[str]) -> set[tuple[str, str | None]]:
    return {(each["state"], each["where"]) for each in json.loads(done.stdout)["programs"]}


def test_a_second_machine_compiles_nothing_and_builds_the_same(
    build: Build, first: Path, store: Path, tmp_path: Path
) -> None:
    plan = build(tmp_path / "second", store, plan=True)
    assert states(plan) == {("cached", store.as_uri())}
    found = build(tmp_path / "second", store)
    compiled, _, digest = counts(found)
    assert compiled == 0
    assert digest == counts(build(first, first / "store"))[2]
    assert "results read" in found.stderr
    # What it took is now on this machine.
    assert states(build(tmp_path / "second", store, plan=True)) == {("cached", "local")}


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def swap(path: Path) -> None:
    others = [each for each in path.parent.iterdir() if each != path]
    path.write_bytes(others[0].read_bytes())


DAMAGES = [(kind, damage) for kind in ("ac", "cas") for damage in (truncate, swap, Path.unlink)]


@pytest.mark.parametrize(
    ("kind", "damage"), sampled(DAMAGES, lambda case: case == ("cas", truncate))
)
def test_damage_is_compiled_again_and_changes_no_byte(
    build: Build, first: Path, store: Path, tmp_path: Path, kind: str, damage: Callable[[Path], Any]
) -> None:
    for path in sorted((store / kind).iterdir())[::2]:
        damage(path)
    done = build(tmp_path / "second", store)
    assert counts(done)[2] == counts(build(first, first / "store"))[2]
    assert ("is not used" in done.stderr) == (damage is not Path.unlink)
