"""Embeddings of encoders in int8 and int4 keep a cosine of 0.999 to those of torch in float32."""

import json
import re

import numpy as np
import pytest
from tests.extent import cases
from tests.manifests import encoder_manifest
from tests.parity.encoder_family_cases import WIDE_REFERENCE, wide_cases
from tests.parity.test_encoder_families import write

from prejit.runtime import load

pytestmark = pytest.mark.thorough

MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
]
WIDE = {case.name: case for case in wide_cases()}


@pytest.mark.parametrize(
    ("name", "dtype"),
    cases([("qwen3", "int4")], others=[("qwen3", "int8"), ("bert", "int4"), ("bert", "int8")]),
)
def test_an_encoder_in_few_bits_keeps_its_cosine(run, tmp_path, name, dtype):
    case, model = WIDE[name], tmp_path / "model"
    write(case, model)
    (model / "modules.json").write_text(json.dumps(MODULES))
    (model / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True}
    (model / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    stored = f'dtype = "{dtype}"'
    manifest = encoder_manifest(tmp_path / "m.toml", "shapes = [[4, 32]]", model=stored)
    built = run("build", manifest, "-o", tmp_path, "--json", quick=True)
    [told] = json.loads(built.stdout)
    texts = [row[:length] for row, length in zip(case.tokens, case.lengths, strict=True)]
    with load(tmp_path / "m", on_mismatch="error") as bundle:
        found = bundle.encode(texts)
    with np.load(WIDE_REFERENCE) as recorded:
        expected = recorded[name]
    lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    cosine = (found * expected).sum(1) / lengths
    assert 0.999 <= cosine.min() < 0.99999
    accuracy = told["accuracy"]
    assert 999_000 <= accuracy["cosine_millionths"] < 1_000_000
    # All of them in int8 lose too much, which the build says everywhere.
    assert re.fullmatch(r"(\d+ int8 and \d+ )?bfloat16( \(\d+\.\d bits\))?", accuracy["weights"])
    assert f"stored matrices as {accuracy['weights']}" in told["int4"]
    shown = run("inspect", tmp_path / "m").stdout
    assert f"{accuracy['weights']} weights" in shown
    assert "least cosine of embeddings" in shown
    again = json.loads(run("build", manifest, "-o", tmp_path, "--json", quick=True).stdout)[0]
    assert (again["digest"], again["compiled"]) == (told["digest"], 0)
    assert "3 cached, 0 to compile" in run("plan", manifest, quick=True).stdout
