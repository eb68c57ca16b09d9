"""A gate that calls noise a regression stops every release, and one that cannot see 10 % stops none."""

import numpy as np
import pytest

from prejit.server.releases.significance import is_settled, is_slower, paired_ratio

LIMIT = 0.05


def groups(random, slower, noise, count=4):
    """Times on a machine with other work: it slows some runs threefold, and each process has its speed."""
    found = []
    for _ in range(count):
        speeds = np.exp(random.normal(0, 0.01, 2))
        pairs = []
        for _ in range(200):
            both = 0.01 * speeds * np.exp(random.normal(0, noise, 2)) * [1, slower]
            both *= np.where(random.random(2) < 0.1, 3, 1)
            pairs.append((float(both[0]), float(both[1])))
        found.append(pairs)
    return found


@pytest.mark.parametrize("noise", [0.02, 0.15])
def test_a_tenth_is_found_and_noise_is_not(noise):
    random = np.random.default_rng(7)
    wrong = [0, 0]
    for _ in range(6):
        beside_itself = paired_ratio(groups(random, 1.0, noise))
        for place, slower in enumerate((1.0, 1.1)):
            ratio = paired_ratio(groups(random, slower, noise))
            wrong[place] += is_slower(ratio, beside_itself, LIMIT) != (slower > 1)
    assert wrong[0] == 0
    assert wrong[1] <= (0 if noise < 0.1 else 2)


def test_too_few_pairs_settle_nothing():
    assert not is_settled(None, LIMIT)
    assert not is_settled(paired_ratio([[(1.0, 1.3)], [(1.0, 0.9)]]), LIMIT)
    assert is_settled(paired_ratio([[(1.0, 1.0)] * 20] * 3), LIMIT)
    assert paired_ratio([[], []]) is None
