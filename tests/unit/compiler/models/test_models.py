"""The families of models: names, checkpoints, and what is refused. What a call does: test_model_calls.py."""

import contextlib
import json
import re
import tempfile
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from tests.campaigns.junk import mutated, to_json
from tests.extent import examples
from tests.parity import t5_cases, whisper_cases
from tests.parity.cases import cases
from tests.parity.encoder_cases import cases as encoder_cases
from tests.parity.sibling_cases import cases as siblings

from prejit.compiler.checkpoint.checkpoint import open_checkpoint
from prejit.compiler.models import config_file, model_registry
from prejit.compiler.models.decoder_matrices import check_mesh
from prejit.compiler.models.layers import rope
from prejit.compiler.models.parameters import parameters_of
from prejit.runtime.errors import CheckpointError, ManifestError
from prejit.runtime.format.arrays import Mesh

from .small_models import (
    CONFIGS,
    CONTEXT,
    GEMMA3,
    LLAMA,
    PLACES,
    T5,
    config,
    int32,
    made,
    model,
    read_module,
)

YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 10}
LONGROPE = {
    **{"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0]},
    **{"long_factor": [3.0, 5.0, 7.0], "original_max_position_embeddings": 10},
}
RAMP = {"rope_theta": 100.0, "beta_fast": 0.9, "beta_slow": 0.2}
LLAMA3 = {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LONGEST = "1" + "0" * 5000
_FULL, _PARTIAL, _NORMS = "full_attention", "partial_rotary_factor", "num_ln_in_parallel_attn"
_HEADS, _SLIDING = "per_layer_config", "sliding_attention"


def test_the_longest_context_chooses_longropes_factors():
    long = config({**LLAMA, "rope_scaling": LONGROPE})
    for context, factors in ((10, "short"), (11, "long"), (None, "long")):
        divisors = np.array(LONGROPE[f"{factors}_factor"])
        expected = rope.frequencies(config(LLAMA), 6).frequencies / divisors
        found = model_registry.make_decoder(long, context).model.layers[0].heads.rotary
        assert np.allclose(found.frequencies, expected, rtol=1e-6)


def _rotaries(values):
    layers = model_registry.make_decoder(config(deepcopy(values))).model.layers
    return [layer.heads.rotary for layer in layers]


@pytest.mark.parametrize("kind", [LLAMA3, {**YARN, **RAMP, "truncate": False}, LONGROPE])
def test_the_context_of_pretraining_beside_the_rope_parameters_counts(kind):
    key = "original_max_position_embeddings"
    inner, none = {**kind, key: 14}, {k: v for k, v in kind.items() if k != key}
    right = _rotaries({**LLAMA, "rope_scaling": inner})
    assert right != _rotaries({**LLAMA, "rope_scaling": kind})
    for scaling in (kind, none):
        assert _rotaries({**LLAMA, "rope_scaling": scaling, key: 14}) == right
    with pytest.raises(CheckpointError, match=f"json: {key}: expected an integer .* found null"):
        _rotaries({**LLAMA, "rope_scaling": kind, key: None})


def test_a_pair_that_is_fast_and_slow_turns_slower_by_the_factor():
    """As in transformers, which warns of such a configuration and takes it."""
    scaling = {**LLAMA3, "low_freq_factor": 99.0, "high_freq_factor": 0.001}
    twisted = config({**LLAMA, "rope_scaling": scaling})
    slow = np.array(rope.frequencies(config(LLAMA), 6).frequencies) / LLAMA3["factor"]
    np.testing.assert_allclose(rope.frequencies(twisted, 6).frequencies, slow, rtol=1e-6)


def test_yarns_truncate_counts_beside_the_parts_for_kinds_of_layers():
    full = {**YARN, **RAMP}
    parts = {"full_attention": full, "sliding_attention": {"rope_type": "default"}}
    right = _rotaries({**GEMMA3, "rope_parameters": parts})
    inside = {**parts, "full_attention": {**full, "truncate": False}}
    assert _rotaries({**GEMMA3, "rope_parameters": inside}) == right
    assert _rotaries({**GEMMA3, "rope_parameters": {**parts, "truncate": False}}) != right


def test_the_text_model_of_one_that_reads_images_is_taken(tmp_path):
    both = {"model_type": "gemma3", "text_config": GEMMA3, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(both))
    loaded = config_file.load_config(tmp_path)
    assert model_registry.describe(loaded) == model_registry.describe(config(GEMMA3))
    names = parameters_of(model_registry.make_decoder(loaded)).keys()
    assert {"lm_head.weight"} == names - model("gemma3_text").weights
    refused = {**both, "text_config": {**GEMMA3, "use_bidirectional_attention": True}}
    (tmp_path / "config.json").write_text(json.dumps(refused))
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path / "config.json"))):
        model_registry.describe(config_file.load_config(tmp_path))


