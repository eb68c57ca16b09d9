"""Bundles of the user's programs, built from Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from prejit.compiler import Program, build

BuildPrograms = Callable[[Program | Sequence[Program]], Path]


@pytest.fixture(scope="session")
def build_programs(tmp_path_factory: pytest.TempPathFactory, build_cache: Path) -> BuildPrograms:
    """Builds a bundle of programs, and returns its directory."""

    def build_programs(programs: Program | Sequence[Program]) -> Path:
        output = tmp_path_factory.mktemp("built")
        return build(programs, output, name="built", cache=build_cache, quiet=True).path

    return build_programs
