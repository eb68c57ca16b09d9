"""Conditions of a start: what would make a first start less first than its column says."""

import mmap
import os
import sys
from pathlib import Path

from benchmarks.harness.conditions import ONE_CPU, RECEIPTS, WARM, Start, fresh_root
from benchmarks.harness.fresh_processes import Row
from benchmarks.harness.page_cache import Range, evict, ranges_of

PAGE = mmap.PAGESIZE


def start(tmp_path, condition):
    return Start(condition, tmp_path, tmp_path / "no-receipts", {}, {})


def row(code):
    return Row("row", (sys.executable, "-S", "-c", code))


def test_receipts_of_an_earlier_process_are_gone(tmp_path):
    receipts = tmp_path / "no-receipts"
    receipts.mkdir()
    code = f"import os; print('FIRST {{\"kept\": %d}}' % os.path.exists({str(receipts)!r}))"
    assert start(tmp_path, WARM).run(row(code))["kept"] == 0


def test_a_process_on_one_cpu_sees_one_and_is_stopped_at_its_first_token(tmp_path):
    code = (
        "import os, time; print('FIRST {\"cpus\": %d}' % len(os.sched_getaffinity(0)), flush=True)"
    )
    for condition, cpus in ((ONE_CPU, 1), (WARM, len(os.sched_getaffinity(0)))):
        sample = start(tmp_path, condition).run(row(f"{code}; time.sleep(60); print('LAST')"))
        assert sample["cpus"] == cpus
        assert sample["exit_seconds"] < 30
        assert "last_seconds" not in sample


def test_a_fresh_root_keeps_no_receipts_and_writes_no_bytecode(tmp_path):
    variables = fresh_root({RECEIPTS: "/somewhere", "PYTHONPATH": "/checkout"}, tmp_path)
    assert RECEIPTS not in variables
    assert variables["PYTHONPATH"] == "/checkout"
    assert variables["HOME"] == str(tmp_path)
    assert variables["PYTHONDONTWRITEBYTECODE"] == "1"
    assert not list(Path(variables["PYTHONPYCACHEPREFIX"]).parent.iterdir())


def test_present_pages_become_ranges_and_eviction_never_changes_what_a_file_holds(tmp_path):
    path = tmp_path / "file"
    pages = bytes([1, 3, 2, 1])  # the lowest bit counts, and the last range ends with the file
    ranges = [Range(path, 0, 2 * PAGE), Range(path, 3 * PAGE, 10)]
    assert ranges_of(path, 3 * PAGE + 10, pages) == ranges
    path.write_bytes(b"x" * 3 * PAGE)
    evict(path)
    assert path.read_bytes() == b"x" * 3 * PAGE
