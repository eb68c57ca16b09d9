"""Receipts: what ends one, who gets none, and whose are not believed."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

from prejit.runtime.base.files import Identity, digest_of, timed_digest_file
from prejit.runtime.errors import RejectError, StoreError
from prejit.runtime.format import hashing
from prejit.runtime.format.blobs import check_blobs
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.opening import match, read_manifest
from prejit.runtime.format.root import read_root
from prejit.runtime.loader import load
from prejit.runtime.machine import kept_files as receipts
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.machine.kept_files import SETTLED_SECONDS, Receipts

CONTENT = b"some weights" * 1000


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives receipts to files that were written just now."""
    monkeypatch.setattr(receipts, "SETTLED_SECONDS", -1.0)


@pytest.fixture
def bundle_dir(recipe: Any, tmp_path: Path) -> Path:
    """A bundle of one target: a load verifies every file."""
    path: Path = recipe.only("cpu-host").write(tmp_path / "example")
    return path


@pytest.fixture
def file(tmp_path: Path, at_once: None) -> Path:
    """A file that has a receipt."""
    path = tmp_path / "bundle" / "file"
    path.parent.mkdir()
    path.write_bytes(CONTENT)
    receipts = Receipts(path.parent)
    assert receipts.digest_of(path) == digest_of(CONTENT)
    receipts.save()
    assert held(path)
    return path


def held(path: Path) -> bool:
    """Whether a process that starts now would trust the receipt of a file."""
    return Receipts(path.parent).holds(digest_of(CONTENT), Identity.of(os.stat(path)))


def receipt_file(cache: Path) -> Path:
    [path] = (cache / "receipts" / "v1").iterdir()
    return path


def write_the_same(path: Path) -> None:
    with open(path, "r+b") as out:
        out.write(CONTENT[:1])


def write_and_set_times_back(path: Path) -> None:
    status = path.stat()
    with open(path, "r+b") as out:
        out.write(b"X")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def write_through_a_map(path: Path) -> None:
    with open(path, "r+b") as out, mmap.mmap(out.fileno(), 0) as content:
        content[0] ^= 1
        content.flush()


def touch(path: Path) -> None:
    path.touch()


def set_times_to_what_they_are(path: Path) -> None:
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def copy_over(path: Path) -> None:
    copy = path.with_name("copy")
    shutil.copy2(path, copy)
    copy.rename(path)


def rename_another_over(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(CONTENT)
    other.rename(path)


def change_mode(path: Path) -> None:
    path.chmod(0o600)


def link_to_it(path: Path) -> None:
    path.with_name("link").hardlink_to(path)


def truncate_and_extend(path: Path) -> None:
    os.truncate(path, 10)
    os.truncate(path, len(CONTENT))


def rename_it_and_back(path: Path) -> None:
    path.rename(path.with_name("away"))
    path.with_name("away").rename(path)


@pytest.mark.parametrize(
    "change",
    [
        *(write_the_same, write_and_set_times_back, write_through_a_map, touch),
        *(set_times_to_what_they_are, copy_over, rename_another_over, change_mode, link_to_it),
        *(truncate_and_extend, rename_it_and_back),
    ],
)
def test_a_receipt_ends_with_any_change(change: Callable[[Path], None], file: Path) -> None:
    time.sleep(0.02)  # the kernel's clock for files may tick every 10 ms
    change(file)
    assert not held(file)


def test_reading_does_not_end_a_receipt(file: Path) -> None:
    time.sleep(0.02)
    assert file.read_bytes() == CONTENT
    with (
        open(file, "rb") as opened,
        mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY) as content,
    ):
        content[0] ^= 1  # private: it stays in this process
    assert held(file)


def test_a_receipt_is_for_one_digest(file: Path) -> None:
    identity = Identity.of(os.stat(file))
    assert not Receipts(file.parent).holds(digest_of(b"other"), identity)


