"""What buckets cost and buy, what changed, and the page."""

import json
from dataclasses import asdict, replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.extent import examples
from tests.html_pages import EVIL, alone

from prejit.compiler.pipeline.build_report import (
    BETWEEN,
    BuildReport,
    Change,
    PeakMemory,
    ReportedProgram,
    bucket_costs,
    change,
    critical_path,
    place,
)
from prejit.compiler.pipeline.report_files import report_page
from prejit.compiler.progress import Step


def program(name="p", **changes):
    digests, figures = (f"sha256:{'0' * 64}",) * 2, (2.0, 100, 10, 5, 50)
    made = ReportedProgram(name, "call", {}, "cpu-host", "compiled", *figures, *digests)
    return replace(made, **changes)


def report(*programs, **changes):
    compiling = Step("compiling p", 1.0, 3.0, "p", "cpu-host")
    steps = [Step("lowering p", 0.0, 1.0), compiling, Step("packing weights", 1.0, 4.0)]
    made = BuildReport(
        *(1, "sha256:1", "demo", "2026-01-01T00:00:00Z", True, 4.0, 2.0),
        *({"compiled": len(programs)}, {"jax": "1"}, programs),
        *(place(steps), critical_path(steps, 4.0), PeakMemory(1, 2)),
        *({"application/vnd.x": 3}, ("sha256:2",), bucket_costs(programs)),
        {"cpu-host": {"kernel": 3}},
    )
    return replace(made, **changes)


def test_a_report_names_changes_and_what_buckets_cost():
    programs = [
        program(bucket={"batch": 1, "prompt": 16}),
        program(bucket={"batch": 1, "prompt": 64}, compile_seconds=3.0),
        program(bucket={"batch": 4, "source_batch": 1}),
    ]
    found = {(each.axis, each.size): each for each in bucket_costs(programs)}
    assert {axis for axis, _ in found} == {"batch", "prompt"}
    one = found["batch", 1]
    assert (one.programs, one.compile_seconds, one.executable_bytes) == (2, 5.0, 200)
    for size, expected in ((16, (64, 0.75)), (64, (None, None))):
        assert (found["prompt", size].next, found["prompt", size].saved) == expected
    same, gone = program("same"), program("gone")
    edited = program("edited", portable="sha256:old", executable="sha256:old")
    recompiled = program("recompiled", executable="sha256:old")
    before = report(same, gone, edited, recompiled, digest="sha256:0")
    after = report(
        *(same, program("new", executable_bytes=150), program("edited"), program("recompiled")),
        versions={"jax": "2", "flax": "1"},
        weights=("sha256:3",),
    )
    assert change(json.loads(json.dumps(asdict(before))), asdict(after)) == Change(
        *("sha256:0", "2026-01-01T00:00:00Z"),
        *(("new for cpu-host",), ("gone for cpu-host",)),
        *(("edited for cpu-host",), ("recompiled for cpu-host",)),
        *(50, True, {"flax": "none -> 1", "jax": "1 -> 2"}),
    )


def test_the_page_needs_nothing_beside_itself_and_names_stay_text():
    evil = Change("sha256:0", EVIL, (EVIL,), (), (), (), -5, True, {EVIL: "1 -> 2"})
    named = program(EVIL, target=EVIL, bucket={EVIL: 3}, origin=EVIL)
    page = alone(report_page(report(named, bundle=EVIL, change=evil, origins={EVIL: 1})))
    page.check_harmless(6)
    assert "executables -5 B" in page.text
    for seconds in (0.0, 0.02, 4.0, 75.0, 90_000.0):
        ticks = report_page(report(program(), seconds=seconds)).count('class="grid"')
        assert (3 if seconds else 0) <= ticks <= 9


@settings(max_examples=examples(50, 300))
@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20), st.booleans()), max_size=12),
    st.integers(0, 5),
)
def test_a_critical_path_covers_a_build(spans, rest):
    steps = [
        Step(f"s{n}", float(start), float(start + length), "p" if worker else "")
        for n, (start, length, worker) in enumerate(spans)
    ]
    seconds = max((step.end for step in steps), default=1.0) + rest
    path = critical_path(steps, seconds)
    if not steps:
        assert [link.what for link in path] == [BETWEEN]
    assert path[0].start == 0
    assert path[-1].end == seconds
    assert all(a.end == b.start for a, b in pairwise(path))
    placed = place(steps)
    assert len(placed) == len(steps)
    for a in placed:
        for b in placed:
            assert a is b or a.lane != b.lane or a.end <= b.start or b.end <= a.start
