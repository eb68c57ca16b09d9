"""How a decoder is split over a mesh: what is split, and what devices send each other in the end."""

import itertools
import json
import re
from pathlib import Path

import pytest
from tests.extent import sampled
from tests.unit.compiler.models import small_models

from prejit.compiler.lowering.decoder import MeshSplit, lower_decoder
from prejit.compiler.manifest.specs import ProgramSpec
from prejit.compiler.models import config_file, model_registry
from prejit.compiler.models.decoder_matrices import check_mesh, shardings
from prejit.compiler.models.parameters import parametrized
from prejit.runtime.device.device import Device
from prejit.runtime.errors import ManifestError
from prejit.runtime.format.arrays import Array, Mesh

BATCH, COUNT, CONTEXT, WIDTH, VOCABULARY = 4, 8, 16, 64, 96
GPT2 = {
    **{**small_models.GPT2, "vocab_size": VOCABULARY, "n_positions": CONTEXT},
    **{"n_embd": WIDTH, "n_head": 8, "bos_token_id": 0, "eos_token_id": 1},
}
_SIZES = {
    **{**small_models.LLAMA, "vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT},
    **{"hidden_size": WIDTH, "intermediate_size": 160, "tie_word_embeddings": False},
    **{"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 8},
}
LLAMA = {**_SIZES, "attention_bias": True, "mlp_bias": True}
PHI3 = {**_SIZES, "model_type": "phi3", "head_dim": 4, "sliding_window": 5, "pad_token_id": 0}
GEMMA3 = {
    **{**_SIZES, "model_type": "gemma3_text", "attention_bias": True},
    "layer_types": ["sliding_attention", "full_attention"],
    "final_logit_softcapping": 30.0,
}
CONFIGS = {"gpt2": GPT2, "llama": LLAMA, "phi3": PHI3, "gemma3_text": GEMMA3}
SIZES = {"batch": BATCH, "context": CONTEXT}
SPECS = {
    "decode": ProgramSpec("decode", "decode", SIZES),
    "prefill": ProgramSpec("prefill", "prefill", {**SIZES, "prompt": COUNT}),
}
ROW, SQUARE = Mesh(1, 4), Mesh(2, 2)
SAMPLE = ((SQUARE, "llama", "prefill"),)


def model_of(config, directory):
    (directory / "config.json").write_text(json.dumps(config))
    loaded = config_file.load_config(directory)
    return model_registry.make_decoder(loaded), model_registry.describe(loaded)


def test_what_cannot_be_split_is_told(tmp_path):
    of_heads = r"m\.toml: mesh\.tensor: .* divisor of 8, the key/value .* found 3"
    of_width = r"divisor of 36, the model\.layers\.0\.mlp\.\w+ .*c\.json.* found 8"
    for tensor, inner, told, fitting in (
        (3, 160, of_heads, "1 or 2 or 4 or 8"),
        (8, 36, of_width, "1 or 2 or 4"),
    ):
        model, _ = model_of({**LLAMA, "intermediate_size": inner}, tmp_path)
        with pytest.raises(ManifestError, match=told) as caught:
            check_mesh(Mesh(1, tensor), model, Path("m.toml"), Path("c.json"))
        assert caught.value.hint == f"{fitting} would fit"


def _lowered(family, kind, mesh, directory):
    model, shape = model_of(CONFIGS[family], directory)
    split = MeshSplit(mesh, shardings(model, mesh))
    return lower_decoder(parametrized(model), shape, SPECS[kind], split=split)


@pytest.mark.parametrize(
    ("mesh", "family", "kind"),
    sampled(itertools.product((ROW, SQUARE), CONFIGS, SPECS), lambda case: case in SAMPLE),
    ids=str,
)
def test_devices_send_activations_alone(family, kind, mesh, tmp_path):
    lowered = _lowered(family, kind, mesh, tmp_path)
    compiled = Device("cpu", mesh).compile(lowered.portable, lowered.platforms, lowered.results)
    text = "\n".join(module.to_string() for module in compiled.loaded.hlo_modules())
    sent = re.findall(r"= \S+?\[([\d,]*)\]\S* (all-[a-z]+|collective-permute|reduce-s\w+)\(", text)
    rows, count = BATCH // mesh.data, COUNT if kind == "prefill" else 1
    hidden, last = f"{rows},{count},{WIDTH}", f"{rows},1,{WIDTH}"
    sums = [hidden] * 4 + [last]  # after the table, and two for each block
    if kind == "prefill":  # whose last block goes on with the last token of each row alone
        sums = [hidden] * 3 + [last] * 2
    gathered = [f"{rows},{VOCABULARY}"] + [f"{BATCH},{VOCABULARY}"] * (mesh.data > 1)
    if family == "gpt2":
        gathered += [f"{rows},{count},{3 * WIDTH}"] * 2
    if family == "phi3":  # queries, keys and values; gate and up, at last of wanted tokens
        gathered += [f"{rows},{count},{2 * WIDTH}"] * 2
        gathered += [f"{rows},{count},{2 * 160}", f"{rows},1,{2 * 160}"]
    tokens = f"{BATCH}"  # and positions: each row of the mesh made its own
    assert sorted(shape for shape, how in sent if how == "all-reduce") == sorted(sums)
    others = [shape for shape, how in sent if how != "all-reduce" and shape != tokens]
    assert sorted(others) == sorted(gathered)


def test_the_program_table_says_what_is_split_and_one_device_has_no_mesh(tmp_path):
    lowered = _lowered("llama", "decode", Mesh(2, 2), tmp_path)
    cache = [a for a in lowered.arguments if a.path[0] == "cache"]
    others, results = [a for a in lowered.arguments if a not in cache], lowered.results
    assert {a.sharding for a in cache} == {("data", "tensor", "", "")}
    assert {r.sharding for r in results[-len(cache) :]} == {("data", "tensor", "", "")}
    assert {each.sharding for each in (*others, *results[: -len(cache)])} == {()}
    assert [str(r) for r in results[:2]] == ['["token"] int32[4]', '["position"] int32[4]']
    assert [Array.parse(str(r)) for r in results] == list(results)
    model, shape = model_of(LLAMA, tmp_path)
    lowered = lower_decoder(parametrized(model), shape, SPECS["decode"])
    assert lowered.weight_shardings == {}
    assert b"sharding" not in lowered.portable
    assert all(a.sharding == () for a in (*lowered.arguments, *lowered.results))
