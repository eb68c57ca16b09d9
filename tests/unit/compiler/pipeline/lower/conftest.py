"""What tests that trace code of the user leave in the process."""

import sys

import pytest


@pytest.fixture(autouse=True)
def modules():
    """Forget modules that a test leaves in the process, because they are beside no manifest."""
    before = set(sys.modules)
    yield
    for name in ("helper", "toylib", "toydeep"):
        if name not in before:
            sys.modules.pop(name, None)
