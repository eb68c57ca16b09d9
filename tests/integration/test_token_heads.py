"""BGE-M3's heads of tokens, from a bundle and from an engine."""

import json

import numpy as np
import pytest
from tests.encoders import write_heads

from prejit.compiler.models.families.token_heads import token_heads
from prejit.runtime.errors import CheckpointError

pytestmark = pytest.mark.thorough

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
def bundle(of_letters):
    keys = 'shapes = [[1, 8], [4, 16]]\nheads = ["sparse", "multi_vector"]'
    return of_letters("heads", write_heads, keys)


def check(encoded, order=(0, 1, 2)):
    for found, place in zip(encoded.lexical_weights, order, strict=True):
        assert found == pytest.approx(WEIGHTS[place], rel=1e-5)
    vectors = dict(zip(order, encoded.token_vectors, strict=True))
    assert [len(vectors[place]) for place in range(3)] == [4, 2, 7]
    np.testing.assert_allclose(vectors[1][0], VECTOR, atol=1e-5)
    query, document = vectors[0], vectors[2]
    assert (query @ document.T).max(1).mean() == pytest.approx(SCORE, rel=1e-5)


def test_weights_and_vectors_of_tokens_are_those_of_flagembedding(bundle):
    check(bundle.encode_batch(TEXTS))
    np.testing.assert_array_equal(bundle.encode(TEXTS), bundle.encode_batch(TEXTS).embeddings)


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
