"""Models that score pairs of texts or give heads of tokens, from bundles and over HTTP."""

import json

import numpy as np
import pytest
from tests.encoders import write_answers_modules, write_causal, write_heads, write_scorer
from tests.manifests import encoder_manifest

from prejit.compiler.models.families.sentence_layout import token_heads
from prejit.runtime import ContextError, TruncationWarning, UsageError, load
from prejit.runtime.errors import CheckpointError
from prejit.server.engine.engine import Engine
from prejit.server.served.served import Models, Served

pytestmark = pytest.mark.thorough

QUERY = "a b"
LONG = "a b c d e f g h i j k l m n o p q r s t"
DOCUMENTS = ["b c", "q r s t", "a", LONG]
SCORES = [0.38731816, 0.49214369, 0.85673267, 0.39725924]
"""CrossEncoder.predict of the pairs; the last one is cut to 16 tokens."""


@pytest.fixture(scope="session")
def scorer_dir(of_letters):
    return of_letters("scorer", write_scorer, "shapes = [[1, 8], [4, 16]]")


@pytest.fixture(scope="session")
def scorer(scorer_dir):
    return load(scorer_dir)


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


def test_a_scorer_is_profiled_and_measured(run, scorer_dir):
    assert "/pool" in run("profile", scorer_dir, "--seconds", "0.1").stdout
    said = run("bench", scorer_dir, "--runs", "1", "--seconds", "0.1").stdout
    assert "exec to first result" in said


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
    engine = Engine(scorer)
    for sentences, why in (
        (["ab", "cd"], r"sentences\[0\]: expected a pair .*, found 'ab'"),  # of two letters each
        ([("a", "b"), [1, 2, 3]], r"sentences\[1\]: expected a pair"),
        ([(None, "a"), ("b", "c")], r"query\[0\]: expected text"),
        ("ab", "sentences: expected a list of pairs"),
    ):
        with pytest.raises(UsageError, match=why):
            engine.submit_encode(sentences)
    engine.close()
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
        ("/v1/completions", {"model": "scorer", "prompt": "a"}, "documents to /v1/rerank"),
    ):
        answer = post(path, wrong)
        assert (answer.status_code, why in answer.text) == (400, True), answer.text
    cut = {**body, "documents": [LONG], "truncate_prompt_tokens": -1}
    (ranked,) = post("/rerank", cut).json()["results"]
    assert abs(ranked["relevance_score"] - SCORES[3]) < 1e-5


ANSWERS = [-0.19365348, 1.1003658, 0.4226965, 0.2076928]
"""CrossEncoder.predict of the pairs; the last one is cut to 16 tokens, which end as the template does."""
INSTRUCTED = [-1.743173, -1.32326, -1.595484]
"""CrossEncoder.predict of the first three pairs with prompt="k k"."""
HEAD = [0.5930293, 0.4519402, 0.4913863, 0.4429336]
"""Scores of a classification head. It reads the last token but [SEP], which ends texts and pads them."""
TABLE = """
[encode.answers]
yes = "y"
no = "n"
template = "x {instruction} q {query} d {document} e y w"
instruction = "f w"
"""


@pytest.fixture(scope="module")
def scorers(run, once):
    """Return what loads a bundle: of modules, of a table in the manifest, and of a head."""

    def make(directory):
        for name in ("modules", "table", "head"):
            (directory / name).mkdir()
            write_causal(directory / name, answers=name != "head")
            if name == "modules":
                write_answers_modules(directory / name)
            keys = "shapes = [[1, 8], [4, 16]]" + (TABLE if name == "table" else "")
            manifest = encoder_manifest(directory / f"{name}.toml", keys, source=name)
            run("build", manifest, "-o", directory / "out", quick=True)

    made = once("letters-answers", make) / "out"
    return lambda name: load(made / name)


@pytest.fixture(scope="module")
def models(scorer, scorers):
    """The cross-encoder, the scorer with modules and the one with a head, served."""
    loaded = {"scorer": scorer, "judge": scorers("modules"), "head": scorers("head")}
    made = Models(*(Served(name, each, Engine(each), 1) for name, each in loaded.items()))
    yield made
    made.close()


