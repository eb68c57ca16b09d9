"""A sample of `make fuzz`: hostile bundles are rejected or right, soon, in little memory."""

from collections import Counter

from tests.campaigns.fuzz import Fuzzer
from tests.extent import examples

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
