"""Metrics of an engine: a count that is lost or doubled, or a bucket that is off by one, misleads people."""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.served import stats

from prejit.runtime.base.process_facts import host_memory_bytes, host_memory_limit_bytes
from prejit.runtime.programs.ready_programs import ProgramReport
from prejit.server.engine.engine_metrics import REASONS, EngineMetrics, RequestMetrics
from prejit.server.engine.histograms import Histogram
from prejit.server.engine.request_recorder import GENERATE, ONE_RUN, Cost, Recorder, RequestRecorder


def snapshot(recorder: Recorder, **changed: Any) -> EngineMetrics:
    values: dict[str, Any] = {
        "kv_cache_usage": 0.25,
        "cache_bytes": 1000,
        "cache_budget_bytes": 4000,
        "prefix_bytes": 10,
        "prefix_budget_bytes": 100,
        "programs": (),
        "fallbacks": {},
        "device_memory_bytes": None,
    }
    return recorder.snapshot(**{**values, **changed})


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 9.0]), max_size=30))
def test_each_value_is_in_the_bucket_whose_bound_is_the_first_not_below_it(values):
    histogram = Histogram([1.0, 2.0])
    for value in values:
        histogram.observe(value)
    found = histogram.snapshot()
    assert found.counts == (
        sum(value <= 1 for value in values),
        sum(1 < value <= 2 for value in values),
        sum(value > 2 for value in values),
    )
    assert found.sum == sum(values)
    assert found.count == len(values)


def test_quantiles_are_linear_inside_a_bucket_and_have_an_answer_outside_of_all():
    histogram = Histogram([1.0, 2.0, 4.0])
    nothing = histogram.snapshot()
    assert math.isnan(nothing.quantile(0.5))
    assert math.isnan(nothing.mean)
    histogram.observe(1.5, 2)
    histogram.observe(3.0, 2)
    found = histogram.snapshot()
    assert found.quantile(0.25) == pytest.approx(1.5)
    assert found.quantile(0.5) == pytest.approx(2.0)
    assert found.quantile(0.75) == pytest.approx(3.0)
    assert found.mean == pytest.approx(2.25)
    histogram.observe(100.0)
    assert histogram.snapshot().quantile(0.99) == 4.0
    assert (found.count, nothing.count) == (4, 0), "a snapshot does not change"


def test_a_request_is_counted_once_on_its_whole_way():
    recorder = Recorder(slots=8, queue_size=256)
    recorder.generations.submitted()
    recorder.generations.submitted()
    assert (snapshot(recorder).waiting, snapshot(recorder).running) == (2, 0)
    recorder.generations.admitted(0.1)
    assert (snapshot(recorder).waiting, snapshot(recorder).running) == (1, 1)
    recorder.step(rows=0, slots=0, seconds=0.02)
    recorder.read_prompt(tokens=5, cached=2)
    recorder.first_token(0.12)
    recorder.step(rows=1, slots=8, seconds=0.04)
    recorder.tokens(2, 0.04)
    recorder.finished("length", 0.16, stats(reused_tokens=2, padding=0.5))
    recorder.generations.abandoned("cancelled")
    found = snapshot(recorder)
    assert (found.waiting, found.running) == (0, 0)
    assert (found.prompt_tokens, found.cached_prompt_tokens, found.generation_tokens) == (5, 2, 3)
    (generations,) = found.requests
    assert (generations.useful_positions, generations.computed_positions) == (5, 10)
    assert (generations.runs, generations.rows, generations.padded_rows) == (2, 1, 7)
    assert generations.busy_seconds == pytest.approx(0.06)
    assert (generations.succeeded, generations.failed) == (1, 0)
    assert {reason: count for reason, count in found.finished.items() if count} == {
        "length": 1,
        "cancelled": 1,
    }
    assert found.first_token_seconds.sum == pytest.approx(0.12)
    assert found.inter_token_seconds.count == 2
    assert found.inter_token_seconds.sum == pytest.approx(0.04)
    for histogram, total in (
        (found.whole_seconds, 0.16),
        (found.queue_seconds, 0.1),
        (generations.run_seconds, 0.06),
        (found.prefill_seconds, 0.02),
        (found.decode_seconds, 0.04),
        (found.prompt_length, 5),
        (found.new_tokens, 3),
    ):
        assert histogram.count == 1
        assert histogram.sum == pytest.approx(total)


def test_requests_that_fail_do_not_make_latencies_look_better():
    recorder = Recorder(slots=1, queue_size=1)
    for reason in ("cancelled", "deadline", "error"):
        recorder.generations.submitted()
        recorder.generations.admitted(0.0)
        recorder.finished(reason, 0.001)
    recorder.generations.refused()
    found = snapshot(recorder)
    assert found.whole_seconds.count == found.new_tokens.count == 0
    assert found.running == 0
    assert list(found.finished) == list(REASONS)
    assert sum(found.finished.values()) == 4
    assert found.finished["refused"] == 1


