"""How much a run tests: all of it (`make test-all`), or what a change must pass at once (`make test`)."""

import itertools
import os

import pytest

ALL = os.environ.get("PREJIT_TEST_ALL") == "1"  # whether this run has all cases


def cases(sample, others):
    """Return the cases of a test or of a fixture: the sample, and in `make test-all` the others."""
    return [*sample, *(others if ALL else ())]


def sampled(values, is_sampled):
    """Return all values as cases of a test; those that are not sampled run in `make test-all` alone."""
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=() if is_sampled(value) else pytest.mark.thorough,
        )
        for value in values
    ]


def one_in(number, values):
    """Return all values as cases of a test; `make test` runs the first of each so many."""
    turns = itertools.cycle([True, *[False] * (number - 1)])
    return sampled(values, lambda _: next(turns))


def examples(sample, every):
    """Return how many examples hypothesis draws: `every` in `make test-all`."""
    return every if ALL else sample


def deselect_thorough(config, items):
    """Leave out the tests that are marked `thorough`, unless this run has all cases."""
    left = [] if ALL else [item for item in items if item.get_closest_marker("thorough")]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if not item.get_closest_marker("thorough")]
