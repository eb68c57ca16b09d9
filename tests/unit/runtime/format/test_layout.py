"""The disk: what is read is a regular file of the expected size, and what is written is there whole."""

import contextlib
import errno
import fcntl
import itertools
import os
import re
import shutil
import threading
from unittest import mock

import numpy as np
import pytest
from tests.layouts import blobs_of, index_file

from prejit.compiler.pipeline.pack.bundle_writing import write_layout
from prejit.runtime import __main__
from prejit.runtime.base.files import digest_of, map_file
from prejit.runtime.errors import RejectError, StoreError
from prejit.runtime.format.blobs import check_blobs, read_whole
from prejit.runtime.format.bundle_schema import Descriptor
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.names import LICENSE_MEDIA_TYPE
from prejit.runtime.format.opening import match, read_manifest
from prejit.runtime.format.root import read_root
from prejit.runtime.loader import load
from prejit.runtime.machine.fingerprint import Fingerprint


def blob_of(directory):
    path = max((directory / "blobs" / "sha256").iterdir(), key=lambda file: file.stat().st_size)
    return path, f"sha256:{path.name}", path.stat().st_size


def open_below(directory):
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return [name for name in found if name.startswith(str(directory))]


REPLACEMENTS = {
    "a link": lambda path, aside: path.symlink_to(aside),
    "a FIFO": lambda path, aside: os.mkfifo(path),
    "nothing": lambda path, aside: None,
    "shorter": lambda path, aside: path.write_bytes(aside.read_bytes()[:-1]),
    "longer": lambda path, aside: path.write_bytes(aside.read_bytes() + b"\0"),
    "empty": lambda path, aside: path.touch(),
}


@pytest.mark.parametrize("replaced", REPLACEMENTS)
def test_what_is_not_the_expected_regular_file_is_rejected_at_once(replaced, bundle_dir, tmp_path):
    path, digest, size = blob_of(bundle_dir)
    top = [bundle_dir / name for name in ("index.json", "oci-layout")]
    for file in (path, *(top if replaced in ("a link", "nothing") else ())):
        file.rename(tmp_path / "aside")
        REPLACEMENTS[replaced](file, tmp_path / "aside")
        if file == path:
            with Layout(bundle_dir) as layout, pytest.raises(RejectError, match=file.name):
                layout.read_blob(Descriptor("", digest, size))
            assert not open_below(bundle_dir)
        with pytest.raises(RejectError) as caught:  # and no wait for the other end of a FIFO
            load(bundle_dir)
        assert caught.value.path == str(file)
        file.unlink(missing_ok=True)
        (tmp_path / "aside").rename(file)


def test_a_bundle_may_lie_behind_a_link_and_move_and_its_directories_may_not(bundle_dir, tmp_path):
    (tmp_path / "current").symlink_to(bundle_dir)
    assert load(tmp_path / "current").call("tick") == 7
    for name in ("blobs", "blobs/sha256"):
        (bundle_dir / name).rename(tmp_path / "elsewhere")
        (bundle_dir / name).symlink_to(tmp_path / "elsewhere")
        with pytest.raises(RejectError, match="expected an OCI image layout"):
            Layout(bundle_dir)
        assert not open_below(bundle_dir)
        (bundle_dir / name).unlink()
        (tmp_path / "elsewhere").rename(bundle_dir / name)
    _, digest, size = blob_of(bundle_dir)
    with Layout(bundle_dir) as layout:
        bundle_dir.rename(tmp_path / "moved")
        bundle_dir.mkdir()
        assert layout.read_blob(Descriptor("", digest, size))


@pytest.mark.parametrize("gone", ["index.json", "everything"])
def test_a_directory_replaced_while_it_opens_is_no_damage(gone, bundle_dir, tmp_path, monkeypatch):
    shutil.copytree(bundle_dir, tmp_path / "new")
    pin = Layout._pinned_index

    def pin_after_a_replacement(self):
        if (tmp_path / "new").exists():
            bundle_dir.rename(tmp_path / "old")
            (tmp_path / "new").rename(bundle_dir)
            (tmp_path / "old" / "index.json").unlink()
            if gone == "everything":
                shutil.rmtree(tmp_path / "old" / "blobs")
        return pin(self)

    monkeypatch.setattr(Layout, "_pinned_index", pin_after_a_replacement)
    assert load(bundle_dir).call("tick") == 7
    assert (tmp_path / "old").exists()


def test_a_writer_that_waited_locks_what_is_there_now(recipe, tmp_path):
    path = recipe.write(tmp_path / "example")
    shutil.copytree(path, tmp_path / "new")
    (tmp_path / "new" / "index.json").unlink()
    writer = threading.Thread(target=write_layout, args=[path, *recipe.assemble()])
    first = os.open(path, os.O_RDONLY)
    fcntl.flock(first, fcntl.LOCK_EX)
    writer.start()
    writer.join(0.3)
    path.rename(tmp_path / "old")
    (tmp_path / "new").rename(path)
    second = os.open(path, os.O_RDONLY)
    fcntl.flock(second, fcntl.LOCK_EX)
    os.close(first)
    writer.join(0.5)
    assert writer.is_alive(), "wrote into a directory that another writer has locked"
    os.close(second)
    writer.join()
    assert (path / "index.json").exists()


