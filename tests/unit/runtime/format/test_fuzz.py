"""A sample of `make fuzz`: hostile bundles are rejected or right, soon, in little memory."""

from collections import Counter

from tests.campaigns.fuzz import Fuzzer
from tests.extent import examples

from prejit.runtime.format import audit

EXAMPLES = examples(90, 150)


def test_verify_and_load_reject_the_same_hostile_bundles():
    outcomes, problems = Counter[str](), []
    with Fuzzer() as fuzzer:
        for number in range(EXAMPLES):
            tried = fuzzer.attempt(number)
            outcomes[tried.outcome] += 1
            if tried.problem:
                problems.append(tried)
    assert not problems, f"repeat it: python -m tests.campaigns.fuzz {problems[0].number}"
    assert outcomes["rejected"] > EXAMPLES / 2
    assert outcomes["accepted"] > 5


def test_a_missing_check_or_another_error_is_found(monkeypatch):
    """Or the sample would show nothing."""
    with Fuzzer() as fuzzer:
        for number in range(20):  # it measures each sound bundle first
            assert fuzzer.attempt(number).problem == ""
        with monkeypatch.context() as patch:
            patch.setattr(audit, "check_weights", lambda *_: [][0])
            found = (fuzzer.attempt(number).problem for number in range(40))
            assert any("found IndexError" in problem for problem in found)
        with monkeypatch.context() as patch:
            patch.setattr(audit, "unpack", lambda *_: b"")
            found = (fuzzer.attempt(number).problem for number in range(EXAMPLES))
            assert any(problem.startswith("verify: None; load: RejectError") for problem in found)
