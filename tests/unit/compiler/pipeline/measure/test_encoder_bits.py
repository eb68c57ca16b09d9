"""Matrices of an encoder get more bits where a sentence needs them, and no others."""

from types import SimpleNamespace

import numpy as np
from tests.encoders import bert_config
from tests.parity.encoder_cases import Case

from prejit.compiler.checkpoint.checkpoint import open_encoder
from prejit.compiler.models import config_file, model_registry, published_integers, quantizing
from prejit.compiler.pipeline.measure.encoder_bits import MOST_COST, MatrixPlace, Trials, choose
from prejit.compiler.pipeline.measure.model_comparison import cosines

INT4 = ("int4", "int8", "bfloat16", "float32")
UP = MatrixPlace(4000, INT4)
PLACES = {"down": UP, "table": MatrixPlace(9000, INT4[1:]), "up": UP}
COSTS = {("down", "int4"): 50e-4, ("up", "int4"): 3e-4, ("up", "int8"): 1e-4}


def costing(costs, asked, noise=0.0):
    """Return the costs of two sentences. They add up, and the second loses half as much."""

    def cost_of(dtypes):
        asked.append(dict(dtypes))
        total = sum(costs.get(each, 0.0) for each in dtypes.items())
        return np.array([total, total / 2]) * (1 + noise * len(asked))

    return cost_of


def test_the_fewest_bits_stay_where_no_sentence_loses_much():
    asked = []
    found = choose(PLACES, costing({("down", "int4"): MOST_COST}, asked))
    assert found == {"down": "int4", "table": "int8", "up": "int4"} == asked[0]
    assert len(asked) == 1, "a whole encoder is enough to know"
    cost_of = costing({("up", "int4"): 5e-4}, [])
    assert choose(PLACES, cost_of)["up"] == "int4"
    found = choose(PLACES, cost_of, 4e-4)  # where no text decides, int4 may lose less
    assert found == {"down": "int4", "table": "int8", "up": "int8"}


def test_the_matrix_that_loses_most_gets_more_bits_on_every_machine():
    for noise in (0.0, 1e-6, -1e-6):
        found = choose(PLACES, costing(COSTS, [], noise))
        assert found == {"down": "int8", "table": "int8", "up": "int4"}

    def cost_of(dtypes):  # costs that do not add up are seen in the whole
        both = len(dtypes) > 1 and dtypes["up"] == "int4"
        return costing(COSTS, [])(dtypes) + 10e-4 * both

    assert choose(PLACES, cost_of)["up"] == "int8"


def test_float32_is_for_encoders_that_lose_in_bfloat16_or_that_nothing_helps():
    costs = COSTS | {("down", "bfloat16"): 4e-5, ("down", "int8"): 6e-4}
    assert choose(PLACES, costing(costs, []))["down"] == "bfloat16"
    costs["down", "bfloat16"] = 55e-5
    found = choose(PLACES, costing(costs, []))
    assert found == {"down": "float32", "table": "int8", "up": "bfloat16"}
    found = choose(PLACES, lambda dtypes: np.array([np.inf if len(dtypes) > 1 else 1e-4]))
    assert {*found.values()} == {"float32"}


def test_zeros_lose_nothing_where_they_stay_zeros():
    zeros, ones = np.zeros(3), np.ones(3)
    found = cosines(np.array([zeros, zeros, ones, ones]), np.array([zeros, ones, zeros, 2 * ones]))
    np.testing.assert_allclose(found, [1, 0, 0, 1])


def test_places_are_matrices_but_published_ones_and_unseen_heads_are_int8(tmp_path, monkeypatch):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    Case("bert", bert_config(**sizes, num_hidden_layers=2), seed=0).write(tmp_path)
    checkpoint, source = open_encoder(tmp_path, out_in=True), config_file.load_encoder(tmp_path)
    module = model_registry.make_encoder(source, "int4", out_in=True)
    model = SimpleNamespace(module=module)
    trials = Trials(model, checkpoint, np.ones((300, 90), np.int32), np.full(300, 90))
    assert (trials.tokens.shape, {*trials.length}) == ((256, 32), {32})
    places = trials.places()
    up = "bert.encoder.layer.*.intermediate.dense.weight"
    assert places[up] == MatrixPlace(2 * 64 * 96, INT4)
    assert places["bert.embeddings.word_embeddings.weight"] == MatrixPlace(30 * 64, INT4[1:])
    assert len(places) == 9
    module.heads = (("sparse", "bert"),)
    assert trials.places()[up].dtypes == ("int8",)
    monkeypatch.setattr(published_integers, "has_few_bits", lambda rows: rows.shape == (96, 64))
    assert places.keys() - trials.places().keys() == {up}


def test_a_chosen_dtype_is_that_of_a_matrix_in_all_layers(tmp_path):
    Case("bert", bert_config(num_hidden_layers=2), seed=0).write(tmp_path)
    source = config_file.load_encoder(tmp_path)
    chosen = {"bert.encoder.layer.*.output.dense.weight": "bfloat16"}
    module = model_registry.make_encoder(source, "int8", out_in=True, chosen=chosen)
    dtypes = quantizing.stored_dtypes(module)
    assert [name for name, dtype in dtypes.items() if dtype == "bfloat16"] == [
        f"bert.encoder.layer.{layer}.output.dense.weight" for layer in range(2)
    ]
    assert quantizing.described(module) == "13 int8 and 2 bfloat16 (11.5 bits)"
    chosen["bert.embeddings.word_embeddings.weight"] = "float32"
    wide = model_registry.make_encoder(source, "int8", out_in=True, chosen=chosen)
    assert quantizing.described(wide) == "12 int8, 2 bfloat16 and 1 float32 (13.8 bits)"
    exact = model_registry.make_encoder(source, out_in=True)
    quantizing.imitate(exact, module)
    layer = exact.transformer.encoder.layer[1]
    assert (layer.output.dense.imitated, layer.intermediate.dense.imitated) == ("bfloat16", "int8")
    assert quantizing.described(model_registry.make_encoder(source, "int8")) == "int8"
    assert quantizing.described(exact) == "float32"
