"""A cross-encoder, from its bundle and over HTTP. The scores are those of sentence-transformers 6.2."""

import numpy as np
import pytest
from tests.encoders import write_scorer
from tests.manifests import encoder_manifest

from prejit.runtime import ContextError, TruncationWarning, UsageError

pytestmark = pytest.mark.thorough

QUERY = "a b"
LONG = "a b c d e f g h i j k l m n o p q r s t"
DOCUMENTS = ["b c", "q r s t", "a", LONG]
SCORES = [0.38731816, 0.49214369, 0.85673267, 0.39725924]
"""CrossEncoder.predict of the pairs; the last one is cut to 16 tokens."""


@pytest.fixture(scope="session")
def scorer(of_letters):
    return of_letters("scorer", write_scorer, "shapes = [[1, 8], [4, 16]]")


@pytest.fixture(scope="module")
def models(scorer):
    """The scorer, served as `scorer`: the server and the client of conftest.py have no other model."""
    from prejit.server.engine.engine import Engine
    from prejit.server.served.served import Models, Served

    made = Models(Served("scorer", scorer, Engine(scorer), 1_700_000_000))
    yield made
    made.close()


def test_scores_are_those_of_sentence_transformers(scorer):
    with pytest.warns(
        TruncationWarning, match=r"1 of 4 pairs are longer than 16 tokens.* number 3"
    ):
        found = scorer.score(QUERY, DOCUMENTS)
    np.testing.assert_allclose(found, SCORES, atol=1e-5)
    one = scorer.score([QUERY], "b c")  # one text is as good as a list of one
    np.testing.assert_allclose(one, SCORES[:1], atol=1e-5)
    assert scorer.score(QUERY, []).shape == (0,)
    alone = scorer.score(None, ["b c", "a"])
    assert alone.shape == (2,)
    assert np.abs(alone - scorer.score("", ["b c", "a"])).min() > 1e-4, "no query is no empty query"


def test_packed_batches_are_for_models_that_embed(run, tmp_path):
    (tmp_path / "model").mkdir()
    write_scorer(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{")  # which takes longer to try
    manifest = encoder_manifest(tmp_path / "m.toml", "packed = [64]")
    said = run("build", manifest, "-o", tmp_path, quick=True, status=2).stderr
    assert "encode.packed: expected a model that embeds texts, of bert" in said
    assert "found bert that scores" in said
    assert "hint: leave packed out" in said


def test_what_cannot_be_scored_is_an_error(scorer, encoder_bundle):
    with pytest.raises(ContextError, match="pairs of at most 16 tokens: 1 of 1 pairs"):
        scorer.score(QUERY, LONG, on_too_long="error")
    for query, documents, why in (
        ([QUERY] * 3, DOCUMENTS, r"query: expected one text, or 4 as documents has, found 3"),
        (QUERY, [[2, 3]], r"documents\[0\]: expected"),
        (QUERY, ["\ud800"], "cannot encode|Unicode|fails on"),
    ):
        with pytest.raises(UsageError, match=why):
            scorer.score(query, documents)
    with pytest.raises(UsageError, match="found one that scores pairs"):
        scorer.encode("a")
    with pytest.raises(UsageError, match="found one that embeds"):
        encoder_bundle.score("a", "b")


@pytest.mark.filterwarnings("ignore::prejit.runtime.errors.TruncationWarning")
def test_the_server_ranks_and_scores_by_the_cross_encoder(post):
    body = {"model": "scorer", "query": QUERY, "documents": [*DOCUMENTS[:2], {"text": "a"}]}
    found = post("/v1/rerank", {**body, "top_n": 2}).json()
    assert [each["index"] for each in found["results"]] == [2, 1]
    scores = [each["relevance_score"] for each in found["results"]]
    np.testing.assert_allclose(scores, [SCORES[2], SCORES[1]], atol=1e-5)
    assert found["usage"]["total_tokens"] == 7 + 9 + 6
    pair = {"model": "scorer", "text_1": [QUERY, QUERY], "text_2": DOCUMENTS[:2]}
    data = post("/v1/score", pair).json()["data"]
    np.testing.assert_allclose([each["score"] for each in data], SCORES[:2], atol=1e-5)
    for path, wrong, why in (
        ("/v1/rerank", {**body, "documents": [LONG]}, "at most 16 tokens"),
        ("/v1/rerank", {**body, "top_n": -1}, "top_n"),
        ("/v1/embeddings", {"model": "scorer", "input": "a"}, "which scores pairs of texts"),
    ):
        answer = post(path, wrong)
        assert (answer.status_code, why in answer.text) == (400, True), answer.text
    cut = {**body, "documents": [LONG], "truncate_prompt_tokens": -1}
    (ranked,) = post("/rerank", cut).json()["results"]
    assert abs(ranked["relevance_score"] - SCORES[3]) < 1e-5
