"""How far an answer may be from the golden one."""

from types import SimpleNamespace

import pytest

from prejit.compiler.pipeline.measure.golden_answers import _tolerance


@pytest.mark.parametrize(
    ("dtypes", "model", "exponent"),
    [
        ({"layers.0.q": "float32"}, "decoder", 8),
        ({"layers.0.q": "bfloat16"}, "decoder", 5),
        ({"layers.0.q": "int8"}, "encoder", 5),
        ({"layers.0.q": "int8", "layers.0.norm": "float32"}, "decoder", 3),
        ({"layers.0.mlp.experts.down": "int8"}, "decoder", 2),
    ],
)
def test_answers_of_fewer_bits_may_differ_more(dtypes, model, exponent):
    config = SimpleNamespace(
        decoder=model == "decoder",
        encoder=model == "encoder",
        weight_sets={"": (), "weights": tuple(dtypes)},
        requirement=SimpleNamespace(platform="cpu"),
    )
    program = SimpleNamespace(weights="weights", arguments=(), results=())
    assert _tolerance(config, program, dtypes) == exponent
