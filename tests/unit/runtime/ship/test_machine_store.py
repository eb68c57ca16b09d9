"""A store that this user may only read gives what it has, and one without locks gets what it lacks."""

import errno
import fcntl
import os
import tempfile
from pathlib import Path

import pytest

from prejit.runtime.base.files import digest_of
from prejit.runtime.errors import StoreError
from prejit.runtime.format.bundle_schema import Descriptor
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.ship.blob_directory import BlobDirectory
from prejit.runtime.ship.machine_store import MachineStore
from prejit.runtime.ship.pulling import Wanted, pull
from prejit.runtime.ship.reference import parse_reference

from .conftest import audited


@pytest.fixture
def at(registry):
    return parse_reference(f"oci://{registry.host}/call:v1")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_store_of_another_user_is_read(registry, at):
    import difflib  # noqa: F401 (nobody may not even read the interpreter)

    here = Fingerprint.current()
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        store = MachineStore(Path(name, "store"))
        digest = pull(at, store, Wanted(here)).digest
        named = parse_reference(f"oci://{registry.host}/call@{digest}")
        other = parse_reference(f"oci://{registry.host}/decoder:v1")
        os.setresuid(65534, 65534, 0)
        try:
            assert not os.access(store.path, os.W_OK)
            for reference in (at, named):
                found = pull(reference, store, Wanted(here))
                assert found.moved is None
            assert audited(found.path).target_count == 1
            for attempt in (
                lambda: pull(other, store, Wanted(here)),
                lambda: store.collect(0, 0),
                lambda: store.pin(digest, is_pinned=True),
            ):
                with pytest.raises(StoreError, match="Permission denied"):
                    attempt()
            assert len(store.bundles()) == 1
        finally:
            os.setresuid(0, 0, 0)


def test_a_store_without_locks_or_with_an_unreadable_bundle_loses_none(at, store, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    found = pull(at, store, Wanted(Fingerprint.current()))
    assert audited(found.path).target_count == 1
    assert pull(at, store, Wanted(Fingerprint.current())).moved is None
    with pytest.raises(StoreError, match="cannot lock it: No locks available"):
        store.collect(0, 0)
    assert len(store.bundles()) == 1
    monkeypatch.undo()
    # What a bundle needs that cannot be read stays, too.
    store.pin(found.digest, is_pinned=True)
    blobs = set((store.path / "blobs" / "sha256").iterdir())
    (found.path / "index.json").write_text("{")
    with pytest.raises(StoreError, match=r"index\.json"):
        store.collect(0, 0)
    assert set((store.path / "blobs" / "sha256").iterdir()) == blobs
    store.pin(found.digest, is_pinned=False)
    assert store.collect(0, 0).bundles == 1


def test_the_disk_needs_room_for_what_has_not_arrived(store):
    blobs = BlobDirectory(store.path)
    at = Descriptor("application/octet-stream", digest_of(bytes(1 << 20)), 1 << 20)
    assert blobs.lacking_bytes(at) == 1 << 20
    blobs.partial.mkdir(parents=True)
    with open(blobs.partial / at.digest[7:], "wb") as file:
        file.truncate(at.size)  # a hole, as of a blob that is read while it arrives
        assert blobs.lacking_bytes(at) == 1 << 20
        file.write(bytes(1 << 18))
        file.flush()
        os.fsync(file.fileno())
        assert blobs.lacking_bytes(at) == 3 << 18
    blobs.write(at, lambda start: iter([bytes(at.size - start)]))
    assert blobs.lacking_bytes(at) == 0
