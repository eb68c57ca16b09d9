"""Limits in milliseconds that nobody compares with, and differences that nobody counts, stop nothing."""

import itertools

import numpy as np
import pytest

from prejit.runtime.format.release_limits import ReleaseLimits
from prejit.server.releases.measured_checks import (
    CPU,
    FIRST,
    NEXT,
    WHOLE,
    BundleAnswer,
    ComparedAnswers,
    PairedTimes,
    difference_of,
    is_settled,
    is_slower,
    paired_ratio,
    quick_enough,
    time_checks,
    times_of,
)
from prejit.server.telemetry.requestlog import RecordedCall, describe_array


def text(*ids, prompt=4, said="", status=200, end="length"):
    stats = {"prompt_tokens": prompt, "first_token_seconds": 0.5, "new_tokens": len(ids)}
    call = RecordedCall("generate", "m", token_ids=[*ids], finish_reason=end, stats=stats)
    return BundleAnswer(status, (call,), said, 1.5, 0.25)


def failed(checks):
    return [each.name for each in checks if each.outcome == "failed"]


def test_times_of_an_answer_are_split_at_the_first_token_and_slow_requests_timed_apart():
    assert times_of(text(1, 2, 3)) == {FIRST: 0.5, NEXT: 0.5, WHOLE: 1.5, CPU: 0.25}
    assert times_of(text(1)) == {FIRST: 0.5, WHOLE: 1.5, CPU: 0.25}
    assert times_of(BundleAnswer(200, (RecordedCall("encode", "m"),), seconds=2)) == {WHOLE: 2}
    lines = [{"id": str(number)} for number in range(4)]
    played = [*zip((30.0, 0.5, 0.1, 0.5), lines, strict=True)]
    assert quick_enough(played) == [lines[2], lines[1]]
    assert quick_enough(played[:1]) == lines[:1]  # something must be
    assert quick_enough([]) == []


def arrays(**values):
    described = {name: describe_array(np.asarray(value)) for name, value in values.items()}
    return BundleAnswer(200, (RecordedCall("call", "m", "score", arrays=described),))


X, OLD, LEFT = np.linspace(0, 1, 12, dtype=np.float32), text(1, 2, 3, 4), text(1, 2, end="")
"""An array, a text, and one whose client went after two tokens."""


@pytest.mark.parametrize(
    ("old", "new", "changed", "reason"),
    [
        (OLD, text(1, 2, 3, 4), 0, ""),
        (OLD, text(1, 2, 9, 4), 2, "token 2: expected 3, found 9"),
        (OLD, text(1, 2, 3), 1, "expected 4 tokens, found 3"),
        (text(1, 2), text(1, 2, 3), 1, "expected 2 tokens, found 3"),
        (text(1, 2), text(1, 2, end="stop"), 1, "finish_reason 'length', found 'stop'"),
        (OLD, text(1, 2, 3, 4, said="other"), 4, "as text"),
        (OLD, text(1, 2, 3, 4, prompt=5), 4, "expected a prompt of 4 tokens, found 5"),
        (OLD, text(status=500), 4, "expected status 200, found 500"),
        (OLD, BundleAnswer(200, OLD.calls * 2), 4, "expected 1 calls of engines, found 2"),
        (LEFT, text(1, 2, 3), 0, ""),
        (LEFT, text(1, 3), 1, "token 1: expected 2, found 3"),
        (LEFT, text(1), 1, "expected 2 tokens, found 1"),
        (arrays(x=X), arrays(x=np.nextafter(X, np.float32(2))), 0, ""),
        (arrays(x=X), arrays(y=X), 1, "expected the arrays x, found y"),
        (arrays(x=X), arrays(x=X.astype(np.float64)), 1, "x: expected float32"),
        (arrays(x=X), arrays(x=X.reshape(3, 4)), 1, "x: expected float32[12]"),
        (arrays(x=X), arrays(x=X * 1.1), 1, "x: expected other values"),
        (arrays(x=[True]), arrays(x=[False]), 1, "x: expected other values"),
        (arrays(x=X), BundleAnswer(200, (RecordedCall("call", "m"),)), 1, "found none"),
    ],
)
def test_answers_differ_by_all_that_follows_the_first_difference(old, new, changed, reason):
    found = difference_of(old, new)
    assert (found.changed, bool(found.reasons)) == (changed, bool(reason))
    assert found.compared == len(old.calls[0].token_ids or [X])
    assert reason in "; ".join(found.reasons)


