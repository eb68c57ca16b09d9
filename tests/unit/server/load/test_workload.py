"""The load is what was asked for: its rate, its bursts, its lengths, and the same for the same seed."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prejit.runtime.errors import StoreError, UsageError
from prejit.server.load.workload import DrawnLoad, Lengths, LoggedLoad, arrival_times


def drawn(api="completions", **options):
    values = {"burstiness": 1.0, "prompt": Lengths(8, 8), "new": Lengths(4, 16)}
    return DrawnLoad(api, "demo", **{**values, **options})


def bodies(load, count=50, seed=0):
    return [json.loads(each.body) for each in load.requests(count, np.random.default_rng(seed))]


@given(st.floats(0.01, 1e4), st.integers(2, 500), st.integers(1, 1000), st.integers(0, 1000))
def test_the_rate_of_a_window_is_exact_and_lengths_are_within_bounds(rate, count, least, more):
    generator = np.random.default_rng(more)
    times = arrival_times(
        drawn(burstiness=(0.25, 1.0, 100.0)[count % 3]).gaps(count, generator), rate
    )
    assert times[-1] == pytest.approx(count / rate)
    assert (np.diff(times) >= 0).all()
    found = [Lengths(least, least + more).draw(generator) for _ in range(50)]
    assert least <= min(found) <= max(found) <= least + more


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_the_variation_of_gaps_is_that_of_the_gamma_distribution(burstiness):
    gaps = drawn(burstiness=burstiness).gaps(20_000, np.random.default_rng(1))
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_the_same_seed_gives_the_same_requests_a_share_of_which_begins_alike():
    load = drawn(prompt=Lengths(4, 64))
    assert bodies(load) == bodies(load)
    assert bodies(load, seed=1) != bodies(load)
    longer = bodies(load, 60)
    assert longer[:50] == bodies(load)  # a higher rate sends the same ones, and more
    load = drawn(prefix_tokens=20, prefix_share=0.7, words_per_token=2.0)
    prompts = [each["prompt"] for each in bodies(load, 300)]
    assert len(set(prompts)) == 300
    prefix = max(prompts, key=len)[: len(" ".join(max(prompts, key=len).split()[:40]))]
    share = sum(each.startswith(prefix) for each in prompts) / len(prompts)
    assert share == pytest.approx(0.7, abs=0.1)
    assert {len(each.split()) for each in prompts} == {16, 56}


def test_each_api_has_its_body():
    [chat] = bodies(drawn("chat", prefix_tokens=3), 1)
    assert [each["role"] for each in chat["messages"]] == ["system", "user"]
    assert chat["stream"] is True
    assert chat["stream_options"] == {"include_usage": True}
    [short] = bodies(drawn("chat", prompt=Lengths(1, 1), words_per_token=0.1), 1)
    assert short["messages"][0]["content"].strip()
    [whole] = bodies(drawn(is_streamed=False, more={"ignore_eos": True}), 1)
    assert "stream" not in whole
    assert whole["ignore_eos"] is True
    [embedding] = bodies(drawn("embeddings"), 1)
    assert embedding.keys() == {"model", "input"}
    inputs = [
        {"name": "x", "datatype": "FP32", "shape": [-1, 3]},
        {"name": "mask", "datatype": "BOOL", "shape": [2]},
        {"name": "ids", "datatype": "INT64", "shape": [2]},
    ]
    [request] = drawn("infer", inputs=inputs, rows=4).requests(1, np.random.default_rng(0))
    assert request.path == "/v2/models/demo/infer"
    x, mask, ids = json.loads(request.body)["inputs"]
    assert (x["shape"], len(x["data"])) == ([4, 3], 12)
    assert {type(each) for each in mask["data"]} == {bool}
    assert {type(each) for each in ids["data"]} == {int}


def line(time, body, **changed):
    """Return the line of a request that began at a time, and took two seconds."""
    return {
        **{"event": "request", "time": time + 2.0, "seconds": 2.0, "method": "POST"},
        **{"path": "/v1/completions", "status": 200, "body": body},
        **{"headers": {"content-type": "application/json"}, "calls": [{"kind": "generate"}]},
        **changed,
    }


def test_a_log_is_refused_or_gives_its_requests_in_its_own_pattern(tmp_path):
    log = tmp_path / "log.jsonl"
    with pytest.raises(StoreError, match="cannot read the log"):
        LoggedLoad(str(log))
    for only, message in (
        ({"event": "request"}, "found another one: KeyError"),
        (line(1.0, "{}"), "at least 2 answered requests"),
    ):
        log.write_text(json.dumps(only) + "\n")
        with pytest.raises(UsageError, match=message):
            LoggedLoad(str(log))
    lines = [
        {"event": "start", "models": []},
        line(103.0, '{"stream":true}'),
        line(100.0, '{"prompt":"a"}'),
        line(101.0, "no JSON"),
        line(101.5, "{}", status=429),
        line(101.6, "{}", calls=[]),
    ]
    log.write_text("".join(json.dumps(each) + "\n" for each in lines) + '{"event":"requ')
    load = LoggedLoad(str(log))
    assert load.rate == pytest.approx(2 / 3)
    assert not load.is_streamed
    generator = np.random.default_rng(0)
    found = load.requests(4, generator)
    first, streamed = b'{"prompt":"a"}', b'{"stream":true}'
    assert [each.body for each in found] == [first, b"no JSON", streamed, first]
    assert [each.is_streamed for each in found] == [False, False, True, False]
    for rate, gaps in ((load.rate, [1.0, 2.0]), (2 * load.rate, [0.5, 1.0])):
        times = arrival_times(load.gaps(3, generator), rate)
        assert np.diff(times).tolist() == pytest.approx(gaps)
