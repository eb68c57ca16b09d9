"""Fixtures that note which programs of a bundle are called."""

import pytest

from prejit.runtime.programs.bucket_choice import BucketChoice
from prejit.runtime.programs.user_programs import Calls


@pytest.fixture
def called(monkeypatch):
    """Records the programs for which a method is called from here on, of `BucketChoice` if it has one of that
    name, else of `Calls`: `called("choose")`.
    """

    def called(method):
        names = []
        owner = BucketChoice if hasattr(BucketChoice, method) else Calls
        original = getattr(owner, method)

        def record(self, name, *rest):
            names.append(name)
            return original(self, name, *rest)

        monkeypatch.setattr(owner, method, record)
        return names

    return called
