"""The profile of a start times functions of the runtime by name."""

from __future__ import annotations

from importlib import import_module
from operator import attrgetter

import pytest

from benchmarks.studies.startup_child import FUNCTIONS
from benchmarks.studies.startup_profile import KINDS


@pytest.mark.parametrize("module", FUNCTIONS)
def test_a_function_that_was_renamed_would_drop_out_of_the_profile(module: str) -> None:
    for name, kind in FUNCTIONS[module].items():
        assert callable(attrgetter(name)(import_module(module))), name
        assert kind in KINDS
