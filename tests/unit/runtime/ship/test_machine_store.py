"""A store that this user may only read gives what it has, and one without locks gets what it lacks."""

import errno
import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from prejit.runtime.base.files import digest_of
from prejit.runtime.errors import StoreError
from prejit.runtime.format.audit import audit
from prejit.runtime.format.bundle_schema import Descriptor
from prejit.runtime.generation.options import check_generation
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.ship.blob_directory import BlobDirectory
from prejit.runtime.ship.machine_store import MachineStore
from prejit.runtime.ship.pulling import Wanted, pull
from prejit.runtime.ship.reference import parse_reference

PULLS = """
import difflib  # nobody may not even read the interpreter
import os, sys
from pathlib import Path
from prejit.runtime.errors import StoreError
from prejit.runtime.format import audit
from prejit.runtime.generation.options import check_generation
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.ship import registry_repository
from prejit.runtime.ship.machine_store import MachineStore
from prejit.runtime.ship.pulling import Wanted, pull
from prejit.runtime.ship.reference import parse_reference

store, host, user = MachineStore(Path(sys.argv[1])), sys.argv[2], int(sys.argv[3])
here = Fingerprint.current()
registry_repository.Registry(parse_reference(f"oci://{host}/call:v1")).resolve("v1")  # imports what it needs
if user:
    os.setuid(user)
try:
    Path(sys.argv[1], "probe").touch()
    sys.exit("the store can be written")
except OSError:
    pass
found = pull(parse_reference(f"oci://{host}/call:v1"), store, Wanted(here))
assert found.moved is None
assert pull(parse_reference(f"oci://{host}/call@{found.digest}"), store, Wanted(here)).moved is None
assert audit.audit(found.path, check_generation).target_count == 1
for attempt in (
    lambda: pull(parse_reference(f"oci://{host}/decoder:v1"), store, Wanted(here)),
    lambda: store.collect(0, 0),
    lambda: store.pin(found.digest, is_pinned=True),
):
    try:
        attempt()
        sys.exit("it wrote")
    except StoreError as error:
        print(error)
print(len(store.bundles()))
"""


@pytest.fixture
def filled(registry):
    """A store with one bundle, in a directory that every user can reach."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        found = MachineStore(Path(name, "store"))
        at = parse_reference(f"oci://{registry.host}/call:v1")
        pull(at, found, Wanted(Fingerprint.current()))
        yield found


def pulls(store, registry, user):
    """Pull in a fresh process that cannot write to a store; return what it printed."""
    command = [sys.executable, "-c", PULLS, str(store.path), registry.host, str(user)]
    env = {**os.environ, "HOME": str(store.path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_store_of_another_user_is_read(filled, registry):
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    said = pulls(filled, registry, 65534)
    assert all("Permission denied" in each for each in said[:3]), said
    assert said[3] == "1"


def test_a_file_system_without_locks_gets_bundles_and_loses_none(registry, store, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    at = parse_reference(f"oci://{registry.host}/call:v1")
    found = pull(at, store, Wanted(Fingerprint.current()))
    assert audit(found.path, check_generation).target_count == 1
    assert pull(at, store, Wanted(Fingerprint.current())).moved is None
    with pytest.raises(StoreError, match="cannot lock it: No locks available"):
        store.collect(0, 0)
    assert len(store.bundles()) == 1


def test_what_an_unreadable_bundle_needs_stays(registry, store):
    at = parse_reference(f"oci://{registry.host}/call:v1")
    found = pull(at, store, Wanted(Fingerprint.current()))
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
