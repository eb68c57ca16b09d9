"""A build fails as a whole, and replaces a bundle only where it is not whole."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from tests.layouts import blobs_of, index_file

from prejit.compiler.compile.pool import WorkerPool
from prejit.compiler.manifest.manifest import Manifest, Program
from prejit.compiler.pipeline.build_interface import BuildOptions
from prejit.compiler.pipeline.build_run import build
from prejit.compiler.pipeline.pack.bundle_writing import is_current, write
from prejit.compiler.pipeline.pack.contents import PackedBundle
from prejit.compiler.progress import Quiet
from prejit.compiler.store.directory_store import DirectoryStore
from prejit.runtime import load
from prejit.runtime.errors import BuildError

from .held_executor import HeldExecutor


def test_a_build_whose_programs_fail_names_them_all_and_writes_nothing(tmp_path):
    sizes = {"a": 2, "b": 3}  # equal programs would be one job
    programs = [Program(name, fn=abs, args=[f"float32[{n}]"]) for name, n in sizes.items()]

    def refuse(job, future):
        future.set_exception(BuildError(f"{job.program}: no compiler", hint="install one"))

    executor = HeldExecutor(refuse)
    store = DirectoryStore.open(tmp_path / "store")
    options = BuildOptions(store=store, executor=executor, progress=Quiet())
    manifest = Manifest("two", programs=programs, targets=["cpu-host"])
    with pytest.raises(BuildError) as caught:
        build(manifest, tmp_path / "out", options)
    said = "2 of 2 programs did not compile\n  a: no compiler\n  b: no compiler"
    assert (str(caught.value), caught.value.hint) == (said, "install one")
    assert [job.program for job, _ in executor.taken] == ["a", "b"]
    assert executor.closed
    assert not (tmp_path / "out").exists()


def test_a_bundle_is_written_unless_it_is_current(tmp_path):
    store = DirectoryStore.open(tmp_path / "store")
    weights = {"w": np.ones(2, np.float32)}
    program = Program("f", fn=lambda p, x: p["w"] * x, args={"x": "float32[2]"}, params=weights)
    options = BuildOptions(store=store, executor=WorkerPool(store, workers=1), progress=Quiet())
    manifest = Manifest("one", programs=[program], targets=["cpu-host"])
    built = build(manifest, tmp_path / "out", options)
    packed = PackedBundle("one", index_file(built.path).read_bytes(), blobs_of(built.path))
    path, written = write(packed, tmp_path / "copy", Quiet())
    assert (path, written) == (tmp_path / "copy" / "one", True)
    assert write(packed, built.path.parent, Quiet()) == (built.path, False)
    assert load(path).digest == built.digest
    path = Path(shutil.copytree(built.path, tmp_path / "one"))
    index = index_file(path).read_bytes()
    assert is_current(path, index)
    assert not is_current(path, index + b" ")
    assert not is_current(tmp_path / "elsewhere", index)
    files = (path / "blobs" / "sha256").iterdir()
    packs = (each for each in files if not each.read_bytes().startswith(b"{"))  # no table
    blob = max(packs, key=lambda each: each.stat().st_size)
    content = blob.read_bytes()
    blob.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert not is_current(path, index)
