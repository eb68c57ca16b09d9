"""Receipts: what ends one, who gets none, and whose are not believed."""

import json
import mmap
import os
import pwd
import time

import pytest

from prejit.runtime.base.file_hashing import hash_file
from prejit.runtime.base.files import Identity, digest_of
from prejit.runtime.errors import RejectError, StoreError
from prejit.runtime.format import blob_hashing
from prejit.runtime.format.blobs import check_blobs
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.opening import match, read_manifest
from prejit.runtime.format.root import read_root
from prejit.runtime.loader import load
from prejit.runtime.machine import kept_files as receipts
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.machine.kept_files import SETTLED_SECONDS, Receipts
from prejit.runtime.ship.machine_store import machine_store
from prejit.runtime.trust.channel_following import state_root

CONTENT = b"some weights" * 1000


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(receipts, "SETTLED_SECONDS", -1.0)


def kept(path):
    """Hash a file, save its receipt if it gets one, and return whether it has one."""
    receipts = Receipts(path.parent)
    assert receipts.digest_of(path) == digest_of(CONTENT)
    receipts.save()
    return held(path)


@pytest.fixture
def file(tmp_path, at_once):
    path = tmp_path / "bundle" / "file"
    path.parent.mkdir()
    path.write_bytes(CONTENT)
    assert kept(path)
    return path


def held(path):
    return Receipts(path.parent).holds(digest_of(CONTENT), Identity.of(os.stat(path)))


def receipt_file(cache):
    [path] = (cache / "receipts" / "v1").iterdir()
    return path


def write_and_set_times_back(path):
    status = path.stat()
    with open(path, "r+b") as out:
        out.write(b"X")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def write_through_a_map(path):
    with open(path, "r+b") as out, mmap.mmap(out.fileno(), 0) as content:
        content[0] ^= 1
        content.flush()


def rename_another_over(path):
    path.with_name("other").write_bytes(CONTENT)
    path.with_name("other").rename(path)


CHANGES = (write_and_set_times_back, write_through_a_map, rename_another_over)


@pytest.mark.parametrize("change", [*CHANGES, lambda path: path.chmod(0o600)])
def test_a_receipt_ends_with_any_change(change, file):
    time.sleep(0.02)  # the kernel's clock for files may tick every 10 ms
    change(file)
    assert not held(file)


def test_a_receipt_is_for_one_directory_digest_and_identity(file, tmp_path):
    good, digest = Identity.of(os.stat(file)), digest_of(CONTENT)
    receipts = Receipts(file.parent)
    assert receipts.holds(digest, good)
    assert not receipts.holds(digest_of(b"other"), good)
    (tmp_path / "other").mkdir()
    assert not Receipts(tmp_path / "other").holds(digest, good)
    for place in range(len(good)):
        changed = list(good)
        changed[place] += 1
        assert not receipts.holds(digest, Identity(*changed))


def test_a_file_gets_its_receipt_when_it_has_settled(tmp_path, monkeypatch, runtime_cache):
    """It may still change within its clock's tick, and its time may lie in the future."""
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    assert not kept(path)
    assert not runtime_cache.exists()
    changed = path.stat().st_ctime
    for now in (0.0, changed + SETTLED_SECONDS - 0.1, changed + SETTLED_SECONDS + 0.1):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        assert kept(path) == (now > changed + SETTLED_SECONDS)


def test_a_senseless_receipt_is_none_and_is_replaced(file, runtime_cache):
    digest = digest_of(CONTENT)
    for content in ("", "{", "\xff\xfe", "[" * 100_000, '{"%s":null}', '{"%s":[1,2,3,4,NaN]}'):
        receipt_file(runtime_cache).write_bytes(content.replace("%s", digest).encode("latin-1"))
        assert not held(file), content
        assert kept(file)