@pytest.mark.parametrize(("source", "waited"), [("compiled", 1), ("kept", 0), ("loaded", 0)])
def test_only_requests_that_waited_for_a_compiler_count_as_such(source, waited):
    recorder = Recorder(1, 1)
    recorder.generations.submitted()
    recorder.generations.admitted(0.0)
    obtained = (ProgramReport("a", source, 1.0), ProgramReport("b", source, 1.0))
    recorder.finished("stop", 2.0, stats(obtained=obtained))
    assert snapshot(recorder).requests[0].waited_for_compile == waited


def at_once() -> RequestMetrics:
    recorder = RequestRecorder("call", "f", 16)
    recorder.began()
    recorder.ran_at_once("done", 0.2, 3, Cost(1), 0.2, waited_for_compile=True)
    for error in ("wrong arguments", "broken program"):
        recorder.began()
        recorder.withdrawn() if error == "wrong arguments" else recorder.finished("error", 0.1)
    recorder.began()
    recorder.ran_at_once("nan", 0.2, 2, ONE_RUN, 0.1, waited_for_compile=False)
    return recorder.snapshot()


def through_the_queue() -> RequestMetrics:
    recorder = RequestRecorder("call", "f", 16)
    for _ in range(3):
        recorder.submitted()
        recorder.admitted(0.0)
    recorder.ran(3, Cost(1), 0.2)
    recorder.ran(2, ONE_RUN, 0.1)
    recorder.finished("done", 0.2, 0.2, waited_for_compile=True)
    recorder.finished("error", 0.1)
    recorder.finished("nan", 0.2, 0.2)
    return recorder.snapshot()


def test_a_call_in_its_callers_thread_counts_as_any_other():
    one, other = at_once(), through_the_queue()
    assert one.queue_seconds.count == 2  # the third of the others failed after it had waited
    assert replace(one, queue_seconds=other.queue_seconds) == other
    assert (one.succeeded, one.failed, one.waited_for_compile) == (1, 2, 1)


def test_programs_are_counted_by_how_they_became_ready():
    reports = [
        ProgramReport("a", "loaded", 0.5),
        ProgramReport("b", "compiled", 2.0),
        ProgramReport("c", "compiled", 3.0),
        ProgramReport("d", "unused", 0.0),
    ]
    found = snapshot(Recorder(1, 1), programs=iter(reports))
    assert found.programs == {"loaded": 1, "compiled": 2, "unused": 1}
    assert found.compile_seconds == 5.0  # what loading took is not compiling


def test_the_state_of_the_parts_is_passed_on():
    recorder = Recorder(4, 16, (GENERATE, ("call", "f")))
    found = snapshot(recorder, fallbacks={"cpu": 1}, device_memory_bytes=7)
    assert (found.slots, found.requests[0].queue_size) == (4, 16)
    assert (found.kv_cache_usage, found.cache_bytes, found.cache_budget_bytes) == (0.25, 1000, 4000)
    assert (found.prefix_bytes, found.prefix_budget_bytes) == (10, 100)
    assert found.fallbacks == {"cpu": 1}
    assert found.device_memory_bytes == 7
    assert [(each.kind, each.program) for each in found.requests] == [GENERATE, ("call", "f")]
    assert found.host_memory_bytes > 1_000_000


def test_counts_of_several_threads_are_not_lost():
    recorder = Recorder(1, 1)

    def work() -> None:
        for _ in range(2000):
            recorder.generations.submitted()
            recorder.generations.admitted(0.01)
            recorder.first_token(0.02)
            recorder.finished("stop", 0.03, stats())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = snapshot(recorder)
    assert (found.running, found.waiting) == (0, 0)
    assert found.finished["stop"] == found.whole_seconds.count == found.generation_tokens == 8000


def test_host_memory_grows_with_what_is_held():
    before = host_memory_bytes()
    held = bytearray(b"x") * 64_000_000
    assert host_memory_bytes() - before > 32_000_000
    del held


@pytest.mark.parametrize("path", ["memory.max", "memory/memory.limit_in_bytes"])
def test_a_container_may_use_less_than_the_machine_has(tmp_path, path):
    machine = host_memory_limit_bytes(str(tmp_path))  # no control group
    file = tmp_path / "sys" / "fs" / "cgroup" / path
    file.parent.mkdir(parents=True)
    file.write_text("123456789\n")
    assert host_memory_limit_bytes(str(tmp_path)) == 123456789
    file.write_text("max\n")
    assert host_memory_limit_bytes(str(tmp_path)) == machine > 123456789
    file.write_text("9223372036854771712\n")  # how version 1 writes that there is no limit
    assert host_memory_limit_bytes(str(tmp_path)) == machine