@pytest.mark.parametrize("model", ["gemma4-0", "llama4_text-0"])
def test_the_text_part_of_a_later_model_is_read_as_published(model, tmp_path):
    """The text model under its longer names, beside towers, with keys that no layer reads."""
    (case,) = [case for case in siblings() if case.name == model]
    shapes = {
        name.replace("model.", "model.language_model.", 1): shape
        for name, shape in case.tensor_shapes.items()
    }
    kind, unread = "llama4", ["vision_model.x", "multi_modal_projector.x"]
    if case.config["model_type"] == "gemma4_text":
        unread = ["language_model.layers.4.self_attn.k_proj.weight", "vision_tower.x"]
        kind = "gemma4"
    tied = case.config["tie_word_embeddings"]
    text = case.config | ({"attn_temperature_tuning": 4} if kind == "llama4" else {})
    both = {"model_type": kind, "text_config": text, "tie_word_embeddings": tied}
    further = {f"model.{name}": (3, 3) for name in unread}
    replace(case, config=both, shapes=shapes | further).write(tmp_path)
    names = open_checkpoint(tmp_path).names
    assert len(names) == len(shapes.keys() - ({"lm_head.weight"} if tied else set()))
    made = model_registry.make_decoder(config_file.load_config(tmp_path))
    growths = {layer.heads.rotary.growth for layer in made.model.layers if layer.heads.rotary}
    assert growths == ({0.0, 0.5} if kind == "llama4" else {0.0})


def test_a_config_that_is_none_is_refused(tmp_path):
    rope = '{"rope_type": "llama3", "factor": 2.0}'
    file = tmp_path / "config.json"
    for text, said in (
        ("", "expected a file, found none"),
        ("{", "cannot read"),
        ("[]", "model_type: expected one of"),
        ('{"model_type": "lama"}', 'found "lama" (did you mean "llama"?)'),
        ('{"model_type": "gpt2", "n_head": "x"}', "n_head"),
        ('{"model_type": "gemma3", "text_config": 3}', "text_config: expected an object, found 3"),
        (f'{{"model_type": {"[" * 3000}{"]" * 3000}}}', "nested too deeply"),
        (f'{{"model_type": "gpt2", "n_head": {_LONGEST}}}', "cannot read"),
        ('{"model_type": "gpt2", "n_head": NaN}', "cannot read JSON: expected JSON, which has no"),
        ('{"model_type": "gpt2", "a": {"b": [1, -Infinity]}}', "no -Infinity, found at a.b[1]"),
        ('{"model_type": "\\ud800"}', "ud800"),
        ('{"model_type": "gpt2", "_name_or_path": [1], "n_head": 0}', "n_head"),
        ('{"model_type": "gpt2", "quantization_config": {"bits": 4}}', "quantization_config"),
        (f'{{"model_type": "llama", "rope_scaling": {rope}}}', "low_freq_factor"),
    ):
        if text:
            file.write_text(text)
        with pytest.raises(CheckpointError, match=re.escape(said)) as caught:
            config_file.load_config(tmp_path)
        assert str(file) in str(caught.value)