def test_a_missing_bundle_is_no_damage_an_oversized_one_is(tmp_path, bundle_dir):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "none", tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreError, match="cannot open a bundle") as caught:
            Layout(path)
        assert caught.value.hint is not None
    (tmp_path / "empty").mkdir()
    with pytest.raises(RejectError, match="found no blobs/sha256"):
        Layout(tmp_path / "empty")
    os.truncate(bundle_dir / "index.json", 1 << 40)  # sparse: reading it would take the memory
    with pytest.raises(RejectError, match="expected at most 1048576 bytes, found 1099511627776"):
        load(bundle_dir)


@pytest.mark.parametrize("name", ["bundle", "blobs", "sha256", "index.json", "oci-layout", "blob"])
def test_a_forbidden_file_is_a_store_error_not_a_damaged_bundle(name, bundle_dir, monkeypatch):
    names = {"bundle": str(bundle_dir), "blob": blob_of(bundle_dir)[0].name}
    forbidden, opened = names.get(name, name), os.open

    def refusing(path, *args, **options):
        if str(path) == forbidden:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return opened(path, *args, **options)

    monkeypatch.setattr(os, "open", refusing)
    with pytest.raises(StoreError, match=f"{re.escape(str(bundle_dir))}.*Permission denied"):
        load(bundle_dir)


def test_a_map_outlives_its_file_which_is_not_cut_before(bundle_dir, tmp_path):
    path, digest, size = blob_of(bundle_dir)
    with Layout(bundle_dir) as layout:
        content, written = (layout.map_blob(digest, size) for _ in range(2))
    written[:4] = b"\0\0\0\0"
    assert digest_of(path.read_bytes()) == digest
    path.unlink()
    assert digest_of(content[:]) == digest
    (tmp_path / "blob").write_bytes(b"x" * 50)
    with open(tmp_path / "blob", "rb") as file:  # it was cut after its size was read
        with pytest.raises(RejectError, match="blob: expected 100 bytes, found fewer"):
            map_file(file.fileno(), 100, file.name)


def test_writing_where_nothing_can_be_written_is_a_store_error(recipe, tmp_path):
    (tmp_path / "a-file").write_bytes(b"")
    index, blobs = recipe.assemble()
    with pytest.raises(StoreError, match="a-file"):
        write_layout(tmp_path / "a-file", index, blobs)
    assert os.listdir(tmp_path) == ["a-file"]
    blobs[next(iter(blobs))] = tmp_path / "gone"
    with pytest.raises(StoreError, match="gone"):
        write_layout(tmp_path / "bundle", index, blobs)
    assert not (tmp_path / "bundle" / "index.json").exists()


def test_replacing_drops_what_is_not_needed(recipe, make_recipe, tmp_path):
    path = recipe.write(tmp_path / "example")
    blobs = path / "blobs" / "sha256"
    for killed in (blobs / ".0123", path / ".index.json", path / ".oci-layout"):
        killed.with_name(f"{killed.name}.77.abcdef01.tmp").write_bytes(b"half")
    (path / "README").write_text("somebody else's file stays")
    index, expected = make_recipe(score_scale=2.0).only("cpu-host").assemble()
    write_layout(path, index, expected)
    found = {f"sha256:{file.name}" for file in blobs.iterdir()}
    assert found == {digest_of(index), *expected}
    assert {each.name for each in path.iterdir()} == {"README", "blobs", "index.json", "oci-layout"}
    assert load(path).digest == digest_of(index)


@pytest.fixture(scope="module")
def old_and_new(recipe, make_recipe, tmp_path_factory):
    root = tmp_path_factory.mktemp("kill")
    return recipe.write(root / "old"), make_recipe(score_scale=2.0).write(root / "new")


def digest_of_bundle(path):
    """Return the digest of a whole bundle; None: there is none yet, as a writer adds its index last."""
    if not (path / "index.json").exists():
        return None
    with Layout(path) as layout:
        root = read_root(layout)
        targets = match(root, Fingerprint.current())
        manifests = [read_manifest(layout, target) for target in targets]
        check_blobs(layout, manifests, None)
    return root.digest


