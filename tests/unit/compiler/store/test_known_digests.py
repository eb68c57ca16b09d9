"""Digests of our code that an earlier process kept: used while no source changed, and not after."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from prejit.compiler.store import own_code
from prejit.compiler.store.own_code import KnownDigests
from prejit.runtime.base.files import digest_of

DIGEST = digest_of(b"code")


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Sources that were written just now count as settled, and the cache is empty."""
    monkeypatch.setattr(own_code, "SETTLED_SECONDS", -1.0)
    monkeypatch.setenv("PREJIT_RUNTIME_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, Path]:
    (tmp_path / "code" / "inner").mkdir(parents=True)
    (tmp_path / "code" / "a.py").write_text("A = 1\n")
    (tmp_path / "code" / "inner" / "b.py").write_text("B = 1\n")
    return {"prejit.code": tmp_path / "code"}


def test_a_later_process_finds_what_was_kept(sources: dict[str, Path]) -> None:
    KnownDigests(sources).keep("step", DIGEST)
    assert KnownDigests(sources).get("step") == DIGEST
    assert KnownDigests(sources).get("other step") is None


def _rewrite_with_its_old_times(path: Path) -> None:
    status = path.stat()
    path.write_text("B = 2\n")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize(
    "change",
    [
        lambda code: (code / "a.py").write_text("A = 2\n"),
        lambda code: _rewrite_with_its_old_times(code / "inner" / "b.py"),
        lambda code: (code / "inner" / "c.py").write_text(""),
        lambda code: (code / "inner" / "b.py").unlink(),
        lambda code: (code / "a.py").rename(code / "z.py"),
    ],
    ids=["written", "written, with the times of before", "added", "removed", "renamed"],
)
def test_a_source_that_changed_ends_all(
    change: Callable[[Path], object], sources: dict[str, Path]
) -> None:
    KnownDigests(sources).keep("step", DIGEST)
    change(sources["prejit.code"])
    assert KnownDigests(sources).get("step") is None


def test_compiled_modules_are_no_sources(sources: dict[str, Path]) -> None:
    KnownDigests(sources).keep("step", DIGEST)
    (sources["prejit.code"] / "__pycache__").mkdir()
    (sources["prejit.code"] / "__pycache__" / "a.pyc").write_bytes(b"")
    assert KnownDigests(sources).get("step") == DIGEST


def test_sources_that_changed_just_now_are_read_again(
    sources: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second change could leave the same times."""
    monkeypatch.setattr(own_code, "SETTLED_SECONDS", 60.0)
    KnownDigests(sources).keep("step", DIGEST)
    assert KnownDigests(sources).get("step") is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda held: b"",
        lambda held: b"[1",
        lambda held: b"[]",
        lambda held: json.dumps({**held, "digests": None}).encode(),
        lambda held: json.dumps({**held, "digests": {"step": "sha256:0"}}).encode(),
        lambda held: json.dumps({**held, "sources": "0"}).encode(),
    ],
    ids=["empty", "no JSON", "a list", "no digests", "no digest", "other sources"],
)
def test_a_damaged_file_counts_as_missing(
    damage: Callable[[dict[str, object]], bytes], sources: dict[str, Path], tmp_path: Path
) -> None:
    KnownDigests(sources).keep("step", DIGEST)
    [file] = (tmp_path / "cache").rglob("*.json")
    file.write_bytes(damage(json.loads(file.read_bytes())))
    assert KnownDigests(sources).get("step") is None
    KnownDigests(sources).keep("step", DIGEST)
    assert KnownDigests(sources).get("step") == DIGEST


def test_a_file_that_others_may_write_is_not_believed(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    KnownDigests(sources).keep("step", DIGEST)
    [file] = (tmp_path / "cache").rglob("*.json")
    file.chmod(0o666)
    assert KnownDigests(sources).get("step") is None