_UNUSABLE = [
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention: expected false, found true"),
    ("llama", {"num_key_value_heads": 3}, "num_attention_heads: expected a multiple of"),
    ("llama", {"head_dim": 3}, "head_dim: expected an even number, found 3"),
    ("llama", {"rope_scaling": {**YARN, "rope_type": "lama3"}}, '"lama3" (did you mean "llama3"?)'),
    ("mistral", {"sliding_window": 0}, "sliding_window: expected null or at least 1, found 0"),
    ("gemma3_text", {"sliding_window": None}, "sliding_window: expected a number, as layer_types"),
    ("gemma3_text", {"layer_types": [_FULL, "chunked_attention"]}, 'found "chunked_attention"'),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: expected null"),
    ("gemma4_text", {"num_kv_shared_layers": 4}, "num_kv_shared_layers: expected layers of each"),
    ("gemma4_text", {"num_experts": None}, "num_experts: expected a number for experts, found"),
    ("gemma4_text", {"use_double_wide_mlp": True}, "use_double_wide_mlp: expected false, found"),
    ("gemma4_text", {"vocab_size_per_layer_input": 28}, "input: expected at least vocab_size"),
    ("gemma4_text", {"use_bidirectional_attention": "all"}, "bidirectional_attention: expected"),
    ("gemma4_text", {_HEADS: {"0": {"head_dim": 8}}}, "per_layer_config: expected one head_dim of"),
    ("gemma4_text", {_HEADS: {"0": {"skip": []}}}, "per_layer_config.0.skip: expected no such key"),
    ("gemma4_text", {_HEADS: {"0": {"head_dim": 0}}}, "per_layer_config.0.head_dim: expected an"),
    ("phi3", {"partial_rotary_factor": 0.5}, "expected an even number, found 3"),
    ("llama", {"rope_scaling": {**LONGROPE, "long_factor": [2.0]}}, "expected 3 factors, one for"),
    ("llama", {"rope_scaling": {**YARN, _PARTIAL: 0.5}}, f"{_PARTIAL}: expected null or 1.0, f"),
    ("gpt2", {"n_head": 0}, "n_head: expected an integer from 1 to 16384, found 0"),
    ("gpt2", {"tie_word_embeddings": "no"}, "tie_word_embeddings: expected true or false"),
    ("llama", {"rope_theta": 0}, "rope_theta: expected a number from 1e-06 to 1e+12"),
    ("llama", {"rope_scaling": YARN, "rope_theta": 1.0}, "that give finite frequencies"),
    ("llama", {"rope_scaling": {**LONGROPE, "short_factor": [1.0, 0.0, 1.0]}}, "each a number"),
    ("gemma3_text", {"rope_parameters": {_FULL: 3}}, f"{_FULL}: expected an object or null"),
    *(
        ("llama", {"rope_scaling": {**LLAMA3, key: None}}, f"rope_scaling.{key}: expected a")
        for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    ),
    *(("gpt2", {"layer_types": value}, "json: layer_types: expected a") for value in (5, [[]])),
    ("qwen3_moe", {"num_experts": "x"}, "json: num_experts: expected an integer from"),
    ("qwen3_moe", {"num_local_experts": "x"}, "json: num_local_experts: expected an integer from"),
    *(
        ("llama", {key: None}, f"json: {key}: expected no such key: it names a part of")
        for key in ("attribute_map", "to_dict", "__eq__")
    ),
    ("t5", {"per_layer_config": {"1": {}}}, "no such key: all layers read the same"),
    ("mistral", {"num_attention_heads": 1000, "head_dim": None}, "at most hidden_size = 12, as"),
    # what transformers' masks and caches read for every family
    ("gemma3_text", {"is_causal": False}, "is_causal: expected true, found false"),
    *((family, {"is_causal": None}, "is_causal: expected true") for family in ("llama", "t5")),
    ("llama", {"sliding_window": 4}, "sliding_window: expected null, found 4"),
    ("llama", {"attention_chunk_size": 4}, "attention_chunk_size: expected null, found 4"),
    ("mistral", {"attention_chunk_size": 4}, "attention_chunk_size: expected null, found 4"),
    ("llama", {"layer_types": [_FULL, "sliding_attention"]}, 'expected "full_att'),
    ("mistral", {"layer_types": [_FULL, "sliding_attention"]}, 'expected "full_att'),
    ("roberta", {"num_attention_heads": 5}, "hidden_size: expected a multiple of"),
    ("roberta", {"pad_token_id": 19}, "max_position_embeddings: expected more than pad_token_id"),
    ("t5", {"feed_forward_proj": "gated-mish"}, 'feed_forward_proj: expected "gelu" or'),
    ("t5", {"feed_forward_proj": "gated-gelu-new"}, "transformers refuses it"),
    ("t5", {"relative_attention_num_buckets": 3}, "an integer from 4 to 65536, found 3"),
    ("t5", {"relative_attention_max_distance": 4}, "relative_attention_max_distance: expected"),
    ("whisper", {"tie_word_embeddings": False}, "tie_word_embeddings: expected true, found"),
    ("bamba", {"mamba_n_heads": None}, "mamba_n_heads: expected a value or no such key, found"),
    ("nemotron_h", {"n_groups": None}, "n_groups: expected"),
    ("falcon", {"alibi": True}, "alibi: expected false, found true"),
    ("falcon", {_NORMS: 2, "new_decoder_architecture": False}, f"{_NORMS}: expected null or 1,"),
    ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "x"]}, 'mlp_layer_types: expected "dense"'),
    ("gptj", {"rotary_dim": 5}, "rotary_dim: expected an even number up to 8, the size of"),
    ("gptj", {"rotary_dim": 10}, "rotary_dim: expected an even number up to 8, the size of"),
    ("gptj", {"rotary_dim": [4]}, "rotary_dim: expected an integer from 1 to"),
    ("gptj", {"rotary_dim": None}, "rotary_dim: expected a value or no such key, found null"),
    ("granite_swa", {"layer_rope_theta": [1.0]}, "layer_rope_theta: expected 4 items"),
    ("llama4_text", {"layer_types": [_SLIDING] * 4}, 'layer_types: expected "full_attention"'),
    ("llama4_text", {"attention_chunk_size": 0}, "chunk_size: expected an integer from 1"),
    ("llama4_text", {"sliding_window": 4}, "sliding_window: expected null, found 4"),
    ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before: expected true, found false"),
    ("opt", {"word_embed_proj_dim": 5}, "word_embed_proj_dim: expected"),
    ("phimoe", {"lm_head_bias": True}, "tie_word_embeddings: expected false, found true"),
]


