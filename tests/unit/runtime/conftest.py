"""Bundles of the user's programs, built from Python, and what is called in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from prejit.compiler import Program, build
from prejit.runtime.programs.bucket_choice import BucketChoice
from prejit.runtime.programs.user_programs import Calls

BuildPrograms = Callable[[Program | Sequence[Program]], Path]
Called = Callable[[str], list[str]]


@pytest.fixture(scope="session")
def build_programs(tmp_path_factory: pytest.TempPathFactory, build_cache: Path) -> BuildPrograms:
    """Builds a bundle of programs, and returns its directory."""

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