@pytest.mark.parametrize("name", ["modules", "table"])
def test_scores_are_the_logits_of_answers_behind_the_template(scorers, name):
    judge = scorers(name)
    with pytest.warns(TruncationWarning, match="1 of 4 pairs are longer than 16 tokens"):
        found = judge.score(QUERY, DOCUMENTS)

    def as_given(scores):
        # Without a file that says the activation, it is the sigmoid.
        return scores if name == "modules" else np.log(scores / (1 - scores))

    np.testing.assert_allclose(as_given(found), ANSWERS, atol=2e-5)
    told = as_given(judge.score(QUERY, DOCUMENTS[:3], instruction="k k"))
    np.testing.assert_allclose(told, INSTRUCTED, atol=2e-5)
    with pytest.raises(UsageError, match="query: expected a text, found none"):
        judge.score(None, DOCUMENTS)


def test_a_head_scores_at_the_last_token_that_is_no_padding(scorers):
    head = scorers("head")
    with pytest.warns(TruncationWarning):
        np.testing.assert_allclose(head.score(QUERY, DOCUMENTS), HEAD, atol=1e-5)
    with pytest.raises(UsageError, match="instruction: expected none"):
        head.score(QUERY, DOCUMENTS, instruction="k k")


def test_the_server_takes_an_instruction(post):
    body = {"model": "judge", "query": QUERY, "documents": DOCUMENTS[:3], "instruction": "k k"}
    found = post("/v1/rerank", body).json()["results"]
    assert [each["index"] for each in found] == [1, 2, 0]
    ranked = sorted(INSTRUCTED, reverse=True)
    np.testing.assert_allclose([each["relevance_score"] for each in found], ranked, atol=2e-5)
    answer = post("/v1/rerank", {**body, "model": "head"})
    assert answer.status_code == 400
    assert "'head' has no place for one" in answer.text


TEXTS = ["q b q", "c", "q r s t b a"]
WEIGHTS = (
    {20: 2.3139942},
    {6: 1.2025197},
    {20: 2.2533693, 21: 1.0172471, 22: 0.1705169, 23: 2.5831573, 5: 0.2528781},
)
"""As FlagEmbedding defines them, by torch: the largest of a token, without those of special tokens."""
VECTOR = [
    *(0.0533545, -0.4452505, 0.2440935, -0.2052647),
    *(-0.4235003, -0.4627869, -0.4922198, 0.2477612),
]
"""The vector of the second text's first token after [CLS]."""
SCORE = 0.8335326
"""FlagEmbedding's colbert_score of the first and the last text."""


@pytest.fixture(scope="module")
def heads(of_letters):
    keys = 'shapes = [[1, 8], [4, 16]]\nheads = ["sparse", "multi_vector"]'
    return load(of_letters("heads", write_heads, keys))


def check_heads(encoded, order=(0, 1, 2)):
    for found, place in zip(encoded.lexical_weights, order, strict=True):
        assert found == pytest.approx(WEIGHTS[place], rel=1e-5)
    vectors = dict(zip(order, encoded.token_vectors, strict=True))
    assert [len(vectors[place]) for place in range(3)] == [4, 2, 7]
    np.testing.assert_allclose(vectors[1][0], VECTOR, atol=1e-5)
    query, document = vectors[0], vectors[2]
    assert (query @ document.T).max(1).mean() == pytest.approx(SCORE, rel=1e-5)


def test_weights_and_vectors_of_tokens_are_those_of_flagembedding(heads):
    check_heads(heads.encode_batch(TEXTS))
    np.testing.assert_array_equal(heads.encode(TEXTS), heads.encode_batch(TEXTS).embeddings)


def test_tokens_without_weights_are_found_by_their_names(tmp_path):
    write_heads(tmp_path)
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text())
    _, expected = token_heads(tmp_path, tmp_path, ["sparse"])
    assert expected == (0, 1, 2, 3)
    file.write_text(json.dumps(content | {"added_tokens": []}))  # which transformers adds
    assert token_heads(tmp_path, tmp_path, ["sparse"])[1] == expected
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: expected cls_token"):
        token_heads(tmp_path, tmp_path, ["sparse"])


def test_an_engine_gives_each_caller_its_own(heads):
    engine = Engine(heads)
    futures = [engine.submit_encode(TEXTS[::-1]) for _ in range(3)]
    for future in futures:
        check_heads(future.result(), (2, 1, 0))
    engine.close()
