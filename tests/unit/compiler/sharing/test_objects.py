"""Places that obstore reaches: an HTTP server and a directory, and those that do not answer."""

import io
import os
import socket
import stat
import time

import obstore
import pytest
from tests.unit.compiler.sharing.fixtures import http_store

from prejit.compiler.sharing import objects
from prejit.compiler.sharing.objects import Objects
from prejit.compiler.sharing.remote import RemoteError
from prejit.runtime.errors import UsageError
from prejit.runtime.ship.object_repository import TOKEN

AC, CAS = f"ac/{'a' * 64}", f"cas/{'b' * 64}"
LARGE = bytes(range(256)) * (40 << 10)  # 10 MiB: more than a part of a multipart upload


def test_a_file_is_on_disk_before_named(tmp_path, monkeypatch):
    """A power cut would leave a file without its bytes, which every machine then finds."""
    synced = dict[int, int]()  # by inode: the size
    fsync, place = os.fsync, Objects(tmp_path.as_uri())

    def note(descriptor):
        status = os.fstat(descriptor)
        synced[status.st_ino] = status.st_size
        assert not (tmp_path / CAS).exists() or stat.S_ISDIR(status.st_mode)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    place.write(CAS, io.BytesIO(LARGE))
    assert synced[(tmp_path / CAS).stat().st_ino] == len(LARGE)
    assert (tmp_path / "cas").stat().st_ino in synced
    with (tmp_path / "written").open("wb") as unreadable, pytest.raises(RemoteError):
        place.write(CAS, unreadable)
    assert [*(tmp_path / "temp").iterdir()] == []
    assert (tmp_path / CAS).read_bytes() == LARGE


def test_credentials_are_in_no_message_and_a_result_has_its_type(tmp_path, monkeypatch):
    seen = []
    with http_store({}, seen) as url:
        place = Objects(url.replace("//", "//me:secret@"))
        assert place.read(AC, 1) is None
        monkeypatch.setenv(TOKEN, "abc")
        assert Objects(url).read(AC, 1) is None
    assert seen == ["GET Basic bWU6c2VjcmV0", "GET Bearer abc"]
    assert "secret" not in place.name
    with pytest.raises(RemoteError) as raised:
        Objects(url.replace("//", "//me:secret@")).read(AC, 1)  # the server has ended
    assert "secret" not in str(raised.value)
    seen.clear()
    with http_store({}, seen) as url:
        place = Objects(f"{url}/team")
        place.write(AC, b"{}")
        assert any("application/json" in line for line in seen)
        assert (place.read(AC, 2), place.read(AC, 1)) == (b"{}", b"")


@pytest.mark.thorough
def test_a_server_that_does_not_answer_is_given_up_and_a_slow_network_is_not(monkeypatch):
    with pytest.raises(UsageError, match="expected the URL of a bucket or a server"):
        Objects("gopher://x/y")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        with pytest.raises(RemoteError, match=r"127\.0\.0\.1"):
            Objects(f"http://127.0.0.1:{taken.getsockname()[1]}").read(AC, 1)
    # Without the limit a build would hang. It takes the file and says nothing more, to any request.
    monkeypatch.setattr(objects, "ANSWER_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = Objects(f"http://127.0.0.1:{silent.getsockname()[1]}")
        started = time.monotonic()
        for ask, *args in (
            *((place.read, AC, 1), (place.has, AC), (place.write, AC, b"{}")),
            *((place.create, AC, b"{}"), (place.write, CAS, io.BytesIO(LARGE))),
        ):
            with pytest.raises(RemoteError, match=args[0][:5]):
                ask(*args)
        assert time.monotonic() - started < 60  # a bound against an hour
    # An executable of many megabytes takes longer to arrive than an answer may.
    monkeypatch.setattr(objects, "ANSWER_SECONDS", 2.0)  # the test's server may be slow to answer
    with http_store(files := {}, [], upload_seconds=3.0) as url:
        Objects(url).write(CAS, LARGE[: 2 << 20])
        assert len(files[f"/{CAS}"]) == 2 << 20


def test_no_hard_links(tmp_path, monkeypatch):
    """SMB and FUSE refuse what creates a file only if there is none."""
    put = obstore.put

    def refuse(*args, **options):
        if options.get("mode") == "create":
            text = "Generic LocalFileSystem error: Unable to rename file: {} (os error {})"
            raise obstore.exceptions.GenericError(text.format(os.strerror(number), number))
        return put(*args, **options)

    monkeypatch.setattr(obstore, "put", refuse)
    for number in (1, 38, 95):
        first, second = (Objects((tmp_path / str(number)).as_uri()) for _ in range(2))
        assert first.create(AC, b"first")
        assert not second.create(AC, b"second")
        assert second.remove(AC)
        assert second.create(AC, b"second")
