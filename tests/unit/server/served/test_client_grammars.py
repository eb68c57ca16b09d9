"""A refused grammar leaves nothing behind: its schema and the pipes of its process would stay for long."""

import asyncio
import gc
import weakref
from typing import Any

import pytest

from prejit.runtime.errors import UsageError
from prejit.server.grammar.grammar_sources import GrammarSource
from prejit.server.served import client_grammars


class Refusing:
    """Grammars of which none compiles. Each compilation has a large value, `kept`."""

    kept: weakref.ref[Any]

    def __init__(self, *_, **__):
        pass

    def kept_mask(self, *_):
        return None

    def mask(self, *_):
        large = type("Large", (), {})()
        Refusing.kept = weakref.ref(large)
        raise UsageError("no grammar")

    def stop_trial(self):
        pass


def test_a_refused_grammar_is_not_kept_by_its_error(monkeypatch):
    monkeypatch.setattr(client_grammars, "Grammars", Refusing)
    bundle = None

    async def refuse():
        compiling = client_grammars.Compiling()
        with pytest.raises(UsageError):
            await compiling.mask(bundle, GrammarSource("{", "a grammar", (), False), None, "me")
        compiling.close()

    gc.disable()
    try:
        asyncio.run(refuse())
        assert Refusing.kept() is None
    finally:
        gc.enable()
