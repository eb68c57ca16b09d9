"""The search against computed queues: their capacity is known, and an exhaustive search costs little."""

import heapq
import math

import numpy as np
import pytest

from prejit.server.load.load_search import (
    GOOD_SHARE,
    Interval,
    LoadAnswer,
    LoadLimits,
    LoadSearch,
    bad_share,
    growth,
)
from prejit.server.load.workload import arrival_times

SERVICE, WORKERS = 0.02, 2
CAPACITY = WORKERS / SERVICE


def queue(spread, seconds=10.0):
    """A queue with Poisson arrivals, whose service times are lognormal with this spread."""

    def measure(rate, number):
        count = max(2, round(rate * seconds))
        pair, order = number // 2, -1 if number % 2 else 1
        gaps = np.random.default_rng([pair, 0]).gamma(1.0, size=count)
        drawn = np.random.default_rng([pair, 1]).lognormal(-(spread**2) / 2, spread, count)
        times, factors = arrival_times(gaps[::order], rate), drawn[::order]
        free = [0.0] * WORKERS
        answers = []
        for due, service in zip(times.tolist(), (SERVICE * factors).tolist(), strict=True):
            end = max(due, heapq.heappop(free)) + service
            heapq.heappush(free, end)
            answers.append(LoadAnswer(due, 0.0, math.nan, end - due))
        return answers

    return measure


@pytest.mark.parametrize(("spread", "start"), [(0.0, 1.0), (0.0, 400.0), (0.5, 10.0)])
def test_the_knee_is_where_the_queue_cannot_keep_up(spread, start):
    search = LoadSearch(queue(spread), LoadLimits())
    found = search.knee(start)
    assert found.rate == pytest.approx(CAPACITY, rel=0.05)
    assert found.rate < found.above <= 1.03 * found.rate
    assert sum(map(len, search.windows.values())) < 50


def test_the_highest_rate_within_limits_is_that_of_an_exhaustive_search():
    limits = LoadLimits(whole_ms=80)
    long = queue(0.5, 60)
    grid = np.arange(0.7, 1.05, 0.02) * CAPACITY
    exhaustive = max(r for r in grid if bad_share([long(r, 99)], limits).value <= 1 - GOOD_SHARE)
    search = LoadSearch(queue(0.5, 20), limits)
    knee = search.knee(10)
    found = search.within_limits(knee.rate)
    assert found.rate < knee.rate
    assert found.rate == pytest.approx(exhaustive, rel=0.05)
    none = LoadSearch(queue(0.0, 1), LoadLimits(whole_ms=1)).within_limits(50)
    assert none.rate == 0
    assert none.above < 1


def test_few_requests_or_those_that_are_late_together_prove_little():
    limits = LoadLimits(whole_ms=1000)

    def window(is_late, seconds=20.0, every=0.1):
        times = (place * every for place in range(round(seconds / every)))
        return [LoadAnswer(at, 0.0, 0.1, 2.0 if is_late(at) else 0.1) for at in times]

    few = window(lambda at: False, every=1.0)
    assert bad_share([few], limits).is_at_most(0.05) is None
    assert bad_share([few] * 4, limits).is_at_most(0.05) is True
    assert bad_share([window(lambda at: True, every=1.0)], limits).is_at_most(0.05) is False
    spread_out = bad_share([window(lambda at: round(at * 10) % 10 == 0)], limits)
    together = bad_share([window(lambda at: 10 <= at < 11.95)], limits)
    assert spread_out.value == together.value == pytest.approx(0.1)
    assert together.high - together.low > 1.5 * (spread_out.high - spread_out.low)
    # A server that refuses requests does not keep up.
    refused = [
        LoadAnswer(at / 10, 0.0, 0.1, 0.1, failed="status 429" if at % 20 == 0 else "")
        for at in range(200)
    ]
    assert growth([refused]) == Interval(math.inf, math.inf, math.inf)