@pytest.mark.parametrize("replacing", [True, False])
def test_a_killed_writer_leaves_no_broken_bundle(replacing, old_and_new, tmp_path, monkeypatch):
    """Stops at every system call that shows on disk. `make chaos` kills at random."""
    old, new = old_and_new
    index, blobs = index_file(new).read_bytes(), blobs_of(new)

    class Killed(BaseException):
        pass

    def stepping(real):
        def step(*args, **kwargs):
            if next(steps, None) is None:
                raise Killed  # a dead process does nothing more: every later call fails as well
            return real(*args, **kwargs)

        return step

    found = []
    for limit in itertools.count():
        path = tmp_path / f"limit{limit}"
        if replacing:
            shutil.copytree(old, path)
        steps, finished = iter(range(limit)), False
        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            for name in ("replace", "unlink", "fsync"):
                patch.setattr(os, name, stepping(getattr(os, name)))
            write_layout(path, index, blobs)
            finished = True
        found.append(digest_of_bundle(path))
        if limit % 8 == 7:  # whatever a killed writer left, the next one mends
            write_layout(path, index, blobs)
            assert digest_of_bundle(path) == digest_of_bundle(new)
            assert not list(path.rglob("*.tmp"))
        if finished:
            break
    was, becomes = digest_of_bundle(old) if replacing else None, digest_of_bundle(new)
    turn = found.index(becomes)
    assert found == [was] * turn + [becomes] * (len(found) - turn)
    assert turn > 5


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EFBIG])
def test_a_full_disk_or_a_limit_loses_nothing(code, old_and_new, tmp_path, monkeypatch):
    old, new = old_and_new
    path = shutil.copytree(old, tmp_path / "example")
    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=OSError(code, os.strerror(code))))
    with pytest.raises(StoreError, match=os.strerror(code)) as caught:
        write_layout(path, index_file(new).read_bytes(), blobs_of(new))
    hint = {errno.ENOSPC: "free some space", errno.EROFS: "may write to"}.get(code, "")
    assert hint in (caught.value.hint or "")
    assert bool(caught.value.hint) == bool(hint)
    assert digest_of_bundle(path) == digest_of_bundle(old)
    assert not list(path.rglob("*.tmp"))


def test_a_load_while_the_bundle_is_replaced(old_and_new, make_recipe, tmp_path, monkeypatch):
    """It gets one bundle whole, the old one or the new one, at whichever step the other takes its place."""
    old, new = old_and_new
    x = np.ones((2, 16), np.float32)
    expected = {load(one).digest: load(one).call("score", x=x)[0].tolist() for one in old_and_new}
    assert len({str(values) for values in expected.values()}) == 2
    opened, seen = Layout._open_file, list[str]()

    def then_replace(layout, name, directory, where):
        if next(steps, None) == 0:
            write_layout(path, index_file(new).read_bytes(), blobs_of(new))
        return opened(layout, name, directory, where)

    monkeypatch.setattr(Layout, "_open_file", then_replace)
    for step in itertools.count():
        path, steps = shutil.copytree(old, tmp_path / str(step)), iter(range(step, -1, -1))
        found = load(path)
        assert found.call("score", x=x)[0].tolist() == expected[found.digest]
        seen.append(found.digest)
        if next(steps, None) is not None:  # the load was over before
            break
    assert len(seen) > 6
    assert [digest for digest, _ in itertools.groupby(seen)] == [load(new).digest, load(old).digest]


def test_a_missing_file_is_no_damage_while_the_bundle_is_being_replaced(bundle_dir):
    def read(layout, root):
        attempts.append(root.digest)
        if is_replaced:
            (bundle_dir / "index.json").touch()
        raise RejectError("blob", "expected a file, found: No such file or directory")

    for is_replaced, kind, count in ((True, StoreError, 20), (False, RejectError, 1)):
        attempts = []
        with pytest.raises(kind, match=f"replaced {count} times" if is_replaced else "No such"):
            read_whole(bundle_dir, read)
        assert len(attempts) == count


def test_a_disk_that_fails_while_hashing_is_named(recipe, tmp_path, monkeypatch, ran):
    bundle_dir = recipe.only("cpu-host").write(tmp_path / "bundle")
    blob = blob_of(bundle_dir)[0]
    read = os.preadv

    def failing(descriptor, buffers, offset):
        if os.path.samestat(os.fstat(descriptor), blob.stat()):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    told = ran("verify", bundle_dir, status=StoreError.exit_code).err
    assert f"{blob}: cannot read: Input/output error" in told
    assert "standard output" not in told
    with pytest.raises(StoreError, match=blob.name):
        load(bundle_dir)


def test_an_empty_layer_is_read_and_no_blob_written_again(recipe, tmp_path):
    """As a model's empty LICENSE makes one: what `verify` takes, `load` takes."""
    path = recipe.with_content(LICENSE_MEDIA_TYPE, b"").write(tmp_path / "bundle")
    assert __main__.main(["verify", str(path)]) == 0
    assert load(path).call("tick") == 7
    with Layout(path) as layout:
        assert layout.map_blob(digest_of(b""), 0) == b""
    path = recipe.write(tmp_path / "example")
    before = {file.name: file.stat().st_ino for file in (path / "blobs" / "sha256").iterdir()}
    write_layout(path, *recipe.assemble())
    assert before == {file.name: file.stat().st_ino for file in (path / "blobs/sha256").iterdir()}
