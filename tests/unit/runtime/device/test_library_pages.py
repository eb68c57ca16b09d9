"""The pages of jaxlib's library are read ahead, and only where they are not in memory."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.page_cache import evict, resident_ranges
from prejit.runtime.device import quick_start
from prejit.runtime.device.quick_start import PAGE_BYTES, read_ahead
from scripts.record_library_pages import line

PAGES = 2048
LISTED = {600, 601, 602, 1500, *range(1600, 1900)}


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library that is listed, and not in memory."""
    path = tmp_path / "library.so"
    with open(path, "wb") as file:
        file.write(os.urandom(PAGES * PAGE_BYTES))
        os.fsync(file.fileno())
    listed = tmp_path / "listed.txt"
    lines = ["12345 1+2 # another", line(path.stat().st_size, LISTED, "this one")]
    listed.write_text("".join(f"{each}\n" for each in lines), encoding="ascii")
    monkeypatch.setattr(quick_start, "_LISTED", str(listed))
    evict(path)
    if resident_ranges(path):
        pytest.skip("this file system keeps all pages in memory")
    return path


def in_memory(path: Path) -> set[int]:
    ranges = [(r.start // PAGE_BYTES, -(-r.length // PAGE_BYTES)) for r in resident_ranges(path)]
    return {page for first, count in ranges for page in range(first, first + count)}


def test_the_listed_pages_of_a_cold_library_are_read(library: Path) -> None:
    assert read_ahead(str(library)) == len(LISTED)
    until = time.monotonic() + 60
    while not in_memory(library) >= LISTED and time.monotonic() < until:
        time.sleep(0.01)  # nobody waited for the disk
    assert in_memory(library) >= LISTED
    assert len(in_memory(library)) < PAGES, "not all of it"


def test_a_library_in_memory_or_not_listed_is_left(library: Path) -> None:
    library.read_bytes()
    assert read_ahead(str(library)) == 0
    with open(library, "ab") as file:
        file.write(b"a build of another size, which is not listed")
        os.fsync(file.fileno())
    evict(library)
    assert read_ahead(str(library)) == 0
    assert read_ahead(str(library.with_name("none.so"))) == 0


def test_the_recorded_lists_name_pages_of_their_libraries() -> None:
    lines = Path(quick_start._LISTED).read_text(encoding="ascii").splitlines()
    assert any(each.endswith("# jaxlib 0.10.2, Python 3.11") for each in lines)
    for each in lines:
        size = int(each.split()[0])
        found = list(quick_start._listed(size))
        assert 20_000_000 < sum(count for _, count in found) * PAGE_BYTES < size / 2
        assert all(first >= 0 and (first + count) * PAGE_BYTES < size for first, count in found)
        at = quick_start._PROBED_PAGE
        assert any(first <= at < first + count for first, count in found), "the page that is probed"


def test_the_library_is_read_ahead_once_and_before_the_imports(
    settled_dir: Path, run_python: Any
) -> None:
    run_python(
        "import sys\n"
        "from prejit.runtime.device import quick_start\n"
        "seen = []\n"
        "quick_start.read_ahead = lambda path: seen.append('numpy' in sys.modules)\n"
        "from prejit.runtime import load\n"
        f"load({str(settled_dir)!r})\n"
        "assert seen == [False], seen\n"
    )
