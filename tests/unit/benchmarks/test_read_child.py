"""The physical limit reads the bytes of its list: no fewer, and never past the end of a file unnoticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.peers.read_child import BLOCK_BYTES, read_all


def test_ranges_of_any_length_are_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "a file with spaces"
    with open(path, "wb") as file:
        file.truncate(2 * BLOCK_BYTES + 10)
    lines = f"0 {2 * BLOCK_BYTES + 10} {path}\n4096 100 {path}\n"
    assert read_all(lines) == 2 * BLOCK_BYTES + 110


def test_a_file_that_became_shorter_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    with pytest.raises(OSError, match="expected 6 bytes, found 5"):
        read_all(f"0 6 {path}\n")