def test_a_receipt_is_for_one_directory(file: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    assert not Receipts(tmp_path / "other").holds(digest_of(CONTENT), Identity.of(os.stat(file)))


def test_one_changed_number_of_an_identity_is_another_file(file: Path) -> None:
    good = Identity.of(os.stat(file))
    assert Receipts(file.parent).holds(digest_of(CONTENT), good)
    for place in range(len(astuple(good))):
        changed = list(astuple(good))
        changed[place] += 1
        assert not Receipts(file.parent).holds(digest_of(CONTENT), Identity(*changed))


def test_a_file_that_may_still_change_within_its_clock_tick_gets_no_receipt(
    tmp_path: Path, runtime_cache: Path
) -> None:
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    receipts = Receipts(tmp_path)
    receipts.digest_of(path)
    receipts.save()
    assert not runtime_cache.exists()
    assert not held(path)


def test_a_file_gets_its_receipt_when_it_has_settled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    changed = path.stat().st_ctime
    for later, expected in ((SETTLED_SECONDS - 0.1, False), (SETTLED_SECONDS + 0.1, True)):
        monkeypatch.setattr(time, "time", lambda later=later: changed + later)
        receipts = Receipts(tmp_path)
        receipts.digest_of(path)
        receipts.save()
        assert held(path) == expected


def test_a_file_from_the_future_gets_no_receipt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    receipts = Receipts(tmp_path)
    receipts.digest_of(path)
    receipts.save()
    assert not held(path)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"[]", b"null", b"5", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000),
        *(b'{"%s":5}', b'{"%s":null}', b'{"%s":[]}', b'{"%s":[1,2,3,4]}', b'{"%s":"x"}'),
        b'{"%s":[1,2,3,4,NaN]}',
    ],
)
def test_a_receipt_that_makes_no_sense_is_no_receipt(
    content: bytes, file: Path, runtime_cache: Path
) -> None:
    digest = digest_of(CONTENT).encode()
    receipt_file(runtime_cache).write_bytes(content.replace(b"%s", digest))
    assert not held(file)
    receipts = Receipts(file.parent)
    assert receipts.digest_of(file) == digest.decode()
    receipts.save()
    assert held(file), "it was not replaced"


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_receipts_that_others_can_write_are_not_believed(
    mode: int, file: Path, runtime_cache: Path
) -> None:
    receipt_file(runtime_cache).chmod(mode)
    assert not held(file)


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_receipts_in_a_directory_that_others_can_write_are_not_believed(
    mode: int, file: Path, runtime_cache: Path
) -> None:
    """They could put a link there, to a file of ours that they had us write."""
    (runtime_cache / "receipts" / "v1").chmod(mode)
    assert not held(file)


def test_receipts_behind_a_link_are_not_believed(
    file: Path, runtime_cache: Path, tmp_path: Path
) -> None:
    path = receipt_file(runtime_cache)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert not held(file)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a file away")
@pytest.mark.parametrize("which", [".", "the file"])
def test_receipts_of_another_user_are_not_believed(
    which: str, file: Path, runtime_cache: Path
) -> None:
    path = receipt_file(runtime_cache)
    os.chown(path if which == "the file" else path.parent, 12345, 12345)
    assert not held(file)


def test_receipts_are_for_their_owner_alone(file: Path, runtime_cache: Path) -> None:
    assert receipt_file(runtime_cache).stat().st_mode & 0o777 == 0o600
    assert receipt_file(runtime_cache).parent.stat().st_mode & 0o777 == 0o700


def test_a_loose_umask_does_not_cost_the_receipts(tmp_path: Path, at_once: None) -> None:
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    before = os.umask(0)
    try:
        receipts = Receipts(tmp_path)
        receipts.digest_of(path)
        receipts.save()
    finally:
        os.umask(before)
    assert held(path)