def test_a_share_of_tokens_may_differ_and_no_request_may_fail():
    answers = ComparedAnswers()
    [check] = answers.checks(ReleaseLimits())
    assert (check.outcome, "no request was played" in check.why) == ("noted", True)
    answers.add("a", "/p", text(*range(99)), text(*range(98), 0))
    assert answers.share == pytest.approx(1 / 99)
    assert failed(answers.checks(ReleaseLimits())) == ["tokens"]
    assert failed(answers.checks(ReleaseLimits(max_changed_tokens="2%"))) == []
    answers.add("b", "/p", text(1), text(status=500))
    assert failed(answers.checks(ReleaseLimits(max_changed_tokens="100%"))) == ["answers"]
    assert [each.id for each in answers.differences] == ["a", "b"]


def test_limits_of_their_own_hold_for_the_new_bundle():
    times = PairedTimes()
    for _ in range(3):
        times.begin_group()
        for _ in range(5):
            times.add({FIRST: 0.1, NEXT: 0.01, WHOLE: 1}, {FIRST: 0.1, NEXT: 0.01, WHOLE: 1})
    kept = ReleaseLimits(first_token_ms=101, p95_ms=1001, tokens_per_second=99)
    assert failed(time_checks(times, PairedTimes(), kept)) == []
    broken = ReleaseLimits(first_token_ms=99, p95_ms=999, tokens_per_second=101)
    assert failed(time_checks(times, PairedTimes(), broken)) == [
        *("first token: limit", "95 % of whole requests: limit", "tokens a second: limit")
    ]


def test_a_slower_bundle_fails_and_a_busy_machine_is_said():
    times, busy, itself = PairedTimes(), PairedTimes(), PairedTimes()
    for _, each in itertools.product(range(3), (times, busy, itself)):
        each.begin_group()
        for turn in range(20):
            varied = 2.0 if turn % 2 else 0.5
            new = {id(times): 1.1, id(busy): varied, id(itself): 1.0}[id(each)]
            each.add({WHOLE: 1.0}, {WHOLE: new})
    [slower], [unknown], [alone] = (
        [*time_checks(each, noise, ReleaseLimits())]
        for each, noise in ((times, itself), (busy, itself), (times, PairedTimes()))
    )
    assert [each.outcome for each in (slower, unknown, alone)] == ["failed", "passed", "passed"]
    assert "expected at most 5 % more; +10.0 %" in slower.why
    assert "vary too much to rule out 5 % more" in unknown.why


def groups(random, slower, noise, count=4):
    """Times on a machine with other work: it slows some runs threefold, and each process has its speed."""
    found = []
    for _ in range(count):
        speeds = np.exp(random.normal(0, 0.01, 2))
        both = 0.01 * speeds * np.exp(random.normal(0, noise, (200, 2))) * [1, slower]
        both *= np.where(random.random((200, 2)) < 0.1, 3, 1)
        found.append([(float(old), float(new)) for old, new in both])
    return found


@pytest.mark.parametrize(("noise", "unseen"), [(0.02, 0), (0.15, 2)])
def test_a_tenth_is_found_noise_is_not_and_too_few_pairs_settle_nothing(noise, unseen):
    random = np.random.default_rng(7)
    wrong = [0, 0]
    for _ in range(6):
        beside_itself = paired_ratio(groups(random, 1.0, noise))
        for place, slower in enumerate((1.0, 1.1)):
            ratio = paired_ratio(groups(random, slower, noise))
            wrong[place] += is_slower(ratio, beside_itself, 0.05) != (slower > 1)
    assert wrong[0] == 0
    assert wrong[1] <= unseen
    assert paired_ratio([[], []]) is None
    for pairs, settled in (([[(1.0, 1.3)], [(1.0, 0.9)]], False), ([[(1.0, 1.0)] * 20] * 3, True)):
        assert is_settled(paired_ratio(pairs), 0.05) == settled
    assert not is_settled(None, 0.05)
