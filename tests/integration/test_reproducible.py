"""Equal sources give equal bytes, whatever the machine's settings are."""

import os
import sys

import pytest
from tests.manifests import functions_manifest
from tests.processes import ran

from prejit.runtime.base.files import digest_of

CODE = """
import os, sys
import jax, jax.numpy as jnp

def many(x):
    tables = {jnp.sin, jnp.cos, jnp.tanh}  # the order of a set follows PYTHONHASHSEED
    for each in sorted(tables, key=lambda f: f.__name__):
        x = each(x) @ x.T @ x
    return jnp.sort(jax.nn.softmax(x), axis=-1), jnp.cumsum(x)

def walk(x):
    return jax.lax.scan(lambda c, y: (jnp.sin(c) * y, c.sum()), x[0], x)
"""
PROGRAMS = {
    "many": 'function = "code_of_it:many"; args = { x = "float32[{n}, 64]" }; buckets = { n = [8, 64] }',
    "walk": 'function = "code_of_it:walk"; args = { x = "float32[16, 64]" }',
}
START = """
import os, sys
os.sched_setaffinity(0, {cpus})
os.umask({umask})
os.execv(sys.executable, [sys.executable, "-m", "prejit.runtime", *sys.argv[1:]])
"""


def build(directory, cpus, umask, jobs, **environ):
    """Builds in a directory of its own, and returns the digest of each file of the bundle."""
    project = directory / "project"
    project.mkdir(parents=True)
    (project / "code_of_it.py").write_text(CODE)
    functions_manifest(project / "equal.toml", PROGRAMS, ("cpu-host", "cpu-x86-64-v3"))
    for file in project.iterdir():
        os.utime(file, (86400 * umask, 86400 * umask))
    arguments = ["build", "equal.toml", "-o", str(directory / "out"), "--jobs", str(jobs)]
    own = {"HOME": str(directory), "PREJIT_CACHE": str(directory / "cache")}
    env = {**os.environ, **own, **environ}
    start = START.format(cpus=cpus, umask=umask)
    done = ran(sys.executable, "-c", start, *arguments, cwd=project, env=env)
    assert "compiled 6, cached 0" in done.stderr
    bundle = directory / "out" / "equal"
    files = [path for path in bundle.rglob("*") if path.is_file()]
    return {str(path.relative_to(bundle)): digest_of(path.read_bytes()) for path in files}


def test_one_core_and_many_give_equal_bytes_in_any_directory_home_time_and_language(tmp_path):
    cpus = os.sched_getaffinity(0)
    if len(cpus) == 1:
        pytest.skip("this machine has one core")
    one = {"PYTHONHASHSEED": "1", "TZ": "Asia/Tokyo", "LANG": "C"}
    other = {"PYTHONHASHSEED": "2", "LC_ALL": "tr_TR.UTF-8"}
    alone = build(tmp_path / "alone", {min(cpus)}, 0o077, 1, **one)
    beside = build(tmp_path / "somewhere" / "else", cpus, 0o022, 3, **other)
    assert alone == beside, "the bundle and what is attached to it"