@pytest.mark.parametrize("kind", ["/dev/null", "a file", "below a file"])
def test_a_cache_that_cannot_be_written_costs_no_error(
    kind: str, tmp_path: Path, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a file").write_bytes(b"")
    root = {"/dev/null": "/dev/null", "a file": tmp_path / "a file"}.get(
        kind, tmp_path / "a file" / "below"
    )
    monkeypatch.setenv("PREJIT_RUNTIME_CACHE", str(root))
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    receipts = Receipts(tmp_path)
    assert receipts.digest_of(path) == digest_of(CONTENT)
    receipts.save()
    assert not held(path)


def test_a_missing_file_is_a_store_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot read"):
        Receipts(tmp_path).digest_of(tmp_path / "none")


def test_receipts_of_files_that_are_gone_are_dropped(
    file: Path, runtime_cache: Path, tmp_path: Path
) -> None:
    other = file.with_name("second")
    other.write_bytes(b"second")
    file.unlink()
    receipts = Receipts(file.parent)
    receipts.digest_of(other)
    receipts.save()
    assert [*json.loads(receipt_file(runtime_cache).read_bytes())] == [digest_of(b"second")]


def hashed(path: Path, receipts: Receipts | None) -> int:
    with Layout(path) as layout:
        root = read_root(layout)
        targets = match(root, Fingerprint.current())
        manifests = [read_manifest(layout, target) for target in targets]
        return check_blobs(layout, manifests, receipts).hashed_bytes


def test_a_second_load_hashes_nothing_and_verify_hashes_everything(
    settled_dir: Path, prejit: Any
) -> None:
    every_layer = hashed(settled_dir, None)
    assert every_layer > 10_000
    assert hashed(settled_dir, Receipts(settled_dir)) == every_layer
    assert hashed(settled_dir, Receipts(settled_dir)) == 0
    said = json.loads(prejit("verify", settled_dir, "--json").stdout)
    assert said["bytes"] == every_layer


def test_one_changed_layer_is_all_that_is_hashed_again(bundle_dir: Path, at_once: None) -> None:
    every_layer = hashed(bundle_dir, Receipts(bundle_dir))
    blob = max((bundle_dir / "blobs" / "sha256").iterdir(), key=lambda file: file.stat().st_size)
    time.sleep(0.02)
    blob.touch()
    again = hashed(bundle_dir, Receipts(bundle_dir))
    assert again == blob.stat().st_size < every_layer
    assert hashed(bundle_dir, Receipts(bundle_dir)) == 0


def test_a_rejected_bundle_leaves_no_receipt_for_the_damaged_file(
    bundle_dir: Path, at_once: None, runtime_cache: Path
) -> None:
    blob = max((bundle_dir / "blobs" / "sha256").iterdir(), key=lambda file: file.stat().st_size)
    blob.write_bytes(bytes(blob.stat().st_size))
    for _ in range(2):
        with pytest.raises(RejectError, match=blob.name):
            load(bundle_dir)
    for path in runtime_cache.rglob("*.json"):
        assert f"sha256:{blob.name}" not in json.loads(path.read_bytes())


def test_a_file_that_changes_while_it_is_hashed_gets_no_receipt(
    bundle_dir: Path, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The identity is taken before the hash, so a change during it shows at the next start."""
    real = timed_digest_file
    blob = max((bundle_dir / "blobs" / "sha256").iterdir(), key=lambda file: file.stat().st_size)

    def digest_then_change(descriptor: int) -> tuple[str, float]:
        digest, seconds = real(descriptor)
        if digest == f"sha256:{blob.name}":
            time.sleep(0.02)
            write_and_set_times_back(blob)
        return digest, seconds

    monkeypatch.setattr(hashing, "timed_digest_file", digest_then_change)
    hashed(bundle_dir, Receipts(bundle_dir))
    monkeypatch.undo()
    with pytest.raises(RejectError, match=blob.name):
        load(bundle_dir)