def test_receipts_that_others_write_do_not_count(file, runtime_cache, tmp_path):
    """In a directory of theirs they could put a link to a file of ours that they had us write."""
    path = receipt_file(runtime_cache)
    for right, at, *wrongs in (
        (0o600, path, 0o620, 0o602, 0o666),
        (0o700, path.parent, 0o770, 0o707, 0o1777),
    ):
        assert at.stat().st_mode & 0o777 == right
        for wrong in wrongs:
            at.chmod(wrong)
            assert not held(file)
            at.chmod(right)
            assert held(file)
        if os.geteuid() == 0:  # only root can give a file away
            os.chown(at, 12345, 12345)
            assert not held(file)
            os.chown(at, 0, 0)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert not held(file)


def test_a_user_without_a_home_writes_nothing_below_the_working_directory(monkeypatch):
    """A container's user without a line in /etc/passwd got a directory of the name ~ there."""

    def unknown(uid):
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in (
        "HOME",
        "PREJIT_RUNTIME_CACHE",
        "PREJIT_BUNDLES",
        "XDG_CACHE_HOME",
        "XDG_STATE_HOME",
    ):
        monkeypatch.delenv(name, raising=False)
    for path in (receipts.cache_root(), machine_store().path, state_root()):
        assert str(path).startswith("/nonexistent/prejit/")
    monkeypatch.setenv("HOME", "/home/me")
    assert str(receipts.cache_root()) == "/home/me/.cache/prejit/runtime"
    assert str(machine_store().path) == "/home/me/.cache/prejit/bundles"
    assert str(state_root()) == "/home/me/.local/state/prejit/trust"


def test_a_cache_that_cannot_be_written_costs_no_error(tmp_path, at_once, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    for root in ("/dev/null", "file", "file/below"):
        monkeypatch.setenv("PREJIT_RUNTIME_CACHE", str(tmp_path / root))
        assert not kept(path), root
    with pytest.raises(StoreError, match="cannot read"):
        Receipts(tmp_path).digest_of(tmp_path / "none")


@pytest.fixture
def bundle_dir(recipe, tmp_path, at_once):
    """A bundle of one target: a load verifies every file."""
    return recipe.only("cpu-host").write(tmp_path / "example")


@pytest.fixture
def largest(bundle_dir):
    return max((bundle_dir / "blobs" / "sha256").iterdir(), key=lambda file: file.stat().st_size)


def hashed(path, *, receipts=True):
    with Layout(path) as layout:
        targets = match(read_root(layout), Fingerprint.current())
        manifests = [read_manifest(layout, target) for target in targets]
        return check_blobs(layout, manifests, Receipts(path) if receipts else None).hashed_bytes


def test_one_changed_layer_is_hashed_and_verify_hashes_all(bundle_dir, largest, said):
    every_layer = hashed(bundle_dir, receipts=False)
    assert hashed(bundle_dir) == every_layer
    assert hashed(bundle_dir) == 0
    time.sleep(0.02)
    largest.touch()
    again = hashed(bundle_dir)
    assert again == largest.stat().st_size < every_layer
    assert hashed(bundle_dir) == 0
    assert json.loads(said("verify", bundle_dir, "--json"))["bytes"] == every_layer


def test_a_rejected_bundle_leaves_no_receipt_of_damage(bundle_dir, largest, runtime_cache):
    largest.write_bytes(bytes(largest.stat().st_size))
    for _ in range(2):
        with pytest.raises(RejectError, match=largest.name):
            load(bundle_dir)
    for path in runtime_cache.rglob("*.json"):
        assert f"sha256:{largest.name}" not in json.loads(path.read_bytes())


def test_a_file_changed_while_hashed_gets_no_receipt(bundle_dir, largest, monkeypatch):
    """The identity is taken before the hash, so a change during it shows at the next start."""

    def hash_then_change(descriptor, hashers, *part):
        result = hash_file(descriptor, hashers, *part)
        if hashers[-1].hexdigest() == largest.name:
            time.sleep(0.02)
            write_and_set_times_back(largest)
            changed.append(largest)
        return result

    changed = []
    monkeypatch.setattr(blob_hashing, "hash_file", hash_then_change)
    hashed(bundle_dir)
    assert changed
    monkeypatch.undo()
    with pytest.raises(RejectError, match=largest.name):
        load(bundle_dir)
