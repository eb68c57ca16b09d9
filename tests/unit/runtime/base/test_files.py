"""Files that are written whole: the next writer removes what a kill left, and nothing of the living."""

import fcntl
import os

import pytest

from prejit.runtime.base import written_files
from prejit.runtime.base.written_files import write_file


@pytest.fixture
def loose_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def test_the_next_write_removes_what_a_killed_writer_left(tmp_path):
    (tmp_path / ".file.1234.0badcafe.tmp").write_bytes(b"half")
    (tmp_path / ".other.1234.0badcafe.tmp").write_bytes(b"of another file")
    write_file(tmp_path / "file", b"whole")
    assert sorted(os.listdir(tmp_path)) == [".other.1234.0badcafe.tmp", "file"]


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


def test_a_file_has_its_permissions_when_it_gets_its_name(tmp_path, loose_umask, monkeypatch):
    def killed(directory):
        raise KeyboardInterrupt

    monkeypatch.setattr(written_files, "sync_directory", killed)
    with pytest.raises(KeyboardInterrupt):
        write_file(tmp_path / "file", b"secret", mode=0o600)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600
