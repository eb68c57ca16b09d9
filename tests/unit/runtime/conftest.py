"""Fixtures that note which programs of a bundle are called."""

import pytest

from prejit.runtime.__main__ import main
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


@pytest.fixture
def ran(capsys):
    """Runs a command in this process. Gives what it wrote: `ran("verify", path, status=4).err`."""

    def ran(*argv, status=0):
        assert main([*map(str, argv)]) == status
        return capsys.readouterr()

    return ran


@pytest.fixture
def said(ran):
    """Runs a command in this process and returns what it prints."""
    return lambda *argv, **options: str(ran(*argv, **options).out)
