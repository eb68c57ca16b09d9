"""`SentenceEncoder` beside what sentence-transformers' `SentenceTransformer` returns for the same calls."""

import numpy as np
import pytest

from prejit.runtime import UsageError, load
from prejit.runtime.adapters.sentence_encoder import SentenceEncoder

TEXTS = ["a b c", "d", "a b", "c c c c", "e f g"]


@pytest.fixture(scope="module")
def model(encoder_dir):
    prompts = {"query": "q ", "passage": "p "}
    return SentenceEncoder(encoder_dir, prompts=prompts, on_mismatch="error")


def test_encode_has_the_results_and_forms_of_sentence_transformers(model, encoder_dir, capsys):
    expected = load(encoder_dir).encode(TEXTS)
    found = model.encode(TEXTS)
    np.testing.assert_array_equal(found, expected)
    assert model.encode(TEXTS[0]).shape == (model.get_sentence_embedding_dimension(),)
    assert model.encode([]).shape == (0, expected.shape[1])
    listed = model.encode(TEXTS, convert_to_numpy=False)
    assert isinstance(listed, list)
    np.testing.assert_array_equal(np.stack(listed), expected)
    assert not capsys.readouterr().err
    by_two = model.encode(TEXTS, batch_size=2, show_progress_bar=True)
    np.testing.assert_allclose(by_two, expected, atol=1e-6)
    assert capsys.readouterr().err.split() == ["2/5", "4/5", "5/5"]


def test_vectors_are_cut_before_they_get_length_one(model):
    whole = model.encode(TEXTS)
    cut = model.encode(TEXTS, truncate_dim=3, normalize_embeddings=True)
    expected = whole[:, :3] / np.linalg.norm(whole[:, :3], axis=1, keepdims=True)
    np.testing.assert_allclose(cut, expected, atol=1e-6)


def test_prompts_stand_before_sentences(model):
    wanted = model.encode("q a b")
    ways = [model.encode("a b", **given) for given in ({"prompt_name": "query"}, {"prompt": "q "})]
    for found in (*ways, model.encode_query("a b")):
        np.testing.assert_array_equal(found, wanted)
    # as there: the empty prompt `document` comes before one named `passage`
    np.testing.assert_array_equal(model.encode_document("a b"), model.encode("a b"))
    given = {"prompt_name": "passage"}
    np.testing.assert_array_equal(model.encode_document("a b", **given), model.encode("p a b"))


def test_a_task_without_a_prompt_of_its_own_gets_none_and_not_the_default(model):
    other = SentenceEncoder(model.bundle, prompts={"q": "q "}, default_prompt_name="q")
    np.testing.assert_array_equal(other.encode("a b"), model.encode("q a b"))
    for encode in (other.encode_query, other.encode_document):
        np.testing.assert_array_equal(encode("a b"), model.encode("a b"))
        np.testing.assert_array_equal(encode("a b", prompt_name="q"), model.encode("q a b"))


FORMULAS = {
    "cosine": lambda a, b: a @ b / np.linalg.norm(a) / np.linalg.norm(b),
    "dot": lambda a, b: a @ b,
    "euclidean": lambda a, b: -np.sqrt(((a - b) ** 2).sum()),
    "manhattan": lambda a, b: -np.abs(a - b).sum(),
}


@pytest.mark.parametrize(("name", "formula"), FORMULAS.items())
def test_similarity_is_that_of_each_pair(model, name, formula):
    other = SentenceEncoder(model.bundle, similarity_fn_name=name)
    some = np.random.default_rng(1).standard_normal((3, 5), np.float32)
    more = np.random.default_rng(2).standard_normal((2, 5), np.float32)
    expected = [[formula(a, b) for b in more] for a in some]
    np.testing.assert_allclose(other.similarity(some, more), expected, rtol=1e-5)
    pairs = other.similarity_pairwise(some[:2], more)
    np.testing.assert_allclose(pairs, [expected[0][0], expected[1][1]], rtol=1e-5)
    assert other.similarity(some[0], more).shape == (1, 2)


def test_what_a_bundle_cannot_do_is_an_error(model):
    for options, why in (
        ({"convert_to_tensor": True}, "convert_to_tensor: expected False"),
        ({"precision": "int8"}, "precision: expected 'float32', found 'int8'"),
        ({"output_value": "token_embeddings"}, "output_value: expected 'sentence_embedding'"),
        ({"prompt_name": "qery"}, "expected 'query' or 'document' or 'passage', found 'qery'"),
    ):
        with pytest.raises(UsageError, match=why):
            model.encode("a", **options)