@pytest.mark.parametrize("family", sorted({family for family, _, _ in _UNUSABLE}))
def test_a_setting_that_is_not_built_is_named(family, tmp_path):
    further = {case.name: case.config for case in siblings()}
    right = CONFIGS[family] if family in CONFIGS else further[f"{family}-0"]
    for change, said in [row[1:] for row in _UNUSABLE if row[0] == family]:
        (tmp_path / "config.json").write_text(json.dumps({**right, **change}))
        with pytest.raises(CheckpointError, match=re.escape(said)) as caught:
            read_module(family, tmp_path)
        assert str(tmp_path / "config.json") in str(caught.value), change
        assert caught.value.hint or "transformers refuses it" in str(caught.value), change


_DECODERS = {
    case.config["model_type"]: case.config
    for case in (*(*cases(), *siblings()), *(*t5_cases.cases(), *whisper_cases.cases()))
}
_ENCODERS = {case.config["model_type"]: case.config for case in encoder_cases()}
_MORE = (
    *("head_dim", "rope_scaling", "rope_theta", "sliding_window", "layer_types", "dtype"),
    *("num_labels", "id2label", "torch_dtype", "partial_rotary_factor", "text_config"),
    *("dense_act_fn", "is_gated_act", "scale_decoder_outputs", "is_encoder_decoder"),
)


