"""The schedule of compile jobs: every job ends, whatever dies, and no more runs than there is room for."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.extent import examples

from prejit.compiler.compile import schedule as schedules
from prejit.compiler.compile.schedule import Cancel, GiveUp, Loss, Need, Schedule, Start


def starts(decisions):
    return [each for each in decisions if isinstance(each, Start)]


def a_schedule(slots=1, window=1.0, **seconds):
    schedule = Schedule(slots=slots, window=window)
    for name, value in seconds.items():
        schedule.add(name, Need(value, 100))
    return schedule


def running(schedule, now=0.0):
    [start] = starts(schedule.decide(now))
    schedule.began(start.attempt, now, "a")
    return start


def test_jobs_start_in_the_order_that_fills_the_cores():
    schedule = a_schedule(slots=2, short=1, long=9, middle=5)
    assert [each.job for each in starts(schedule.decide(0))] == ["long", "middle"]
    jobs = {f"j{number}": 1.0 for number in range(100)}
    assert len(starts(a_schedule(slots=8, window=2.0, **jobs).decide(0))) == 16
    assert starts(a_schedule(slots=0, window=2.0, **jobs).decide(0)), "a cluster without a node"
    assert not starts(a_schedule(slots=0, window=1.0, **jobs).decide(0))
    schedule = a_schedule(slots=2)
    schedule.add("wide", Need(9, cores=8))
    schedule.add("narrow", Need(1))
    assert [each.job for each in starts(schedule.decide(0))] == ["wide"]
    schedule = a_schedule(slots=1, one=1, two=2)
    first = running(schedule)
    schedule.drop("two")
    again = Start(first.attempt + 1, "one", Need(1, 100))
    assert schedule.decide(0) == [Cancel(first.attempt), again]
    schedule.drop("two")  # again


def test_a_job_runs_again_for_as_long_as_a_loss_may_be_no_fault_of_its_own():
    why = "2 attempts ended without an answer: the worker died on a, the worker died on a"
    for loss, most in (
        (Loss.WORKER, schedules.MAX_WORKER_LOSSES),
        (Loss.NODE, schedules.MAX_NODE_LOSSES),
    ):
        schedule, attempts = a_schedule(job=1), set()
        for _ in range(most):
            attempts.add(running(schedule).attempt)
            schedule.lost(max(attempts), loss)
        assert len(attempts) == most
        [decision] = schedule.decide(1.0)
        assert isinstance(decision, GiveUp)
        if loss is Loss.WORKER:
            assert decision == GiveUp("job", why, (Loss.WORKER, Loss.WORKER))
        assert schedule.unfinished == 0
    schedule = a_schedule(large=1)
    schedule.lost(running(schedule).attempt, Loss.MEMORY)
    again = running(schedule)
    assert again.need.bytes == 200
    assert schedule.finished(again.attempt, 2.0)
    assert schedule.unfinished == 0


def test_only_a_job_that_has_begun_and_is_late_by_the_speed_of_all_runs_again():
    schedule = a_schedule(slots=2, slow=2)
    first = running(schedule)
    assert schedule.decide(schedules.STRAGGLER_SECONDS) == [], "three times 2 s are not over"
    [second] = starts(schedule.decide(6.1))
    assert (second.job, second.second) == ("slow", True)
    assert schedule.decide(100) == [], "no third one"
    assert schedule.finished(second.attempt, 101)
    assert schedule.decide(101) == [Cancel(first.attempt)]
    assert not schedule.finished(first.attempt, 102), "its result came too late"
    schedule = a_schedule(slots=1, slow=2, next=1)
    running(schedule)
    assert schedule.decide(1000) == []
    waits = a_schedule(slots=2, slow=2)
    assert len(starts(waits.decide(0))) == 1
    assert waits.decide(1000) == [], "it has not begun"
    jobs = {f"j{number}": 1.0 for number in range(5)}
    schedule = a_schedule(slots=5, **jobs)
    attempts = [each.attempt for each in starts(schedule.decide(0))]
    for each in attempts:
        schedule.began(each, 0)
    for each in attempts[:4]:
        schedule.finished(each, 20.0)  # this cluster is 20 times as slow
    assert schedule.decide(40.0) == []
    assert len(starts(schedule.decide(61.0))) == 1


@settings(max_examples=examples(100, 2000), deadline=None)
@given(
    jobs=st.lists(st.floats(0.01, 50), min_size=1, max_size=30),
    slots=st.integers(1, 6),
    window=st.sampled_from([1.0, 2.0]),
    seed=st.integers(0, 1 << 32),
)
def test_every_job_ends_once(jobs, slots, window, seed):
    chance = random.Random(seed)
    schedule = Schedule(slots=slots, window=window)
    for number, seconds in enumerate(jobs):
        schedule.add(f"{number}", Need(seconds))
    live, ended, now = {}, [], 0.0
    for _ in range(10_000):
        for decision in schedule.decide(now):
            match decision:
                case Start(attempt, job, _, second):
                    assert job not in ended
                    assert (job in live.values()) == second
                    live[attempt] = job
                case Cancel(attempt):
                    del live[attempt]
                case GiveUp(job):
                    ended.append(job)
        assert len(live) <= max(slots * window, 4 if window > 1 else 0)
        if not schedule.unfinished:
            break
        assert live, "jobs wait, and nothing runs"
        now += chance.uniform(0, 20)
        attempt = chance.choice(sorted(live))
        match chance.choice(["began", "finished", Loss.WORKER, Loss.NODE, "tick"]):
            case "began":
                schedule.began(attempt, now)
            case "finished":
                assert schedule.finished(attempt, now)
                ended.append(live.pop(attempt))
            case Loss() as loss:
                del live[attempt]
                schedule.lost(attempt, loss)
    assert sorted(ended) == sorted(f"{number}" for number in range(len(jobs)))
    assert not live
