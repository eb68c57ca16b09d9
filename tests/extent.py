"""How much a run tests: all cases (`make test-all`), or of some products of cases a sample (`make test`).

`make test` runs on every change and must end within 12 minutes: it samples where cases differ in values
alone. `make test-all` sets PREJIT_TEST_ALL=1 and runs everything, before a release.
"""

import itertools
import os

import pytest

ALL = os.environ.get("PREJIT_TEST_ALL") == "1"
"""Whether this run has all cases."""


def cases(sample, others):
    """Return the cases of a test or of a fixture: the sample, and in `make test-all` the others."""
    return [*sample, *(others if ALL else ())]


def sampled(values, is_sampled):
    """Return all values as cases of a test; those that are not sampled run in `make test-all` alone.

    A tuple has the values of several parameters.
    """
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=() if is_sampled(value) else pytest.mark.thorough,
        )
        for value in values
    ]


def every_second(values):
    """Return all values as cases of a test; `make test` runs the first, the third, and so on."""
    turns = itertools.cycle([True, False])
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
