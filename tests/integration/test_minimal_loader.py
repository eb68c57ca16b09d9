"""The loader stays small: what a fresh process imports of ours from `load` to the first token of a decoder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

MOST_MODULES, MOST_LINES = 60, 11_000
"""Lines are those of the files, docstrings and comments included."""

MEASURE = """
import json, sys
from prejit.runtime import load

bundle = load(sys.argv[1], on_mismatch="error")
next(iter(bundle.stream([1, 2, 3, 4, 5], max_new_tokens=4)))
files = {n: getattr(m, "__file__", None) for n, m in sys.modules.items() if n.startswith("prejit.")}
print(json.dumps({n: len(open(f).read().splitlines()) for n, f in files.items() if f}))
"""
SAME_CACHE = "PREJIT_RUNTIME_CACHE"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    return {SAME_CACHE: str(tmp_path_factory.mktemp("runtime-cache"))}


def imported(run_python: Any, bundle: Path, cache: Mapping[str, str]) -> dict[str, int]:
    """Return the lines of each module that a start imports whose bundle this machine has verified before."""
    for _ in range(3):  # receipts, answers and the names of the first programs are kept in between
        done = run_python(MEASURE, bundle, env=cache)
    found: dict[str, int] = json.loads(done.stdout)
    return found


def test_from_load_to_the_first_token(
    settled_dir: Path, run_python: Any, cache: Mapping[str, str]
) -> None:
    found = imported(run_python, settled_dir.parent / "decoder", cache)
    print(f"from load to the first token: {len(found)} modules, {sum(found.values()):,} lines")
    assert len(found) <= MOST_MODULES, sorted(found)
    assert sum(found.values()) <= MOST_LINES, found
