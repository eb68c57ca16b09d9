"""A bundle with a tokenizer, and its grammars."""

import pytest

from prejit.runtime import load
from prejit.server.grammar.grammars import Grammars


@pytest.fixture(scope="session")
def bundle(lettered_dir):
    return load(lettered_dir, on_mismatch="error")


@pytest.fixture(scope="session")
def grammars(bundle):
    return Grammars(bundle)
