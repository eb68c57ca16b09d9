"""The page cache: what a figure of a cold disk rests on."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from benchmarks.harness import page_cache
from benchmarks.harness.page_cache import Range, evict, files_below, ranges_of, resident_ranges

PAGE = mmap.PAGESIZE


def test_runs_of_present_pages_become_ranges_and_the_last_ends_with_the_file() -> None:
    path = Path("weights")
    pages = bytes([1, 1, 0, 1])
    assert ranges_of(path, 3 * PAGE + 10, pages) == [
        Range(path, 0, 2 * PAGE),
        Range(path, 3 * PAGE, 10),
    ]


def test_only_the_lowest_bit_says_that_a_page_is_present() -> None:
    assert ranges_of(Path("x"), PAGE, bytes([2])) == []


def test_a_file_that_was_just_written_is_wholly_present(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(5 * PAGE + 1))
    assert resident_ranges(path) == [Range(path, 0, 5 * PAGE + 1)]


def test_an_empty_file_has_no_ranges(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert resident_ranges(tmp_path / "empty") == []


def test_eviction_never_changes_what_a_file_holds(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 3 * PAGE)
    evict(path)
    assert path.read_bytes() == b"x" * 3 * PAGE


def test_files_are_evicted_one_by_one_where_caches_cannot_be_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(PAGE))
    evicted: list[Path] = []
    monkeypatch.setattr(page_cache, "DROP_CACHES", tmp_path / "missing" / "drop_caches")
    monkeypatch.setattr(page_cache, "evict", evicted.append)
    monkeypatch.setattr(os, "sync", lambda: None)
    assert page_cache.make_cold([path]) == page_cache.EVICTED
    assert evicted == [path]


def test_a_file_with_two_names_counts_once(tmp_path: Path) -> None:
    inner = tmp_path / "directory"
    inner.mkdir()
    (inner / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to(inner / "file")
    assert files_below([tmp_path, inner]) == [(inner / "file").resolve()]


def test_packages_of_the_base_interpreter_are_left_out_and_those_of_the_environment_are_not(
    tmp_path: Path,
) -> None:
    for packages in (tmp_path / "base/site-packages", tmp_path / "environment/site-packages/x"):
        packages.mkdir(parents=True)
        (packages / "module.py").touch()
    (tmp_path / "base" / "os.py").touch()
    found = files_below([tmp_path / "base", tmp_path / "environment/site-packages"])
    assert [path.relative_to(tmp_path).as_posix() for path in found] == [
        "base/os.py",
        "environment/site-packages/x/module.py",
    ]
