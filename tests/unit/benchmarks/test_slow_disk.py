"""A slow disk: its counters, the disk below a file, and the figures that the study makes of them."""

from benchmarks.harness import limited_disk
from benchmarks.harness.fresh_processes import Row
from benchmarks.harness.limited_disk import Counters
from benchmarks.studies import slow_disk as study

FIRST, READING = (
    "prejit float32, first load",
    "reading bundle, interpreter and libraries, float32",
)


def samples(*figures):
    return [
        {"first_seconds": first, "disk_busy_seconds": busy, "disk_read_bytes": size}
        for first, busy, size in figures
    ]


def rows():
    return [Row(name, ("-",), {}, "float32") for name in (FIRST, READING, "llama.cpp f32")]


def test_the_work_of_a_disk_counts_from_the_start_of_the_process(tmp_path, monkeypatch):
    monkeypatch.setattr(limited_disk, "_SYSTEM", tmp_path)
    (tmp_path / "7:0").mkdir()
    (tmp_path / "7:0" / "stat").write_text("0 0 30 0 0 0 0 0 0 2500")
    work = limited_disk.work_since("7:0", Counters(1.0, 10 * 512))
    assert work == {"disk_busy_seconds": 1.5, "disk_read_bytes": 20 * 512}


def test_the_table_divides_by_the_time_of_the_same_process():
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


def test_a_start_is_compared_with_reading_only_where_both_ran():
    found = {study.SLOW.name: {FIRST: samples((3.0, 3.0, 1.0))}, study.SLOW_ONE_CPU.name: {}}
    assert study.targets("GPT-2", found) == []
    found[study.SLOW.name][READING] = samples((2.0, 2.0, 1.0))
    [target] = study.targets("GPT-2", found)
    assert (target.found, target.met) == (1.5, False)
