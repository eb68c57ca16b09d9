"""Bundles ship through real servers and clients, in fresh processes. What moves them imports no jax."""

import json
import os
import sys
from pathlib import Path

import pytest
from tests.fake_registry import fake_registry
from tests.processes import ran
from tests.store_servers import KINDS, moto_as_google

from prejit.runtime.format.audit import audit
from prejit.runtime.generation.options import check_generation
from prejit.runtime.machine.kept_files import SETTLED_SECONDS

GOLDEN = Path(__file__).parents[1] / "format" / "v1"
SERVERS = {each.__name__: each for each in (*KINDS[1:], moto_as_google)}
CALL = """
import sys, numpy
from prejit.runtime import load
bundle = load(sys.argv[1])
print(bundle.call("score", x=numpy.ones((2, 16), numpy.float32)).sum())
start = bundle.start_report()
print(start.hashed_bytes, start.receipt_bytes)
"""


@pytest.fixture
def env(tmp_path):
    """A machine of its own: an empty store, and no receipts."""
    own = {"PREJIT_BUNDLES": str(tmp_path / "store")}
    return {**os.environ, **own, "PREJIT_RUNTIME_CACHE": str(tmp_path / "cache")}


def prejit(env, *words):
    """Run a command in a fresh process in which nobody can import jax. Return what it printed."""
    command = "import sys; sys.modules['jax'] = None; from prejit.runtime.__main__ import main; "
    return ran(sys.executable, "-c", f"{command}sys.exit(main())", *words, env=env).stdout


@pytest.mark.parametrize("kind", SERVERS)
def test_through_a_real_server_to_an_empty_machine(kind, tmp_path, env):
    server = SERVERS[kind](tmp_path)
    if server is None:
        pytest.skip(f"{kind} is not installed: see tests/store_servers.py")
    server.start()
    try:
        env |= server.env
        at = f"{server.url}/call" + ("" if kind == "nginx" else ":v1")
        pushed = json.loads(prejit(env, "push", GOLDEN / "call", at, "--json"))
        again = json.loads(prejit(env, "push", GOLDEN / "call", at, "--json"))
        assert again["moved_bytes"] < pushed["moved_bytes"]
        prejit(env, "pull", at)
        prejit(env, "pull", at, "--all", "-o", tmp_path / "out")
        if kind != "nginx":  # a web server lists nothing
            assert pushed["digest"] in prejit(env, "ls", f"{server.url}/call")
        if kind not in ("nginx", "docker_registry"):
            assert "no tag leads to" in prejit(env, "rm", at)
    finally:
        server.kill()
    assert audit(tmp_path / "out", check_generation).digest == pushed["digest"]
    copied = f"{at.partition(':v1')[0]}@{pushed['digest']}"  # the server is gone: the store has it
    ran(sys.executable, "-W", "ignore", "-c", CALL, copied, env=env)


def test_a_first_start_hashes_nothing_that_the_pull_has_hashed(env):
    with fake_registry() as registry:
        at = f"oci://{registry.host}/call:v1"
        prejit(env, "push", GOLDEN / "call", at)
        prejit(env, "pull", at)
        done = ran(sys.executable, "-W", "ignore", "-c", CALL, at, env=env)
    hashed, held = map(int, done.stdout.split()[-2:])
    assert (hashed, held > 0) == (0, True), SETTLED_SECONDS
