"""What a compile is expected to need: what it took last, whatever happened to the store since."""

from __future__ import annotations

from pathlib import Path

import pytest

from prejit.compiler.compile.history import WORKER_BYTES, need_of, size_need
from prejit.compiler.compile.jobs import Compiled, CompileJob, Source
from prejit.compiler.store.directory_store import DirectoryStore
from prejit.compiler.store.key import Key
from prejit.compiler.targets.target_table import target
from prejit.compiler.targets.toolchain import host_toolchain
from prejit.runtime.format.bundle_schema import Memory, Segment

TOOLCHAIN = host_toolchain(target("cpu-host"), {"jax": "0.12.0", "jaxlib": "0.12.0"})


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore.open(tmp_path)


def job(store: DirectoryStore, content: bytes = b"x" * 1000) -> CompileJob:
    digest = store.put_blob(content)
    key = Key("compile", "f/cpu-host", (("program", digest),))
    return CompileJob("f", TOOLCHAIN, Source(digest, ()), key)


def compiled(store: DirectoryStore) -> str:
    """An older version of the program was compiled: 4 s, two cores, 100 MiB. Returns its executable."""
    digest = store.put_blob(b"executable")
    segment = Segment(0, 10, digest, 10, digest)
    result = Compiled(segment, (), Memory(1, 2, 3, 4), 4000, 8000, 100 << 20)
    older = Key("compile", "f/cpu-host", (("program", "an older one"),))
    store.put(older, result.to_plain(), blobs=[digest])
    return digest


def test_a_new_program_counts_by_its_size(store: DirectoryStore) -> None:
    assert need_of(store, job(store)) == size_need(1000)
    assert size_need(1 << 20).bytes > size_need(0).bytes
    assert size_need(1 << 20).seconds > size_need(0).seconds


def test_a_program_that_changed_counts_by_its_last_compile(store: DirectoryStore) -> None:
    compiled(store)
    need = need_of(store, job(store))
    assert (need.seconds, need.cores) == (4.0, 2)
    assert need.bytes == 125 * (1 << 20) + WORKER_BYTES


def test_the_time_of_a_compile_outlives_its_executable(store: DirectoryStore) -> None:
    path = store.blob_path(compiled(store))
    assert path is not None
    path.unlink()
    assert need_of(store, job(store)).seconds == 4.0


def test_a_result_of_another_prejit_counts_for_nothing(store: DirectoryStore) -> None:
    store.put(Key("compile", "f/cpu-host", (("program", "older"),)), {"seconds": "many"})
    assert need_of(store, job(store)) == size_need(1000)
