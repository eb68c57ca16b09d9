"""Metrics of an engine: a count that is lost or doubled, or a bucket that is off by one, misleads people."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prejit.server.engine.engine_metrics import Histogram
from prejit.server.engine.memory import host_memory_bytes
from prejit.server.engine.request_recorder import ONE_RUN, Cost, RequestRecorder


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 9.0]), max_size=30))
def test_each_value_is_in_the_bucket_whose_bound_is_the_first_not_below_it(values):
    histogram = Histogram([1.0, 2.0])
    for value in values:
        histogram.observe(value)
    found, low = histogram.snapshot(), [sum(value <= bound for value in values) for bound in (1, 2)]
    assert found.counts == (low[0], low[1] - low[0], len(values) - low[1])
    assert (found.sum, found.count) == (sum(values), len(values))


def test_quantiles_are_linear_inside_a_bucket_and_have_an_answer_outside_of_all():
    histogram = Histogram([1.0, 2.0, 4.0])
    nothing = histogram.snapshot()
    assert all(map(math.isnan, (nothing.quantile(0.5), nothing.mean)))
    histogram.observe(1.5, 2)
    histogram.observe(3.0, 2)
    found = histogram.snapshot()
    for share, value in ((0.25, 1.5), (0.5, 2.0), (0.75, 3.0)):
        assert found.quantile(share) == pytest.approx(value)
    assert found.mean == pytest.approx(2.25)
    histogram.observe(100.0)
    assert histogram.snapshot().quantile(0.99) == 4.0
    assert (found.count, nothing.count) == (4, 0), "a snapshot does not change"


def test_a_call_in_its_callers_thread_counts_as_any_other():
    one, other = (RequestRecorder("call", "f", 16) for _ in range(2))
    one.began()
    one.ran_at_once("done", 0.2, 3, Cost(1), 0.2, waited_for_compile=True)
    for end in (one.withdrawn, lambda: one.finished("error", 0.1)):  # wrong arguments, and an error
        one.began()
        end()
    one.began()
    one.ran_at_once("nan", 0.2, 2, ONE_RUN, 0.1, waited_for_compile=False)
    for _ in range(3):
        other.submitted()
        other.admitted(0.0)
    other.ran(3, Cost(1), 0.2)
    other.ran(2, ONE_RUN, 0.1)
    other.finished("done", 0.2, 0.2, waited_for_compile=True)
    other.finished("error", 0.1)
    other.finished("nan", 0.2, 0.2)
    found, queued = one.snapshot(), other.snapshot()
    assert found.queue_seconds.count == 2  # the third of the others failed after it had waited
    assert replace(found, queue_seconds=queued.queue_seconds) == queued
    assert (found.succeeded, found.failed, found.waited_for_compile) == (1, 2, 1)


def test_host_memory_grows_with_what_is_held():
    before = host_memory_bytes()
    held = bytearray(b"x") * 64_000_000
    assert host_memory_bytes() - before > 32_000_000
    del held
