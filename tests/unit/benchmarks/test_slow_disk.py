"""A slow disk: its counters, the disk below a file, and the figures that the study makes of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import limited_disk
from benchmarks.harness.fresh_processes import Row
from benchmarks.harness.limited_disk import Counters, NoSlowDiskError, disk_below, parse_counters
from benchmarks.studies import slow_disk as study

FIRST, READING = (
    "prejit float32, first load",
    "reading bundle, interpreter and libraries, float32",
)
STAT = " 2018474   316821 379130404   485082   841   39  1868336   7653   0   170476   492824   0   0\n"


def samples(*figures: tuple[float, float, float]) -> list[dict[str, Any]]:
    return [
        {"first_seconds": first, "disk_busy_seconds": busy, "disk_read_bytes": size}
        for first, busy, size in figures
    ]


def rows() -> list[Row]:
    return [Row(name, ("-",), {}, "float32") for name in (FIRST, READING, "llama.cpp f32")]


def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: Path) -> Path:
    """Make the kernel's directory of the disk that holds `path`, in a directory of the test."""
    monkeypatch.setattr(limited_disk, "_SYSTEM", tmp_path)
    number = path.stat().st_dev
    known = tmp_path / f"{os.major(number)}:{os.minor(number)}"
    known.mkdir()
    return known


def test_busy_time_is_io_ticks_and_sectors_have_512_bytes() -> None:
    assert parse_counters(STAT) == Counters(170.476, 379130404 * 512)


def test_a_stat_file_without_io_ticks_is_an_error() -> None:
    with pytest.raises(ValueError, match="expected at least 10 numbers"):
        parse_counters("1 2 3")


def test_the_work_of_a_disk_counts_from_the_start_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limited_disk, "_SYSTEM", tmp_path)
    (tmp_path / "7:0").mkdir()
    (tmp_path / "7:0" / "stat").write_text("0 0 30 0 0 0 0 0 0 2500")
    work = limited_disk.work_since("7:0", Counters(1.0, 10 * 512))
    assert work == {"disk_busy_seconds": 1.5, "disk_read_bytes": 20 * 512}


def test_reads_are_limited_on_the_whole_disk_not_on_a_partition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = system(tmp_path, monkeypatch, tmp_path)
    assert disk_below(tmp_path) == known.name
    disk = tmp_path / "sda"
    disk.mkdir()
    (disk / "dev").write_text("8:0\n")
    known.rename(disk / "sda1")
    known.symlink_to(disk / "sda1")
    (known / "partition").write_text("1\n")
    assert disk_below(tmp_path) == "8:0"


def test_files_that_are_on_no_disk_are_refused_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limited_disk, "_SYSTEM", tmp_path)
    with pytest.raises(NoSlowDiskError, match="set PREJIT_BENCH_DIR"):
        disk_below(tmp_path)


def test_a_copy_leaves_out_packages_of_the_interpreter_and_its_size_too(tmp_path: Path) -> None:
    library = tmp_path / "lib"
    (library / "site-packages").mkdir(parents=True)
    (library / "site-packages" / "big").write_bytes(bytes(9000))
    (library / "small").write_bytes(bytes(1))
    assert limited_disk._size(library) == 4096
    assert limited_disk._size(library / "site-packages") == 3 * 4096
    copied = limited_disk._copy(library, tmp_path / "copy")
    assert [path.name for path in copied.iterdir()] == ["small"]


def test_a_command_that_the_machine_refuses_is_named() -> None:
    with pytest.raises(NoSlowDiskError, match=r"umount .*needs root and loop devices"):
        limited_disk._run("umount", "/no/such/mount")
    with pytest.raises(NoSlowDiskError, match="no-such-command is missing; install it"):
        limited_disk._run("no-such-command")


def test_the_table_divides_by_the_time_of_the_same_process() -> None:
    found = {
        "slow disk": {
            FIRST: samples((4.0, 3.0, 8e8), (2.0, 2.0, 8e8), (4.0, 3.2, 8e8)),
            READING: samples((2.0, 2.0, 4e8), (2.0, 2.0, 4e8), (2.0, 2.0, 4e8)),
        }
    }
    table = study.table("title", rows(), found)
    assert table.rows == [
        (
            *("slow disk", f"**{FIRST}**", "4.00 [2.00..4.00]", "2.00"),
            *("80 [75..100]", "800", "200"),
        ),
        ("slow disk", READING, "2.00 [2.00..2.00]", "", "100 [100..100]", "400", "200"),
    ]


def test_a_start_is_compared_with_reading_only_where_both_ran() -> None:
    found = {study.SLOW.name: {FIRST: samples((3.0, 3.0, 1.0))}, study.SLOW_ONE_CPU.name: {}}
    assert study.targets("GPT-2", found) == []
    found[study.SLOW.name][READING] = samples((2.0, 2.0, 1.0))
    [target] = study.targets("GPT-2", found)
    assert (target.found, target.met) == (1.5, False)


def test_the_study_measures_first_loads_peers_and_the_limit() -> None:
    names = [FIRST, "prejit float32, with receipt", "reading the bundle, float32", READING]
    made = [Row(name, ("-",)) for name in (*names, "llama.cpp f32")]
    assert [row.name for row in study.chosen(made)] == [FIRST, READING, "llama.cpp f32"]
