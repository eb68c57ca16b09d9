"""Percentiles of all samples, failures that count, and a page that needs nothing beside itself."""

import json
import math

import numpy as np
import pytest
from tests.html_pages import EVIL, alone

from prejit.server.load.load_report import LoadReport, as_page, as_text, measures
from prejit.server.load.load_search import FoundRate, LoadAnswer, LoadLimits

LIMITS = LoadLimits(first_token_ms=100)


def answer(at, first=0.05, lag=0.0):
    return LoadAnswer(at, lag, first, first + 0.2, (0.1, 0.1), 0.1, 8, 3)


def failed(at, reason="status 429"):
    return LoadAnswer(at, 0.0, math.inf, math.inf, failed=reason)


def test_percentiles_are_of_all_windows_together_and_a_failure_is_no_sample():
    fast, slow = ([answer(at / 10, first) for at in range(1, 11)] for first in (0.05, 0.15))
    found = measures(10, [fast, fast, fast, slow], LIMITS)
    assert found.ttft_ms == {"p50": 50, "p95": 150, "p99": 150, "max": 150}
    assert found.itl_ms == {"p50": 100, "p95": 100, "p99": 100, "max": 100}
    assert (found.requests, found.failed, found.good_share) == (40, 0, 0.75)
    # A window lasts until its last answer: 1.25 s three times, and 1.35 s.
    assert found.answered_rate == pytest.approx(40 / 5.1)
    assert found.goodput == pytest.approx(30 / 5.1)
    assert found.tokens_rate == pytest.approx(120 / 5.1)
    found = measures(10, [[answer(0.1), failed(0.2), failed(0.3), failed(0.4, "x")]], LIMITS)
    assert (found.failed, found.failures) == (3, {"status 429": 2, "x": 1})
    assert found.good_share == 0.25
    assert found.e2e_ms is not None
    assert found.e2e_ms["max"] == pytest.approx(250)
    nothing = measures(10, [[failed(0.1)]], LIMITS)
    assert (nothing.e2e_ms, nothing.answered_rate, nothing.new_tokens) == (None, 0.0, 0.0)


def report(server="demo"):
    windows = {
        5.0: [answer(float(at), lag=0.02) for at in np.arange(1, 21) / 5],
        20.0: [answer(at, 0.4) for at in np.arange(1, 21) / 20] + [failed(1.0, EVIL)],
    }
    rates = tuple(measures(rate, [found], LIMITS) for rate, found in windows.items())
    found = FoundRate(10, 10.2, True), FoundRate(0, 5, False)
    return LoadReport(server, "completions", LIMITS, rates, *found)


def test_text_and_page_have_the_answers_and_escape_names():
    text = as_text(report())
    assert "knee: the server keeps up with 10 requests a second, not 10.2\n" in text
    assert "95% of the requests" not in text
    assert "within the limits: none: not even at 5 requests a second (uncertain" in text
    assert "generator: more than 10 ms late itself at 5 requests a second" in text
    assert "failed: 1 times: " in text
    assert "Infinity" not in json.dumps(report().to_json())
    page = alone(as_page(report(EVIL)))
    page.check_harmless(2)
    lines = [attributes["points"] for tag, attributes in page.found if tag == "polyline"]
    assert len(lines) == 10  # answered; three percentiles of three measures
    points = [tuple(map(float, point.split(","))) for point in " ".join(lines).split()]
    assert len(points) == 20
    assert all(0 <= x <= 720 and 0 <= y <= 260 for x, y in points)
