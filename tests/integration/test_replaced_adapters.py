"""Requests whose adapter is unloaded, or replaced by another of its name, between their calls."""

import httpx
import pytest
from tests.unit.server.running import running, served

from prejit.runtime import load
from prejit.server.gate.server_settings import Settings
from prejit.server.openai import completions
from prejit.server.served.served import Models

from .test_run_time_adapters import BUCKETS, RANK, SLOTS, write


@pytest.mark.thorough
def test_all_of_a_request_has_the_adapter_that_it_chose(make_decoder, tmp_path, monkeypatch):
    """Another one has its name before its prompt is scored, and none before its text is written."""
    first, second = (write(tmp_path / str(seed), seed) for seed in range(2))
    score, asked = completions.scores_of_prompts, {"model": "a", "prompt": [5, 6, 7]}
    asked |= {"temperature": 0, "logprobs": 0, "prompt_logprobs": 0}
    path = make_decoder("gpt2", **BUCKETS, adapters=(SLOTS, RANK))
    with load(path, on_mismatch="error") as bundle:
        adapters, model = bundle.adapters, served(bundle, "m")
        adapters.load("a", first)

        async def score_late(*given):
            adapters.unload("a")
            adapters.load("a", second)
            found = await score(*given)
            adapters.unload("a")
            return found

        with running(Models(model), Settings()) as server:
            url = f"{server.url}/v1/completions"
            expected = httpx.post(url, json=asked, timeout=60).json()["choices"]
            monkeypatch.setattr(completions, "scores_of_prompts", score_late)
            found = httpx.post(url, json=asked, timeout=60).json()
        model.close()
    assert found.get("choices") == expected, found