def test_biases_under_the_names_of_the_first_exaone_are_read(tmp_path):
    (case,) = [case for case in siblings() if case.name == "exaone-0"]
    shapes = dict(case.tensor_shapes)
    for name in [name for name in shapes if ".attn." in name or ".mlp." in name]:
        shapes[name.replace(".weight", ".bias")] = shapes[name][:1]
    biases = {"attention_bias": True, "mlp_bias": True}
    replace(case, config=case.config | biases, shapes=shapes).write(tmp_path)
    assert len(open_checkpoint(tmp_path).names) == len(shapes)


# Not drawn from st.data(), which prints what is drawn: lists of 2,000 levels.
@settings(deadline=None, derandomize=True, max_examples=examples(50, 150))
@given(
    drawn=st.sampled_from([*_DECODERS.items(), *_ENCODERS.items()]).flatmap(
        lambda kind: st.tuples(st.just(kind[0]), mutated(kind[1], _MORE))
    )
)
def test_any_config_makes_a_module_or_an_error_of_ours(drawn):
    family, config = drawn
    with tempfile.TemporaryDirectory() as name, contextlib.suppress(CheckpointError):
        (Path(name) / "config.json").write_text(to_json(config))
        read_module(family, Path(name))


def test_windows_beside_full_attention_everywhere_change_nothing(tmp_path):
    everywhere = {"layer_types": ["full_attention"] * 2, "sliding_window": 4, "is_causal": True}
    assert made(tmp_path, "llama", **everywhere).model.layers[1].heads.window is None
    assert made(tmp_path, "mistral", **everywhere).model.layers[1].heads.window == 4
    # GPT-2 does not read this key; files of other tools have it.
    assert made(tmp_path, "gpt2", num_key_value_heads=None).transformer.h[1].heads.keys == 3


def test_copies_of_an_embedding_must_equal_it(tmp_path):
    tied = {**T5, "feed_forward_proj": "relu", "tie_word_embeddings": True}
    case = t5_cases.Case("tiny", tied, seed=3, old=True)
    for written, embedding, copy, head in (
        (case, "shared.weight", "encoder.embed_tokens.weight", "lm_head.weight"),
        (whisper_cases.cases()[0], "model.decoder.embed_tokens.weight", *["proj_out.weight"] * 2),
    ):
        directory = tmp_path / str(written.name)
        written.write(directory)
        plain, file = open_checkpoint(directory), directory / "model.safetensors"
        values, tensors = plain.read(embedding), load_file(file)
        tensors[head] = values
        del tensors[embedding]  # any one of them is enough
        save_file({**tensors, copy: values}, file)
        found = open_checkpoint(directory)
        assert found.names == plain.names
        assert np.array_equal(found.read(embedding), values)
        save_file({**tensors, embedding: values, copy: values + 1}, file)
        with pytest.raises(CheckpointError, match=rf"{copy} differs from "):
            _ = open_checkpoint(directory).names


def test_frames_or_a_mesh_that_no_encoder_decoder_has_are_refused():
    module = model("whisper").module
    for size in (12, 7, 15):
        said = re.escape("generate.source: expected 14 frames") + f".*; found {size}\n"
        with pytest.raises(ManifestError, match=said) as caught:
            module.source(1, size)
        assert caught.value.hint
        with pytest.raises(ManifestError, match=said):
            module.encode(jnp.zeros((1, 5, size)), int32(size), CONTEXT, "float32")
    said = r"m\.toml: mesh: expected none, because the family of c\.json is not split .* tensor = 2"
    for family in PLACES:
        with pytest.raises(ManifestError, match=said):
            check_mesh(Mesh(1, 2), model(family).module, "m.toml", Path("c.json"))
