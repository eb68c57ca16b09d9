"""A server names the first program that returns NaN, counts the others, and goes on."""

from collections import Counter

import numpy as np
from tests.odd_weights import spoil_weights

from prejit.runtime import load
from prejit.server import Engine
from prejit.server.served import number_checks
from prejit.server.served.number_checks import check_numbers
from prejit.server.served.served import Models
from prejit.server.telemetry.engine_profile import record
from prejit.server.telemetry.metrics_collector import EngineCollector


def test_the_first_program_with_a_nan_is_said_and_every_run_counts(decoder_dir, monkeypatch):
    said = []
    models = Models()
    odd_runs = models.odd_runs
    monkeypatch.setattr(number_checks, "say", said.append)
    with load(decoder_dir) as bundle:
        engine = Engine(bundle)
        check_numbers("m", bundle, odd_runs)

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
    metric = next(
        each for each in EngineCollector(models).collect() if each.name == "prejit_odd_runs"
    )
    assert sum(sample.value for sample in metric.samples) == odd_runs.total()
    assert {sample.labels["model_name"] for sample in metric.samples} == {"m"}
    [text] = said
    assert "m: the first program that returns no numbers: decoder: " in text
    assert "expected numbers, found nan at " in text


def test_functions_may_return_infinities(bundle_dir, monkeypatch):
    odd_runs = Counter()
    with load(bundle_dir) as bundle:
        check_numbers("m", bundle, odd_runs)
        assert not np.isfinite(bundle.call("score", x=np.full((2, 16), np.inf, np.float32))).all()
    assert not odd_runs
