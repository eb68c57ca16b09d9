"""Recorded bundles whose files are a few words: jax never sees them."""

import hashlib

import pytest

from prejit.compiler.pipeline.pack.bundle_files import assemble, check_readable
from prejit.compiler.pipeline.pack.bundle_writing import write_layout
from prejit.compiler.recording.jax_cache_packing import RecordedFile, RecordedTarget, packed
from prejit.runtime.base.files import digest_of
from prejit.runtime.format.bundle_schema import RecordedProgram, Segment
from prejit.runtime.machine.fingerprint import Fingerprint, Requirement

FILES = {
    name: f"{name}-{hashlib.sha256(name.encode()).hexdigest()}-cache"
    for name in ("jit_score", "jit_scale")
}


def content_of(name):
    return f"what jax would keep of {name}".encode() * 100


def recorded_file(name):
    import zstandard

    raw = content_of(name)
    frame = zstandard.ZstdCompressor(write_checksum=True).compress(raw)
    segment = Segment(0, len(frame), digest_of(frame), len(raw), digest_of(raw))
    return RecordedFile(RecordedProgram(name, FILES[name], segment, {}, {}), frame)


@pytest.fixture
def write_recorded(tmp_path):

    def write(jaxlib=None, names=("jit_score", "jit_scale")):
        here = Fingerprint.current()
        needs = Requirement("cpu", here.architecture, here.cpu_features, jaxlib or here.jaxlib)
        programs = {FILES[name]: recorded_file(name) for name in names}
        target = RecordedTarget(needs, {"jax": "1"}, programs)
        index, blobs = assemble("serve", [packed(target, "serve")])
        check_readable(index, blobs)
        write_layout(tmp_path / "serve", index, blobs)
        return tmp_path / "serve"

    return write
