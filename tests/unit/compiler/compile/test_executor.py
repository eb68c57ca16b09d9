"""Jobs and results without a process: a job is compiled once, and its need is what it took last."""

from dataclasses import asdict

from tests.unit.compiler.toolchains import HOST, new

from prejit.compiler.compile.compile_jobs import Compiled, CompileJob, Source
from prejit.compiler.compile.executor import WORKER_BYTES, need_of, size_need
from prejit.compiler.store.build_cache_key import Key
from prejit.compiler.store.directory_store import DirectoryStore
from prejit.runtime.format.bundle_schema import Memory, Segment


def test_a_program_needs_what_its_last_compile_took(tmp_path):
    """Also when the executable is gone, and not where another prejit wrote the result."""
    store = DirectoryStore.open(tmp_path)
    key = Key("compile", "f", (("program", "f"),))
    job = CompileJob("f", new(HOST), Source(store.put_blob(b"x" * 1000), ()), key)
    assert need_of(store, job) == size_need(1000)
    assert size_need(1 << 20).bytes > size_need(0).bytes
    assert size_need(1 << 20).seconds > size_need(0).seconds
    digest = store.put_blob(b"executable")
    segment = Segment(0, 10, digest, 10, digest)
    result = Compiled(segment, (), Memory(1, 2, 3, 4), 4000, 8000, 100 << 20)
    older = Key("compile", "f", (("program", "an older one"),))
    store.put(older, asdict(result), blobs=[digest])
    path = store.blob_path(digest)
    path.unlink()
    need = need_of(store, job)
    assert (need.seconds, need.cores) == (4.0, 2)
    assert need.bytes == 125 * (1 << 20) + WORKER_BYTES
    store.put(older, {"seconds": "many"})
    assert need_of(store, job) == size_need(1000)
