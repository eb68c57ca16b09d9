"""Bundles of the user's programs, built from Python, and what is called in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from prejit.compiler import Program, build
from prejit.runtime.__main__ import main
from prejit.runtime.programs.bucket_choice import BucketChoice
from prejit.runtime.programs.user_programs import Calls

BuildPrograms = Callable[[Program | Sequence[Program]], Path]
Called = Callable[[str], list[str]]


@pytest.fixture(scope="session")
def build_programs(tmp_path_factory: pytest.TempPathFactory, build_cache: Path) -> BuildPrograms:

    def build_programs(programs: Program | Sequence[Program]) -> Path:
        output = tmp_path_factory.mktemp("built")
        return build(programs, output, name="built", cache=build_cache, quiet=True).path

    return build_programs


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Called:
    """Records the programs for which a method is called from here on, of `BucketChoice` if it has one of that
    name, else of `Calls`: `called("choose")`.
    """

    def called(method: str) -> list[str]:
        names: list[str] = []
        owner = BucketChoice if hasattr(BucketChoice, method) else Calls
        original = getattr(owner, method)

        def record(self: Any, name: str, *rest: Any) -> Any:
            names.append(name)
            return original(self, name, *rest)

        monkeypatch.setattr(owner, method, record)
        return names

    return called


@pytest.fixture
def ran(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Runs a command in this process. Gives what it wrote: `ran("verify", path, status=4).err`."""

    def ran(*argv: object, status: int = 0) -> Any:
        assert main([*map(str, argv)]) == status
        return capsys.readouterr()

    return ran


@pytest.fixture
def said(ran: Callable[..., Any]) -> Callable[..., str]:
    """Runs a command in this process and returns what it prints."""
    return lambda *argv, **options: str(ran(*argv, **options).out)
