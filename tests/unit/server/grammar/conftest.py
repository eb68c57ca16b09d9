"""A bundle with a tokenizer, and its grammars."""

from __future__ import annotations

from pathlib import Path

import pytest

from prejit.runtime import load
from prejit.runtime.bundle import Bundle
from prejit.server.grammar.grammars import Grammars


@pytest.fixture(scope="session")
def bundle(lettered_dir: Path) -> Bundle:
    return load(lettered_dir, on_mismatch="error")


@pytest.fixture(scope="session")
def grammars(bundle: Bundle) -> Grammars:
    return Grammars(bundle)
