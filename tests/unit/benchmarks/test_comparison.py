"""The benchmarks' arithmetic: what would make a table claim more than was measured."""

import sys

from benchmarks.harness import cold_report, comparison, fresh_processes, limited_disk, report
from benchmarks.harness.comparison import DECODE, FIRST, Goal
from benchmarks.harness.fresh_processes import Row
from benchmarks.harness.limited_disk import Counters
from benchmarks.harness.report import JAX_WARM
from benchmarks.studies import before_after, slow_disk

MINE, PEER, SLOW = "prejit float32", "llama.cpp f32", "JAX, persistent cache"
PYTHON = (sys.executable, "-S", "-c")


def rows(*names, dtype="float32"):
    return [Row(name, ("-",), {}, dtype) for name in names]


def samples(**figures):
    return [dict(zip(figures, each, strict=True)) for each in zip(*figures.values(), strict=True)]


def starts(*seconds):
    return samples(first_seconds=seconds)


TWO = {
    MINE: samples(first_seconds=[0.2], decode_tokens_per_second=[60.0]),
    PEER: samples(first_seconds=[0.1], decode_tokens_per_second=[50.0]),
}
"""prejit starts in twice the time of its peer, and decodes 1.2 times as fast."""


def test_ratios_are_taken_within_rounds_so_that_a_slow_round_does_not_count():
    found = {MINE: starts(1.0, 4.0, 2.0), PEER: starts(2.0, 2.0, 1.0)}
    # The medians alone are equal.
    assert report.ratio_within_rounds(found, MINE, PEER, "first_seconds") == 2.0
    found = {
        "before generate": samples(first_seconds=[1.0, 9.0, 1.0], tokens=[[1, 2]] * 3),
        "after generate": samples(first_seconds=[0.5, 4.5, 0.5], tokens=[[1, 2]] * 3),
    }
    made = before_after.table("x", found)
    (line,) = made.rows
    assert line[0] == "exec to first token, ms"
    assert line[3:] == ("0.500", "0.500 to 0.500")
    assert made.note == "Tokens of both sides: the same."
    found["after generate"][1]["tokens"] = [1, 3]
    assert "**not the same**" in before_after.table("x", found).note
    narrow = before_after.interval([0.99, 1.0, 1.0, 1.0, 1.01])
    wide = before_after.interval([0.5, 0.9, 1.0, 1.1, 1.5])
    assert narrow[0] <= 1.0 <= narrow[1]
    assert wide[1] - wide[0] > narrow[1] - narrow[0]


def test_the_best_peer_is_the_fastest_of_the_same_dtype_and_never_prejit_or_one_that_failed():
    everybody = rows(MINE, PEER, SLOW)
    found = {**TWO, SLOW: samples(first_seconds=[1.1], decode_tokens_per_second=[70.0])}
    assert comparison.best_peer(found, everybody, FIRST, "float32") == PEER
    assert comparison.best_peer(found, everybody, DECODE, "float32") == SLOW
    found = {MINE: starts(0.1), "llama.cpp q8_0": starts(0.2)}
    everybody = [*rows(MINE), *rows("llama.cpp q8_0", dtype="int8")]
    assert comparison.best_peer(found, everybody, FIRST, "float32") is None
    assert comparison.compare(found, everybody, [FIRST]) == []
    [table] = comparison.tables(
        "t", rows(MINE, PEER), {MINE: starts(0.1)}, [FIRST], {PEER: "no compiler"}
    )
    assert len(table.rows) == 1
    assert f"Not there: {PEER}: no compiler." in table.markdown()


def test_a_goal_is_met_on_the_right_side_of_its_limit():
    goals = [Goal(FIRST, "float32", 1.0), Goal(DECODE, "float32", 1.1, ("llama.cpp",))]
    start, decode = comparison.targets("decode, ", goals, rows(MINE, PEER), TWO)
    assert (start.found, start.met) == (2.0, False)
    assert (decode.found, decode.met) == (1.2, True)
    _, ratios = comparison.tables("t", rows(MINE, PEER), TWO, [FIRST, DECODE], {})
    assert ratios.rows == [(MINE, f"2.00 x {PEER}", f"**1.20** x {PEER}")]
    of_another = [Goal(FIRST, "float32", 1.2, ("CTranslate2",))]
    assert comparison.targets("", of_another, rows(MINE, PEER), TWO) == [], "it did not run"


def test_tokens_and_embeddings_that_differ_once_in_one_process_are_named():
    found = {
        SLOW: samples(tokens=[[1, 2, 3, 4], [1, 2, 3, 4]]),
        MINE: samples(tokens=[[1, 2, 3, 4], [1, 2, 9, 4]]),
    }
    agree = comparison.agreement(found, rows(MINE, SLOW))
    assert agree == {SLOW: "4/4", MINE: "2/4"}
    sums = ((SLOW, 2.0), (MINE, 2.0001), (PEER, 2.1))
    found = {name: samples(sums=[{"1x16": 0.5, "64x128": each}]) for name, each in sums}
    assert comparison.different_embeddings(found, rows(SLOW, MINE, PEER)) == [PEER]


