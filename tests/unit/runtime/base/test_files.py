"""Files that are written whole: the next writer removes what a kill left, and nothing of the living."""

import fcntl
import os

import pytest

from prejit.runtime.base import written_files
from prejit.runtime.base.written_files import write_file
from prejit.runtime.errors import StoreError


def test_a_file_is_replaced_whole_and_nothing_beside_it(tmp_path):
    """What a killed writer left goes; a link is not written through."""
    path, other = tmp_path / "file", tmp_path / ".other.1234.0badcafe.tmp"
    (tmp_path / ".file.1234.0badcafe.tmp").write_bytes(b"half")
    other.write_bytes(b"second" * 1_000_000)
    path.symlink_to(other)
    for content in (b"first", other):
        write_file(path, content)
        assert not path.is_symlink()
    assert path.read_bytes() == other.read_bytes() == b"second" * 1_000_000
    (tmp_path / "directory").mkdir()
    for where in ("missing/file", "file/below", "directory"):
        with pytest.raises(StoreError, match="cannot write"):
            write_file(tmp_path / where, b"content")
    assert sorted(os.listdir(tmp_path)) == [other.name, "directory", "file"]


def test_files_of_a_living_writer_stay(tmp_path, monkeypatch):
    path, replace = tmp_path / "file", os.replace
    writers = []

    def replace_after_another_writer(old, new):
        if not writers:
            writers.append(old)
            write_file(path, b"of the other")
        replace(old, new)

    monkeypatch.setattr(written_files.os, "replace", replace_after_another_writer)
    write_file(path, b"of the first")
    assert path.read_bytes() == b"of the first"
    assert os.listdir(tmp_path) == ["file"]


def test_a_removed_file_is_made_again(tmp_path, monkeypatch):
    lock, removed = fcntl.flock, []

    def lock_after_a_removal(file, how):
        if not removed:
            [removed_file] = tmp_path.iterdir()
            removed_file.unlink()
            removed.append(removed_file)
        lock(file, how)

    monkeypatch.setattr(written_files.fcntl, "flock", lock_after_a_removal)
    write_file(tmp_path / "file", b"whole")
    assert (tmp_path / "file").read_bytes() == b"whole"
