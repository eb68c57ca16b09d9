"""The page cache: what a figure of a cold disk rests on."""

import mmap
from pathlib import Path

from benchmarks.harness.page_cache import Range, evict, ranges_of

PAGE = mmap.PAGESIZE


def test_runs_of_present_pages_become_ranges_and_the_last_ends_with_the_file():
    path = Path("weights")
    pages = bytes([1, 3, 2, 1])  # the lowest bit counts
    assert ranges_of(path, 3 * PAGE + 10, pages) == [
        Range(path, 0, 2 * PAGE),
        Range(path, 3 * PAGE, 10),
    ]


def test_eviction_never_changes_what_a_file_holds(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 3 * PAGE)
    evict(path)
    assert path.read_bytes() == b"x" * 3 * PAGE