def test_rows_take_turns_after_a_probe_and_one_that_fails_is_left_out_with_its_reason(tmp_path):
    count = tmp_path / "count"
    code = f"open({str(count)!r}, 'a').write('x'); print('LAST {{\"bytes_per_second\": 7}}')"
    good = Row("good", (*PYTHON, "print('LAST {\"x\": 1}')"))
    bad = Row("bad", (*PYTHON, "raise SystemExit('no such model')"))
    failures = {}
    found = fresh_processes.interleave([bad, good], 2, Row("probe", (*PYTHON, code)), failures)
    assert failures == {"bad": "exit status 1: no such model"}
    assert [sample["probe_bytes_per_second"] for sample in found["good"]] == [7, 7]
    assert count.read_text() == "xx", "not in the round that is thrown away"
    assert found.keys() == {"good"}


FIRST_LOAD, RECEIPT = "prejit int8, first load", "prejit int8, with receipt"
LLAMA, BUNDLE = "llama.cpp q8_0", "reading the bundle, int8"
ALL = "reading bundle, interpreter and libraries, int8"


def test_a_cold_start_is_compared_with_peers_of_its_dtype_and_with_jax_within_rounds():
    everybody = rows(FIRST_LOAD, RECEIPT, LLAMA, BUNDLE, ALL, dtype="int8")
    everybody += rows("llama.cpp f32", JAX_WARM)
    assert cold_report.references(everybody[0], everybody) == {
        "to llama.cpp": LLAMA,
        "to reading the bundle": BUNDLE,
        "to reading bundle, interpreter and libraries": ALL,
        f"to {JAX_WARM}": JAX_WARM,
        "to the start with a receipt": RECEIPT,
    }
    found = {FIRST_LOAD: starts(1.0, 4.0, 2.0), LLAMA: starts(2.0, 2.0, 1.0)}
    table = cold_report.ratios("title", everybody, {"page cache warm": found})
    (line,) = table.rows
    by_column = dict(zip(table.head, line, strict=True))
    assert (by_column["to llama.cpp"], by_column["to reading the bundle"]) == ("2.00", "")
    found = {
        "page cache warm": {FIRST_LOAD: starts(0.6), RECEIPT: starts(0.5), LLAMA: starts(0.5)},
        "disk cold": {FIRST_LOAD: starts(1.1), LLAMA: starts(1.2), BUNDLE: starts(1.0)},
    }
    made = cold_report.targets("GPT-2", everybody, found)
    ratios = [(1.2, False), (1.2, False), (1.1 / 1.2, True), (1.1, True)]
    assert [(each.found, each.met) for each in made] == ratios


def test_the_work_of_a_slow_disk_is_that_of_the_same_process(tmp_path, monkeypatch):
    monkeypatch.setattr(limited_disk, "_SYSTEM", tmp_path)
    (tmp_path / "7:0").mkdir()
    (tmp_path / "7:0" / "stat").write_text("0 0 30 0 0 0 0 0 0 2500")
    work = limited_disk.work_since("7:0", Counters(1.0, 10 * 512))
    assert work == {"disk_busy_seconds": 1.5, "disk_read_bytes": 20 * 512}

    def runs(first, busy, size):
        return samples(
            first_seconds=first, disk_busy_seconds=busy, disk_read_bytes=[size] * len(first)
        )

    load, reading = "prejit float32, first load", ALL.replace("int8", "float32")
    both = {
        load: runs([4.0, 2.0, 4.0], [3.0, 2.0, 3.2], 8e8),
        reading: runs([2.0] * 3, [2.0] * 3, 4e8),
    }
    table = slow_disk.table("title", rows(load, reading, PEER), {"slow disk": both})
    first = ("slow disk", f"**{load}**", "4.00 [2.00..4.00]", "2.00", "80 [75..100]", "800", "200")
    other = ("slow disk", reading, "2.00 [2.00..2.00]", "", "100 [100..100]", "400", "200")
    assert table.rows == [first, other]
    # A start is compared with reading only where both ran.
    found = {slow_disk.SLOW.name: {load: runs([3.0], [3.0], 1.0)}, slow_disk.SLOW_ONE_CPU.name: {}}
    assert slow_disk.targets("GPT-2", found) == []
    found[slow_disk.SLOW.name][reading] = runs([2.0], [2.0], 1.0)
    [target] = slow_disk.targets("GPT-2", found)
    assert (target.found, target.met) == (1.5, False)
