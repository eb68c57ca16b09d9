"""fs-verity: where the kernel verifies a file, its digest is compared; everywhere else the file is hashed.

The last tests need a kernel with fs-verity and root: they mount a file system of their own.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from tests.layouts import index_of

from prejit.runtime.base.files import measure
from prejit.runtime.cli.output import print_start
from prejit.runtime.errors import RejectError
from prejit.runtime.format import blob_hashing, blobs
from prejit.runtime.format.audit import audit
from prejit.runtime.format.names import WEIGHTS_MEDIA_TYPE
from prejit.runtime.loader import load

from .test_chunks import (
    chunked,
    flip,
    recipe_of_chunks,
    weights_of,
    weights_with_filler,
    with_chunks,
)

X = np.ones((2, 16), np.float32)
OTHER = f"sha256:{'0' * 64}"


@pytest.fixture(scope="module")
def content(recipe: Any) -> bytes:
    return weights_with_filler(recipe.content(WEIGHTS_MEDIA_TYPE))


@pytest.fixture(scope="module")
def digest(content: bytes) -> str:
    return chunked(content).verity


@pytest.fixture(scope="module")
def verity_recipe(recipe: Any, content: bytes) -> Any:
    return recipe_of_chunks(recipe, content)


@pytest.fixture
def path(verity_recipe: Any, tmp_path: Path) -> Path:
    return verity_recipe.write(tmp_path / "verity")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    """Sets what the kernel answers: most machines have no fs-verity."""

    def answer(digest: str | None) -> None:
        monkeypatch.setattr(blobs, "measure", lambda _: digest)

    return answer


def test_a_file_that_the_kernel_verifies_is_not_hashed(
    path: Path,
    content: bytes,
    digest: str,
    measured: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    expected = load(path).call("score", x=X)
    measured(digest)
    monkeypatch.setattr(blob_hashing, "check_chunk", None)
    bundle = load(path)
    np.testing.assert_array_equal(bundle.call("score", x=X), expected)
    report = bundle.start_report()
    others = [file for file in served_files(path, bundle.target) if file != weights_of(path)]
    assert report.verity_bytes == len(content)
    assert report.hashed_bytes == sum(file.stat().st_size for file in others)
    assert report.receipt_bytes == 0
    print_start(report)
    assert "; receipts for 0.0 MB; fs-verity for 3.1 MB\n" in capsys.readouterr().err


def served_files(path: Path, target: str) -> list[Path]:
    """The layers and the config of a target."""
    files = path / "blobs" / "sha256"
    for at in index_of(path)["manifests"]:
        manifest = json.loads((files / at["digest"].removeprefix("sha256:")).read_bytes())
        named = [manifest["config"], *manifest["layers"]]
        found = [files / each["digest"].removeprefix("sha256:") for each in named]
        if json.loads(found[0].read_bytes())["target"] == target:
            return found
    raise AssertionError(f"no target {target}")


@pytest.mark.parametrize("read", [load, lambda path: audit(path, lambda *_: None)])
def test_8_a_file_with_another_digest_is_rejected(
    read: Callable[[Path], object], path: Path, digest: str, measured: Any
) -> None:
    """Its bytes may be right: `prejit verify` refuses it too, so that what it accepts can be served."""
    measured(OTHER)
    with pytest.raises(RejectError) as caught:
        read(path)
    assert caught.value.path == str(weights_of(path))
    assert f"expected the fs-verity digest {digest}, found {OTHER}" in str(caught.value)


def test_verify_hashes_all_the_same(path: Path, content: bytes, digest: str, measured: Any) -> None:
    measured(digest)
    assert audit(path, lambda *_: None).hashed_bytes > len(content)
    flip(weights_of(path), len(content) - 1)
    with pytest.raises(RejectError, match="expected blake3"):
        audit(path, lambda *_: None)


def test_a_receipt_hides_no_digest(
    path: Path, measured: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prejit.runtime.machine.kept_files.SETTLED_SECONDS", -1.0)
    load(path).call("score", x=X)
    assert load(path).start_report().receipt_bytes
    measured(OTHER)
    with pytest.raises(RejectError, match="fs-verity"):
        load(path)


def test_7_a_digest_of_another_form_is_rejected(verity_recipe: Any, tmp_path: Path) -> None:
    forged = with_chunks(verity_recipe, lambda c: dataclasses.replace(c, verity="0" * 64))
    with pytest.raises(RejectError, match="expected verity of sha256: and 64 hexadecimal digits"):
        load(forged.write(tmp_path / "forged"))


def test_any_error_of_the_kernel_means_no_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    for code in (errno.ENOTTY, errno.ENODATA, errno.EPERM):
        error = OSError(code, "")
        monkeypatch.setattr(fcntl, "ioctl", mock.Mock(side_effect=error))
        assert measure(0) is None


@pytest.mark.parametrize(
    ("algorithm", "size", "expected"), [(1, 32, f"sha256:{'ab' * 32}"), (2, 64, None)]
)
def test_only_digests_by_sha256_are_compared(
    algorithm: int, size: int, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the kernel writes them: struct fsverity_digest of linux/fsverity.h."""

    def answer(_: int, request: int, buffer: bytearray) -> int:
        assert request == (3 << 30 | 4 << 16 | ord("f") << 8 | 134)
        assert struct.unpack_from("=HH", buffer) == (0, 64)
        buffer[: 4 + size] = struct.pack("=HH", algorithm, size) + b"\xab" * size
        return 0

    monkeypatch.setattr(fcntl, "ioctl", answer)
    assert measure(0) == expected


class Disk:
    """An ext4 file system with fs-verity in a file."""

    def __init__(self, image: Path, mounted: Path) -> None:
        self.image, self.mounted = image, mounted

    def mount(self) -> None:
        run("mount", "-o", "loop", self.image, self.mounted)

    def unmount(self) -> None:
        run("umount", self.mounted)

    def damage(self, content: bytes) -> None:
        """Flip a bit of these bytes below the file system, as a disk that decays does."""
        self.unmount()
        flip(self.image, self.image.read_bytes().index(content))
        self.mount()


def run(*command: object) -> None:
    """Run a command that needs root, or skip the test with its reason."""
    if shutil.which(str(command[0])) is None:
        pytest.skip(f"the command {command[0]} is not installed")
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{' '.join(map(str, command[:2]))}: {done.stderr.strip()}")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    made = Disk(tmp_path / "image", tmp_path / "mounted")
    made.mounted.mkdir()
    with made.image.open("wb") as file:
        file.truncate(64 << 20)
    run("mkfs.ext4", "-q", "-b", "4096", "-O", "verity", made.image)  # as large as a page
    made.mount()
    try:
        yield made
    finally:
        subprocess.run(["umount", "--lazy", made.mounted], capture_output=True, check=False)


def test_the_kernel_measures_the_digest_that_the_build_computed(
    verity_recipe: Any, content: bytes, digest: str, disk: Disk
) -> None:
    path = verity_recipe.write(disk.mounted / "bundle")
    with weights_of(path).open("rb") as file:
        assert measure(file.fileno()) is None
    run("fsverity", "enable", weights_of(path))
    with weights_of(path).open("rb") as file:
        assert measure(file.fileno()) == digest
    bundle = load(path)
    bundle.call("score", x=X)
    assert bundle.start_report().verity_bytes == len(content)
    audit(path, lambda *_: None)
