"""A build replaces an older bundle of its own name, and nothing else."""

import shutil

import pytest
from tests.layouts import GOLDEN

from prejit.compiler import build
from prejit.compiler.manifest.manifest import Manifest, Program
from prejit.compiler.pipeline.layout_writing import write_layout
from prejit.compiler.pipeline.pack.bundle_files import assemble
from prejit.compiler.pipeline.pack.bundle_writing import check_place
from prejit.compiler.recording.jax_cache_packing import RecordedTarget, packed
from prejit.runtime.errors import UsageError
from prejit.runtime.machine.fingerprint import Requirement

NAME = "chunks"


def built(path):
    shutil.copytree(GOLDEN / NAME, path)


def recorded(path):
    target = RecordedTarget(Requirement("cpu", "x86_64", (), "1.2.3"), {}, {})
    write_layout(path, *assemble(NAME, [packed(target, NAME)]))


def foreign(path):
    built(path)
    (path / "index.json").write_text('{"schemaVersion": 2, "manifests": []}')


def contents(path):
    return {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}


@pytest.mark.parametrize(
    ("put", "name", "found"),
    [
        (built, "other", f"the bundle {NAME!r}"),
        (recorded, NAME, "a recording of `prejit record`"),
        (foreign, NAME, "what another tool wrote"),
    ],
)
def test_what_no_build_wrote_stays(put, name, found, tmp_path):
    put(tmp_path / name)
    before = contents(tmp_path)
    programs = [Program("p", fn=abs, args=["float32[3]"])]
    manifest = Manifest(name, programs=programs, targets=["cpu-host"])
    with pytest.raises(UsageError, match=f"{name}: expected no bundle .*found {found}") as raised:
        build(manifest, tmp_path, cache=tmp_path.with_name("cache"), quiet=True)
    assert "-o DIR" in raised.value.hint
    assert contents(tmp_path) == before


def test_an_older_bundle_may_be_replaced(tmp_path):
    check_place(NAME, tmp_path)
    built(tmp_path / NAME)
    check_place(NAME, tmp_path)
    for damaged in ("", '{"manifests": [', '{"manifests": [1]}'):
        (tmp_path / NAME / "index.json").write_text(damaged)
        check_place(NAME, tmp_path)
