"""A Ray cluster on this machine: what its nodes build is what one machine builds, whoever is killed.

The cluster has processes of its own, as a user's has; `ray` itself is never imported here.
"""

import importlib.util
import os
import subprocess
import sys

import pytest
from tests.manifests import functions_manifest
from tests.ports import free_port
from tests.quick_compiling import XLA_FLAGS
from tests.ray_cluster import ray_cluster
from tests.waiting import wait_for

pytestmark = [
    pytest.mark.thorough,  # a cluster takes 30 s of CPU time, and its parts give up on a busy machine
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None,
        reason="ray is not installed: `make test-ray` does it",
    ),
]
FUNCTIONS = 8


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with ray_cluster(tmp_path_factory.mktemp("cluster"), free_port(), free_port()) as cluster:
        cluster.wait()
        yield cluster


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    directory = tmp_path_factory.mktemp("manifest")
    names = [f"f{number}" for number in range(FUNCTIONS)]
    lines = [f"def {name}(x): return x * {number + 2}\n" for number, name in enumerate(names)]
    (directory / "cluster_functions.py").write_text("".join(lines))
    keys = 'function = "cluster_functions:%s"; args = { x = "float32[8]" }'
    programs = {name: keys % name for name in names}
    return functions_manifest(directory / "many.toml", programs, ["cpu-x86-64-v3"])


def command(manifest, machine, *more):
    base = [sys.executable, "-m", "prejit.runtime", "build", str(manifest)]
    return [*base, "--cache", str(machine / "cache"), "-o", str(machine / "artifacts"), *more]


def digest(machine):
    return (machine / "artifacts" / "many" / "index.json").read_bytes()


def started(cluster, *arguments):
    env = cluster.environ | {"RAY_ADDRESS": cluster.address, "XLA_FLAGS": XLA_FLAGS}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command(*arguments), env=env, **pipes)


def test_a_cluster_that_loses_a_node_builds_what_one_machine_builds(cluster, manifest, tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    alone = subprocess.run(
        command(manifest, here), env=os.environ | {"XLA_FLAGS": XLA_FLAGS}, capture_output=True
    )
    assert alone.returncode == 0, alone.stderr
    first = cluster.join()
    second = None
    try:
        options = ["--executor", "ray://auto", "--store", str(tmp_path / "store")]
        with started(cluster, manifest, there, *options) as build:
            nothing = "the first node compiles nothing"
            wait_for(lambda: first.compiles() or build.poll() is not None, 180, nothing)
            first.kill()
            second = cluster.join()
            lines = list(build.stderr)
            assert build.stdout.read() == "", "stdout is for data"
        assert build.returncode == 0, "".join(lines)
    finally:
        for each in filter(None, (first, second)):
            each.kill()
    compiled = [line for line in lines if line.startswith("compiled")]
    assert len(compiled) == FUNCTIONS, "".join(lines)
    assert all(" on " in line for line in compiled), "nothing was compiled by the build's machine"
    assert digest(there) == digest(here)
