"""What buckets cost and buy, what changed, and the page."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
from tests.html_pages import EVIL, alone

from prejit.compiler.progress import Step
from prejit.compiler.reporting.build_page import report_page
from prejit.compiler.reporting.build_report import (
    BuildReport,
    Change,
    PeakMemory,
    ReportedProgram,
    bucket_costs,
    change,
)
from prejit.compiler.reporting.time_line import critical_path, place


def program(name: str = "p", **changes: Any) -> ReportedProgram:
    digest = f"sha256:{'0' * 64}"
    made = ReportedProgram(
        name, "call", {}, "cpu-host", "compiled", 2.0, 100, 10, 5, 50, digest, digest
    )
    return replace(made, **changes)


def report(*programs: ReportedProgram, **changes: Any) -> BuildReport:
    steps = [
        Step("lowering p", 0.0, 1.0),
        Step("compiling p", 1.0, 3.0, "p", "cpu-host"),
        Step("packing weights", 1.0, 4.0),
    ]
    made = BuildReport(
        *(1, "sha256:1", "demo", "2026-01-01T00:00:00Z", True, 4.0, 2.0),
        *({"compiled": len(programs)}, {"jax": "1"}, programs),
        *(place(steps), critical_path(steps, 4.0), PeakMemory(1, 2)),
        *({"application/vnd.x": 3}, ("sha256:2",), bucket_costs(programs)),
        {"cpu-host": {"kernel": 3}},
    )
    return replace(made, **changes)


def test_a_bucket_costs_its_programs_and_buys_the_padding_up_to_the_next_larger() -> None:
    programs = [
        program(bucket={"batch": 1, "prompt": 16}),
        program(bucket={"batch": 1, "prompt": 64}, compile_seconds=3.0),
        program(bucket={"batch": 4, "source_batch": 1}),
    ]
    found = {(each.axis, each.size): each for each in bucket_costs(programs)}
    assert {axis for axis, _ in found} == {"batch", "prompt"}
    one = found["batch", 1]
    assert (one.programs, one.compile_seconds, one.executable_bytes) == (2, 5.0, 200)
    assert (found["prompt", 16].next, found["prompt", 16].saved) == (64, 0.75)
    assert (found["prompt", 64].next, found["prompt", 64].saved) == (None, None)


def test_a_change_names_programs_by_what_changed_in_them() -> None:
    before = report(
        program("same"),
        program("gone"),
        program("edited", portable="sha256:old", executable="sha256:old"),
        program("recompiled", executable="sha256:old"),
        digest="sha256:0",
    )
    after = report(
        program("same"),
        program("new", executable_bytes=150),
        program("edited"),
        program("recompiled"),
        versions={"jax": "2", "flax": "1"},
        weights=("sha256:3",),
    )
    assert change(json.loads(json.dumps(asdict(before))), asdict(after)) == Change(
        "sha256:0",
        "2026-01-01T00:00:00Z",
        ("new for cpu-host",),
        ("gone for cpu-host",),
        ("edited for cpu-host",),
        ("recompiled for cpu-host",),
        50,
        True,
        {"flax": "none -> 1", "jax": "1 -> 2"},
    )


def test_the_page_needs_nothing_beside_itself_and_names_stay_text() -> None:
    found_change = Change("sha256:0", EVIL, (EVIL,), (), (), (), -5, True, {EVIL: "1 -> 2"})
    source = report_page(
        report(
            program(EVIL, target=EVIL, bucket={EVIL: 3}, origin=EVIL),
            bundle=EVIL,
            change=found_change,
            origins={EVIL: 1},
        )
    )
    page = alone(source)
    page.check_harmless(6)
    assert "executables -5 B" in page.text
    (picture,) = [attributes for tag, attributes in page.found if tag == "svg"]
    assert picture["role"] == "img"
    assert picture["aria-label"]
    assert all(attributes.get("scope") for tag, attributes in page.found if tag == "th")


@pytest.mark.parametrize("seconds", [0.0, 0.02, 4.0, 75.0, 90_000.0])
def test_the_time_line_has_a_few_ticks_whatever_its_length(seconds: float) -> None:
    source = report_page(report(program(), seconds=seconds))
    assert source.count('class="grid"') <= 9
    assert (source.count('class="grid"') >= 3) == (seconds > 0.01)
    assert "nan" not in source.replace("nanosecond", "")
