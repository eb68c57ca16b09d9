"""A program becomes the same executable in every worker, whatever its memory and its other targets."""

import os
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from tests.recipes import export

from prejit.compiler.compile.compile_jobs import Source
from prejit.compiler.compile.worker_process import WorkerProcess
from prejit.compiler.store.directory_store import DirectoryStore
from prejit.compiler.targets.build_host import jaxlib_version
from prejit.compiler.targets.target_table import target
from prejit.compiler.targets.toolchain import host_toolchain


def _small_loop(bits, table, at, scale):
    def body(number, state):
        total, place, seen = state
        total = total + table[0, place[0]] * scale
        return total, (place * 5 + number + at) % 128, seen ^ bits[0, place[0]]

    total, place, seen = jax.lax.fori_loop(0, 9, body, (scale, at, bits[0, :1]))
    return total + place + seen


def test_the_memory_of_a_worker_is_nothing(tmp_path, monkeypatch):
    """Long paths and variables shift all that a process has in memory."""
    if jax.__version_info__ < (0, 12):
        pytest.skip("older XLA orders arguments of such a kernel by memory that threads race for")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    shapes = [((1, 128), "uint32"), ((1, 128), "float32"), ((1,), "int32"), ((1,), "float32")]
    arguments = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in shapes]
    portable = export(_small_loop, *arguments)
    toolchain = host_toolchain(target("cpu-x86-64-v4"), {"jaxlib": jaxlib_version()})
    found = set()
    for length in (0, 300, 30000):
        store = DirectoryStore.open(tmp_path / ("x" * (length % 200)) / "store")
        program = store.put_blob(portable)
        with WorkerProcess(toolchain, store, os.environ | {"PADDING": "x" * length}) as worker:
            found.add(worker.compile(Source(program, ("cpu",)), toolchain).executable.raw_digest)
    assert len(found) == 1


def test_one_worker_serves_several_targets(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    store = DirectoryStore.open(tmp_path)
    portable = export(lambda x: jnp.tanh(x @ x), jnp.zeros((32, 32)))
    source = Source(store.put_blob(portable), ("cpu",))
    plain = replace(target("cpu-x86-64-v3"), xla_flags=("--xla_backend_optimization_level=0",))
    targets = (target("cpu-x86-64-v2"), plain)
    toolchains = [host_toolchain(each, {"jaxlib": jaxlib_version()}) for each in targets]
    alone = []
    for each in toolchains:
        with WorkerProcess(each, store, os.environ) as worker:
            alone.append(worker.compile(source, each).executable.raw_digest)
    assert len(set(alone)) == 2
    with WorkerProcess(toolchains[-1], store, os.environ) as worker:
        assert all(map(worker.serves, toolchains))
        shared = [worker.compile(source, each).executable.raw_digest for each in toolchains]
    assert shared == alone
