"""A refused grammar leaves nothing behind: its schema and the pipes of its process would stay for long."""

from __future__ import annotations

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

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def kept_mask(self, *_: object) -> None:
        return None

    def mask(self, *_: object) -> None:
        large = type("Large", (), {})()
        Refusing.kept = weakref.ref(large)
        raise UsageError("no grammar")

    def stop_trial(self) -> None:
        pass


def test_a_refused_grammar_is_not_kept_by_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_grammars, "Grammars", Refusing)
    bundle: Any = None

    async def refuse() -> None:
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
