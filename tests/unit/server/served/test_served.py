"""Models of a server, the grammars of its clients, and the first program that returns no numbers."""

import asyncio
import gc
import threading
import weakref
from collections import Counter
from types import SimpleNamespace
from unittest.mock import Mock, call

import numpy as np
import pytest
from tests.odd_weights import spoil_weights
from tests.waiting import wait_for

from prejit.runtime import load
from prejit.runtime.errors import ClosedError, UsageError
from prejit.server import Engine
from prejit.server.grammar.grammar_sources import GrammarSource
from prejit.server.served import served as served_bundles
from prejit.server.served import served_loading
from prejit.server.served.served import ModelNotFoundError, Models, Served
from prejit.server.telemetry.engine_profile import record
from prejit.server.telemetry.metrics_collector import EngineCollector


def test_a_name_is_that_of_one_bundle_and_drain_reaches_every_engine():
    models = Models(*(Served(name, None, Mock(), 0) for name in ("one", "two", "other")))
    assert models.get("two").name == "two"
    with pytest.raises(ModelNotFoundError, match=r"'one', 'two', 'other'.*found 'three'"):
        models.get("three")
    with pytest.raises(UsageError, match="two bundles named 'one'"):
        models.add(Served("one", None, Mock(), 0))
    assert [each.name for each in models] == ["one", "two", "other"]
    assert models.drain()
    assert models.undrain()
    models.close()
    for each in models:
        assert each.engine.mock_calls == [call.drain(0.0), call.undrain(), call.close()]


def test_requests_that_began_before_a_swap_go_on_after_a_drain_is_undone():
    before, after, closed = (Served("m", None, Mock(), 0) for _ in range(3))
    closed.engine.undrain.side_effect = ClosedError("freed just now")
    models = Models(closed)
    models.put("m", before)
    models.put("m", after)
    models.drain()
    assert models.undrain()
    assert models.state == "ready"
    for each in (before, after):
        each.engine.undrain.assert_called_once_with()


def test_a_drain_while_it_loads_can_be_undone_and_a_server_that_ends_stays_so():
    models = Models()
    assert models.state == "loading"
    assert models.drain()
    assert not models.change("loading", "ready")
    assert models.undrain()
    assert models.state == "ready"
    models = Models()
    assert models.drain(ends=True)
    assert not models.change("loading", "ready")
    assert models.state == "draining"
    assert not models.undrain()
    assert models.state == "draining"


def test_a_refused_grammar_leaves_nothing_behind(monkeypatch):
    """Its schema, and the pipes of its process, would stay for long."""
    kept = []

    def refuse_mask(*_):
        large = type("Large", (), {})()
        kept.append(weakref.ref(large))
        raise UsageError("no grammar")

    refusing = SimpleNamespace(kept_mask=lambda *_: None, mask=refuse_mask, stop_trial=lambda: None)
    monkeypatch.setattr(served_bundles, "Grammars", lambda *_, **__: refusing)
    unused = None

    async def refuse():
        compiling = served_bundles.GrammarCompiling()
        with pytest.raises(UsageError):
            await compiling.mask(unused, GrammarSource("{", "a grammar", (), False), None, "me")
        compiling.close()

    gc.disable()
    try:
        asyncio.run(refuse())
        wait_for(lambda: kept[0]() is None)  # its thread, of low priority, may hold it for a moment
    finally:
        gc.enable()


def test_requests_whose_grammars_wait_when_a_model_is_closed_are_told_so(monkeypatch):
    began, killed = threading.Event(), threading.Event()

    def compile_until_killed(*_):
        began.set()
        assert killed.wait(60)
        raise UsageError("a grammar: expected one that compiles, found one that ended its process")

    compiles = SimpleNamespace(
        kept_mask=lambda *_: None, mask=compile_until_killed, stop_trial=killed.set
    )
    monkeypatch.setattr(served_bundles, "Grammars", lambda *_, **__: compiles)

    async def ask():
        compiling = served_bundles.GrammarCompiling()

        def mask(client):
            source = GrammarSource("{", "a grammar", (), False)
            return asyncio.ensure_future(compiling.mask(None, source, None, client))

        asked = [mask("one"), mask("two"), mask("three")]
        await asyncio.to_thread(began.wait, 60)
        compiling.close()
        for each in (*asked, mask("late")):
            with pytest.raises(ClosedError):
                await asyncio.wait_for(each, 10)

    asyncio.run(ask())


def test_the_first_program_with_a_nan_is_said_and_every_run_counts(decoder_dir, monkeypatch):
    said = []
    models = Models()
    odd_runs = models.odd_runs
    monkeypatch.setattr(served_loading, "say", said.append)
    with load(decoder_dir) as bundle:
        engine = Engine(bundle)
        served_loading.check_numbers("m", bundle, odd_runs)

        def ask():
            engine.submit([1, 2, 3], max_new_tokens=4, stop_token_ids=()).exception(60)

        record([("m", bundle, engine)], ask)  # which watches runs itself, until it ends
        ask()
        assert (said, dict(odd_runs)) == ([], {})
        spoil_weights(bundle)
        ask()
        once = odd_runs.total()
        ask()
        engine.close()
    assert odd_runs.total() > once > 0
    metrics = {metric.name: metric.samples for metric in EngineCollector(models).collect()}
    samples = metrics["prejit_odd_runs"]
    assert sum(sample.value for sample in samples) == odd_runs.total()
    assert {sample.labels["model_name"] for sample in samples} == {"m"}
    [text] = said
    assert "m: the first program that returns no numbers: decoder: " in text
    assert "expected numbers, found nan at " in text


def test_functions_may_return_infinities(bundle_dir):
    odd_runs = Counter()
    with load(bundle_dir) as bundle:
        served_loading.check_numbers("m", bundle, odd_runs)
        assert not np.isfinite(bundle.call("score", x=np.full((2, 16), np.inf, np.float32))).all()
    assert not odd_runs
