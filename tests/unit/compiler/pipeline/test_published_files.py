"""A file is hashed as far as it is read, and a receipt keeps its digest."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from prejit.compiler.pipeline import published_files
from prejit.compiler.pipeline.published_files import HashedFile
from prejit.runtime.base.files import digest_of
from prejit.runtime.errors import CheckpointError, StoreError
from prejit.runtime.machine import kept_files


def test_bytes_far_behind_others_are_hashed_when_their_turn_comes(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_files, "SETTLED_SECONDS", -1.0)
    monkeypatch.setattr(published_files, "_BLOCK_BYTES", 8)
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(range(100)))
    file = HashedFile(path)
    for start, end, hashed in ((0, 10, 16), (5, 9, 16), (67, 99, 16), (66, 70, 72), (99, 100, 100)):
        file.read_ahead(start, end)
        assert file.hashed_bytes == hashed
    assert not file.is_known
    assert not HashedFile(path).is_known
    assert file.digest() == digest_of(bytes(range(100)))
    known = HashedFile(path)
    assert known.is_known
    assert known.digest() == file.digest()
    outline = known.outline()
    path.write_bytes(bytes(range(1, 101)))
    assert HashedFile(path).outline() != outline


def test_threads_that_read_one_tensor_hash_its_bytes_once(tmp_path, monkeypatch):
    monkeypatch.setattr(published_files, "_BLOCK_BYTES", 4096)  # so that threads meet
    path, content = tmp_path / "model.safetensors", os.urandom(1 << 22)
    path.write_bytes(content)
    for _ in range(4):
        file = HashedFile(path)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(file.read_ahead, [0] * 4, [len(content)] * 4))
        assert file.hashed_bytes == len(content)
        assert file.digest() == digest_of(content)


def test_a_file_that_changes_has_no_digest(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_files, "SETTLED_SECONDS", -1.0)
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"one")
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    file, known = HashedFile(path), HashedFile(path)
    known.digest()
    file.read_ahead(0, 3)
    time.sleep(0.02)  # a tick of the kernel's clock
    path.write_bytes(b"two")
    os.utime(path, ns=times)

    ahead = partial(known.read_ahead, 0, 1)
    for look in (file.digest, file.check_unchanged, known.check_unchanged, ahead):
        with pytest.raises(CheckpointError, match="changed while the build read it"):
            look()
    assert not HashedFile(path).is_known
    path.unlink()
    with pytest.raises(StoreError):
        file.check_unchanged()
