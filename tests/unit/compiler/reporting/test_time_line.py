"""Whether lanes and the critical path tell how a build went."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.extent import examples

from prejit.compiler.progress import Step
from prejit.compiler.reporting.time_line import BETWEEN, critical_path, place


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
