"""Measuring, comparing and showing: what passes for a regression, and what a file or a name may do."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.html_pages import EVIL, Elements

from prejit.compiler.bench import bench_report as reports
from prejit.compiler.bench.bench_page import bench_page, notes, regression
from prejit.compiler.bench.bench_report import YARDSTICK, Ratio, better_of, read
from prejit.compiler.bench.probes import ratio_in_turns
from prejit.runtime.errors import RegressionError, StoreError, UsageError
from prejit.runtime.programs.ready_programs import ProgramReport

MACHINE = {"platform": "cpu", "cpu_model": "X", "cpu_count": 2, "cpu_features": ["avx", "sse"]}
times = st.floats(1e-6, 1e3)


def row(name, samples, **changes):
    head = reports.Head(**{"group": "decode", "name": name, "work": "w", **changes})
    return reports.summarize(head, samples)


def report(*rows, **changes):
    values = {
        **{"report_version": 1, "bundle": "b", "digest": "sha256:0", "target": "t"},
        **{"matched": True, "date": "2026-01-01T00:00:00+00:00", "machine": MACHINE},
        **{"versions": {"jax": "0.10.2"}, "runs": 3, "seconds": 1.0},
        **{"programs": (ProgramReport("p", "loaded", 0.25),), "rows": rows},
    }
    return reports.BenchReport(**{**values, **changes})


def beside(before, after, tolerance=0.25, **rest):
    return reports.compare_reports(before, after, other="other", tolerance=tolerance, **rest)


def verdict(before, after, tolerance=0.25):
    rows = row("r", before), row("r", after)
    return beside(report(rows[0]), report(rows[1]), tolerance).deltas[0].verdict


def test_a_row_has_the_percentiles_that_its_samples_allow():
    for count in (1, 2, reports.MIN_P95_SAMPLES, reports.MIN_P99_SAMPLES):
        samples = np.random.default_rng(0).exponential(size=count) + 0.1
        found = row("r", samples.tolist(), items=8, item="tokens")
        bounds = (samples.min(), samples.max())
        assert (found.samples, found.minimum, found.maximum) == (count, *bounds)
        for q, value, least in (
            *((0.25, found.p25, 1), (0.5, found.p50, 1), (0.75, found.p75, 1)),
            *(
                (0.95, found.p95, reports.MIN_P95_SAMPLES),
                (0.99, found.p99, reports.MIN_P99_SAMPLES),
            ),
        ):  # with fewer it would be the maximum
            assert value == (None if count < least else pytest.approx(np.quantile(samples, q)))
        assert found.per_second == pytest.approx(8 / np.median(samples))


samples_of_one_speed = st.lists(st.floats(0.99, 1.01), min_size=3, max_size=40)


@given(samples_of_one_speed, samples_of_one_speed, st.floats(0.01, 1), times, st.floats(1.05, 20))
def test_what_is_slower_beyond_tolerance_is_worse(before, after, tolerance, speed, beyond):
    slower = [speed * x * (1 + tolerance) * beyond for x in after]
    faster = [speed * x for x in before]
    assert verdict(faster, slower, tolerance) == "worse"
    assert verdict(slower, faster, tolerance) == "better"


@given(st.data(), times, st.integers(3, 40))
def test_a_busy_neighbour_is_no_regression(data, speed, count):
    """However many samples it hits: where one of them shows the old speed, the bundle still has it."""
    noise = st.lists(st.floats(1, 50), min_size=count, max_size=count)
    noisy = [speed * x for x in data.draw(noise)]
    noisy[data.draw(st.integers(0, count - 1))] = speed
    assert verdict([speed] * count, noisy) == "same"


def test_samples_that_overlap_or_are_few_are_noise_and_memory_is_not():
    many = reports.MIN_QUARTILE_SAMPLES
    assert verdict([1, 1, 3.5], [2, 3, 3]) == "same"  # few: 3.5 was seen before
    assert verdict([1.0] * many + [3.5], [2.0] * many) == "worse"  # one in many counts for nothing
    assert verdict([1, 1], [9, 9]) == "shown"
    before, after = (report(row("m", [x], unit="bytes", group="memory")) for x in (100.0, 200.0))
    assert beside(before, after).deltas[0].verdict == "worse"
    assert beside(after, before).deltas[0].verdict == "better"


def test_a_machine_that_slowed_down_as_a_whole_fails_no_bundle():
    def measured(speed, yardstick):
        return report(row("r", [speed] * 5), row(YARDSTICK, [yardstick] * 5, group="machine"))

    assert beside(measured(1, 1), measured(2, 1)).deltas[0].verdict == "worse"
    slowed = beside(measured(1, 1), measured(2, 2))
    assert [delta.verdict for delta in slowed.deltas] == ["same", "shown"]
    assert slowed.drift == 2
    assert any("2.00 x" in note for note in notes(slowed))
    assert beside(measured(1, 1), measured(4, 2)).deltas[0].verdict == "worse"

    def used(size, slowness):
        yardstick = row(YARDSTICK, [slowness] * 3, group="machine")
        return report(row("m", [size] * 3, unit="bytes", group="memory"), yardstick)

    slowed = beside(used(1.0, 1.0), used(1.3, 2.0))  # it slows no memory down
    assert slowed.deltas[0].verdict == "worse"
    # A machine that became faster excuses nothing, nor does any where the sides took turns.
    assert beside(measured(1, 2), measured(2, 1)).deltas[0].verdict == "worse"
    turns = {"r": Ratio(2, 2, 1.9, 2.1)}
    in_turns = beside(measured(1, 1), measured(2, 2), in_turns=turns)
    assert (in_turns.deltas[0].verdict, in_turns.drift) == ("worse", 1)


def test_times_of_another_machine_are_shown_and_those_of_another_version_judged():
    memory = row("m", [1.0] * 5, unit="bytes", group="memory")
    machine = {**MACHINE, "cpu_model": "Y", "cpu_features": ["sse"], "cpu_count": 8}
    before = report(row("r", [1.0] * 5), memory, machine=machine)
    after = report(row("r", [9.0] * 5), row("m", [9.0] * 5, unit="bytes", group="memory"))
    found = beside(before, after)
    assert not found.is_same_machine
    assert [delta.verdict for delta in found.deltas] == ["shown", "worse"]
    told = "\n".join(notes(found))
    assert "cpu_model: expected Y, found X" in told
    assert "cpu_features: expected none more, found avx" in told
    assert "another machine" in told
    old = {"versions": {"jax": "0.9"}, "machine": {**MACHINE, "jaxlib": "0.9"}}
    found = beside(report(row("r", [1.0] * 5), **old), after)
    assert (found.is_same_machine, len(found.regressions)) == (True, 1)
    assert "jax: expected 0.9, found 0.10.2" in found.differences
    assert "jaxlib: expected 0.9, found none" in found.differences


@given(st.lists(st.tuples(times, times), min_size=1, max_size=60))
def test_ratios_in_turns_cancel_what_slows_a_turn_down(turns):
    before = [[speed * x for x in (1.0, 1.1, 5.0)] for speed, _ in turns]
    after = [[speed * x for x in (2.0, 2.2, 9.0)] for speed, _ in turns]
    found = ratio_in_turns(after, before)
    assert (found.low, found.middle, found.high) == pytest.approx((2, 2, 2))
    assert found.least == pytest.approx(2)
    assert ratio_in_turns([[2.0], [], [2.0]], [[1.0], [1.0], []]) == Ratio(2, 2, 2, 2), "both sides"


def test_the_error_names_every_row_that_is_worse_by_its_better_time():
    first = report(row("a", [2.0] * 3), row("b", [1.0] * 3))
    found = better_of(first, report(row("a", [1.0] * 3), row("c", [1.0] * 3)))
    assert [(one.name, one.p50) for one in found.rows] == [("a", 1.0), ("b", 1.0)]
    assert better_of(first, report(row("b", [9.0] * 3))) == first
    before = report(row("one", [1.0] * 3), row("two", [1e-3] * 3), row("three", [1.0] * 3))
    after = report(row("one", [2.0] * 3), row("two", [3e-3] * 3), row("three", [1.0] * 3))
    error = regression(beside(before, after))
    assert isinstance(error, RegressionError)
    assert error.exit_code == 9
    assert "one: expected 1.00 s, found 2.00 s (2.00 x)" in str(error)
    assert "two: expected 1.00 ms, found 3.00 ms (3.00 x)" in str(error)
    assert "three" not in str(error)


FULL = report(
    row("r", [float(x) for x in range(1, 200)], items=4, item="tokens"),
    row("m", [1e6], unit="bytes", group="memory"),
    row("p", [1.5], unit="x", group="serving"),
)


def test_a_damaged_key_is_told(tmp_path):
    path = tmp_path / "b.json"
    path.write_text(json.dumps({**FULL.described(), "comparison": None}))
    assert read(str(path)) == FULL
    for where, value, complaint in (
        ("rows.0.p50", "fast", "rows[0].p50: expected float, found 'fast'"),
        ("rows.0.p50", 1e9, "rows[0]: expected 0 < minimum <= p25"),
        ("rows.0.unit", "m", "rows[0].unit: expected s, bytes or x"),
        ("rows.1.name", "r", "rows[1].name: expected each name once"),
        ("digest", ..., "digest: expected it, found nothing"),
        ("report_version", 2, "report_version: expected 1, found 2"),
    ):
        at = plain = json.loads(json.dumps(FULL.described()))
        *outer, last = [int(key) if key.isdecimal() else key for key in where.split(".")]
        for key in outer:
            at = at[key]
        at[last] = value
        if value is ...:
            del at[last]
        path.write_text(json.dumps(plain))
        with pytest.raises(UsageError) as caught:
            read(str(path))
        assert str(path) in str(caught.value)
        assert complaint in str(caught.value)
        assert "prejit bench BUNDLE -o" in (caught.value.hint or "")
    for content in (b"", b"\xff\xfe", b"[1]", b"{}"):
        path.write_bytes(content)
        with pytest.raises(UsageError, match="not a report"):
            read(str(path))
    with pytest.raises(StoreError, match="cannot read a baseline"):
        read(str(tmp_path / "none.json"))


def test_names_stay_text_on_the_page():
    machine = {"cpu_model": EVIL, "cpu_count": EVIL}
    before = report(row(EVIL, [1.0] * 3, work=EVIL), row("gone" + EVIL, [1.0]), machine=machine)
    after = report(
        row(EVIL, [2.0] * 200, work=EVIL, items=1, item=EVIL),
        **dict.fromkeys(("bundle", "digest", "target"), EVIL),
        versions={EVIL: EVIL},
        machine=machine,
        programs=(ProgramReport(EVIL, EVIL, 1.0),),
    )
    comparison = reports.compare_reports(before, after, other=EVIL, tolerance=0.25)
    assert comparison.regressions
    Elements(bench_page(after, comparison)).check_harmless(12)
