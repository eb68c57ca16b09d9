"""Causal models that score, from bundles and over HTTP. The scores are those of sentence-transformers 6.2."""

import numpy as np
import pytest
from tests.encoders import write_answers_modules, write_causal
from tests.manifests import encoder_manifest

from prejit.runtime import TruncationWarning, UsageError, load

pytestmark = pytest.mark.thorough

QUERY = "a b"
LONG = "a b c d e f g h i j k l m n o p q r s t"
DOCUMENTS = ["b c", "q r s t", "a", LONG]
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
def models(scorers):
    """The scorer with modules and the one with a head, served."""
    from prejit.server.engine.engine import Engine
    from prejit.server.served.served import Models, Served

    loaded = {"scorer": scorers("modules"), "head": scorers("head")}
    made = Models(*(Served(name, each, Engine(each), 1) for name, each in loaded.items()))
    yield made
    made.close()


@pytest.mark.parametrize("name", ["modules", "table"])
def test_scores_are_the_logits_of_answers_behind_the_template(scorers, name):
    scorer = scorers(name)
    with pytest.warns(TruncationWarning, match="1 of 4 pairs are longer than 16 tokens"):
        found = scorer.score(QUERY, DOCUMENTS)

    def as_given(scores):
        # Without a file that says the activation, it is the sigmoid.
        return scores if name == "modules" else np.log(scores / (1 - scores))

    np.testing.assert_allclose(as_given(found), ANSWERS, atol=2e-5)
    told = as_given(scorer.score(QUERY, DOCUMENTS[:3], instruction="k k"))
    np.testing.assert_allclose(told, INSTRUCTED, atol=2e-5)
    with pytest.raises(UsageError, match="query: expected a text, found none"):
        scorer.score(None, DOCUMENTS)


def test_a_head_scores_at_the_last_token_that_is_no_padding(scorers):
    scorer = scorers("head")
    with pytest.warns(TruncationWarning):
        np.testing.assert_allclose(scorer.score(QUERY, DOCUMENTS), HEAD, atol=1e-5)
    with pytest.raises(UsageError, match="instruction: expected none"):
        scorer.score(QUERY, DOCUMENTS, instruction="k k")


def test_the_server_takes_an_instruction(post):
    body = {"model": "scorer", "query": QUERY, "documents": DOCUMENTS[:3], "instruction": "k k"}
    found = post("/v1/rerank", body).json()["results"]
    assert [each["index"] for each in found] == [1, 2, 0]
    ranked = sorted(INSTRUCTED, reverse=True)
    np.testing.assert_allclose([each["relevance_score"] for each in found], ranked, atol=2e-5)
    answer = post("/v1/rerank", {**body, "model": "head"})
    assert answer.status_code == 400
    assert "'head' has no place for one" in answer.text
