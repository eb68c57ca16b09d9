"""The benchmark's arithmetic: what would make a table claim more than was measured."""

import sys

from benchmarks.harness import comparison, fresh_processes, report
from benchmarks.harness.comparison import DECODE, FIRST, Goal
from benchmarks.harness.fresh_processes import Row

MINE, PEER, SLOW = "prejit float32", "llama.cpp f32", "JAX, persistent cache"
PYTHON = (sys.executable, "-S", "-c")


def rows(*names, dtype="float32"):
    return [Row(name, ("-",), {}, dtype) for name in names]


def samples(**figures):
    count = len(next(iter(figures.values())))
    return [{key: values[place] for key, values in figures.items()} for place in range(count)]


TWO = {
    MINE: samples(first_seconds=[0.2], decode_tokens_per_second=[60.0]),
    PEER: samples(first_seconds=[0.1], decode_tokens_per_second=[50.0]),
}
"""prejit starts in twice the time of its peer, and decodes 1.2 times as fast."""


def test_a_ratio_is_of_processes_of_one_round_not_of_medians():
    found = {
        MINE: samples(first_seconds=[1.0, 4.0, 2.0]),
        PEER: samples(first_seconds=[2.0, 2.0, 1.0]),
    }
    # The medians alone are equal.
    assert report.ratio_within_rounds(found, MINE, PEER, "first_seconds") == 2.0


def test_the_best_peer_is_the_fastest_where_more_is_better_and_the_least_where_less_is():
    everybody = rows(MINE, PEER, SLOW)
    found = {**TWO, SLOW: samples(first_seconds=[1.1], decode_tokens_per_second=[70.0])}
    assert comparison.best_peer(found, everybody, FIRST, "float32") == PEER
    assert comparison.best_peer(found, everybody, DECODE, "float32") == SLOW


def test_prejit_is_not_its_own_peer_and_dtypes_are_not_compared_with_each_other():
    found = {MINE: samples(first_seconds=[0.1]), "llama.cpp q8_0": samples(first_seconds=[0.2])}
    everybody = [*rows(MINE), *rows("llama.cpp q8_0", dtype="int8")]
    assert comparison.best_peer(found, everybody, FIRST, "float32") is None
    assert comparison.compare(found, everybody, [FIRST]) == []


def test_a_peer_that_failed_is_no_peer_and_is_named_below_the_table():
    found = {MINE: samples(first_seconds=[0.1])}
    everybody = rows(MINE, PEER)
    [table] = comparison.tables("t", everybody, found, [FIRST], {PEER: "no compiler"})
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


def test_tokens_that_differ_once_in_one_process_are_counted_up_to_there():
    found = {
        SLOW: samples(tokens=[[1, 2, 3, 4], [1, 2, 3, 4]]),
        MINE: samples(tokens=[[1, 2, 3, 4], [1, 2, 9, 4]]),
    }
    agree = comparison.agreement(found, rows(MINE, SLOW))
    assert agree == {SLOW: "4/4", MINE: "2/4"}


def test_a_row_whose_embeddings_are_another_models_is_named():
    found = {
        SLOW: samples(sums=[{"1x16": 0.5, "64x128": 2.0}]),
        MINE: samples(sums=[{"1x16": 0.5, "64x128": 2.0001}]),
        PEER: samples(sums=[{"1x16": 0.5, "64x128": 2.1}]),
    }
    assert comparison.different_embeddings(found, rows(SLOW, MINE, PEER)) == [PEER]


def test_rows_take_turns_after_a_probe_and_one_that_fails_is_left_out_with_its_reason(tmp_path):
    count = tmp_path / "count"
    code = f"open({str(count)!r}, 'a').write('x'); print('LAST {{\"bytes_per_second\": 7}}')"
    good = Row("good", (*PYTHON, "print('LAST {\"x\": 1}')"))
    bad = Row("bad", (*PYTHON, "raise SystemExit('no such model')"))
    failures = {}
    probe = Row("probe", (*PYTHON, code))
    found = fresh_processes.interleave([bad, good], 2, probe, failures)
    assert failures == {"bad": "exit status 1: no such model"}
    assert [sample["probe_bytes_per_second"] for sample in found["good"]] == [7, 7]
    assert count.read_text() == "xx", "not in the round that is thrown away"
    assert found.keys() == {"good"}
