"""The layout of sentence-transformers: what is built is read as meant; what is not is told with its file."""

import json
import re

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from prejit.compiler.checkpoint.checkpoint import open_checkpoint, open_encoder
from prejit.compiler.models import config_file, model_registry
from prejit.compiler.models.families.sentence_layout import read_layout
from prejit.compiler.models.parameters import parameters_of
from prejit.runtime.errors import CheckpointError

BERT = {
    **{"model_type": "bert", "architectures": ["BertModel"], "hidden_act": "gelu"},
    **{"hidden_size": 4, "intermediate_size": 6, "layer_norm_eps": 1e-12, "pad_token_id": 0},
    **{"max_position_embeddings": 12, "num_attention_heads": 2, "num_hidden_layers": 1},
    **{"type_vocab_size": 2, "vocab_size": 9},
}
DISTILBERT = {
    **{"activation": "gelu", "vocab_size": 9, "max_position_embeddings": 12},
    **{"dim": 4, "hidden_dim": 6, "n_heads": 2, "n_layers": 1},
}
KINDS, TORCH = ("Transformer", "Pooling", "Dense", "Normalize"), "torch.nn.modules.activation"


@pytest.fixture
def directory(tmp_path):
    modules = [
        {"path": f"{n}_{kind}" if n else "", "type": f"sentence_transformers.models.{kind}"}
        for n, kind in enumerate(KINDS)
    ]
    write(tmp_path / "modules.json", modules)
    write(tmp_path / "config.json", BERT)
    write(tmp_path / "sentence_bert_config.json", {"max_seq_length": 10, "do_lower_case": False})
    pooling = {"word_embedding_dimension": 4, "pooling_mode_mean_tokens": True}
    write(tmp_path / "1_Pooling" / "config.json", pooling)
    dense = {"in_features": 4, "out_features": 3, "bias": True}
    tanh = {"activation_function": f"{TORCH}.Tanh"}
    write(tmp_path / "2_Dense" / "config.json", dense | tanh)
    tensors = {"linear.weight": np.ones((3, 4), np.float32), "linear.bias": np.ones(3, np.float32)}
    save_file(tensors, tmp_path / "2_Dense" / "model.safetensors")
    write_weights(tmp_path, lambda name: name)
    return tmp_path


def write(file, content):
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(content))


def edit(file, **changes):
    write(file, {**json.loads(file.read_text()), **changes})


def zeros(directory):
    """The tensors of a model as they are published, of zeros."""
    module = model_registry.make_encoder(config_file.load_encoder(directory))
    return {
        name: np.zeros(each.shape[::-1] if each.in_out else each.shape, np.float32)
        for name, each in parameters_of(module).items()
    }


def write_weights(directory, rename):
    """Zeros of BERT's tensors, under other names."""
    given = zeros(directory).items()
    named = {name.removeprefix("bert."): each for name, each in given if name[:5] == "bert."}
    tensors = {rename(name): each for name, each in named.items()}
    save_file(tensors, directory / "model.safetensors")


def test_all_modules_are_read_and_a_plain_directory_is_mean_pooling(directory):
    layout = read_layout(directory)
    assert (layout.pooling, layout.normalized, layout.max_tokens) == (("mean",), True, 10)
    assert [(part.name, part.inputs, part.outputs) for part in layout.dense] == [("2_Dense", 4, 3)]
    described = model_registry.describe_encoder(config_file.load_encoder(directory))
    assert (described.width, described.max_tokens, described.pooling) == (3, 10, "mean")
    names = open_encoder(directory).names
    assert "sentence.2_Dense.linear.weight" in names
    assert open_encoder(directory).read("sentence.2_Dense.linear.weight").shape == (4, 3)
    names = {str(file.relative_to(directory)) for file in read_layout(directory).files}
    assert names == {
        *("modules.json", "config.json", "sentence_bert_config.json"),
        *("1_Pooling/config.json", "2_Dense/config.json"),
    }
    edit(directory / "sentence_bert_config.json", max_seq_length=512)
    edit(directory / POOLING, pooling_mode=["mean", "cls"])
    write(directory / SETTINGS, {"prompts": {"q": "q: "}, "default_prompt_name": "q"})
    edit(directory / POOLING, include_prompt=True)
    layout = read_layout(directory)
    assert (layout.pooling, layout.default_prompt) == (("mean", "cls"), "q")
    (directory / "modules.json").unlink()
    layout = read_layout(directory)
    assert (layout.pooling, layout.dense, layout.normalized) == (("mean",), (), False)
    assert (layout.prompts, layout.default_prompt) == ({}, None)  # as the reference
    assert model_registry.describe_encoder(config_file.load_encoder(directory)).max_tokens == 12


POOLING, DENSE = "1_Pooling/config.json", "2_Dense/config.json"
SETTINGS = "config_sentence_transformers.json"
SCORES = {
    **BERT,
    **{"model_type": "bert", "architectures": ["BertForSequenceClassification"]},
    "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"},
}
ROBERTA_SCORES = {
    **{**SCORES, "model_type": "roberta", "type_vocab_size": 1},
    "architectures": ["RobertaForSequenceClassification"],
}
LLAMA = {
    **{"model_type": "llama", "architectures": ["LlamaModel"], "hidden_act": "silu"},
    **{"hidden_size": 4, "intermediate_size": 6, "num_attention_heads": 2, "vocab_size": 9},
    **{"num_hidden_layers": 1, "pad_token_id": 1, "eos_token_id": 2, "bos_token_id": 3},
}
MPNET = {**BERT, "model_type": "mpnet", "architectures": ["MPNetModel"]}
DEBERTA = {
    **{**BERT, "model_type": "deberta-v2", "architectures": ["DebertaV2Model"]},
    **{"relative_attention": True, "share_att_key": True, "norm_rel_ebd": "layer_norm"},
    **{"position_buckets": 4, "pos_att_type": "p2c|c2p", "position_biased_input": False},
}
MODERN = {
    **{**BERT, "model_type": "modernbert", "architectures": ["ModernBertModel"]},
    "hidden_activation": "gelu",
}
CONFIG, SIZES, TOKENIZER = "config.json", "sentence_bert_config.json", "tokenizer_config.json"
SOFTMAX = {"sentence_transformers": {"activation_fn": f"{TORCH}.Softmax"}}
NOT_BUILT = (
    (BERT, POOLING, {"pooling_mode_mean_tokens": False}, "to be true, found none"),
    (BERT, POOLING, {"pooling_mode_median": True}, "pooling_mode_median: expected one of"),
    (BERT, POOLING, {"pooling_mode": "median"}, 'pooling_mode: expected "cls".* found "median"'),
    (BERT, POOLING, {"pooling_mode": ["cls", "cls"]}, "pooling_mode: expected each mode once"),
    (BERT, TOKENIZER, {"truncation_side": "left"}, 'truncation_side: expected "right" or null'),
    (BERT, POOLING, {"word_embedding_dimension": 5}, "embedding_dimension: expected 4.*found 5"),
    (BERT, DENSE, {"activation_function": "my.Swish"}, 'activation_function: .*found "my.Swish"'),
    (BERT, DENSE, {"module_input_name": "token_embeddings"}, "module_input_name: expected"),
    (BERT, DENSE, {"in_features": 5}, "in_features: expected 4, .*found 5"),
    (BERT, DENSE, {"out_features": 0}, "out_features: .* integer from 1 to 1048576, found 0"),
    (BERT, SIZES, {"do_lower_case": True}, "do_lower_case: expected false"),
    (BERT, SIZES, {"max_seq_length": "9"}, "max_seq_length: expected"),
    (BERT, SETTINGS, {"default_prompt_name": "q"}, "default_prompt_name"),
    (BERT, CONFIG, {"hidden_act": "mish"}, 'hidden_act: .*found "mish"'),
    (BERT, CONFIG, {"rope_parameters": "x"}, 'rope_parameters: .*object, found "x"'),
    (BERT, CONFIG, {"model_type": "gpt2"}, 'for .encode., found "gpt2"'),
    (MPNET, CONFIG, {"relative_attention_num_buckets": 16}, "num_buckets: expected 32"),
    (DEBERTA, CONFIG, {"share_att_key": False}, "share_att_key: expected true, found false"),
    (DEBERTA, CONFIG, {"pos_att_type": "c2p"}, 'pos_att_type: expected "p2c|c2p"'),
    (DEBERTA, CONFIG, {"conv_kernel_size": 3}, "conv_kernel_size: expected 0 or null, found 3"),
    (DEBERTA, CONFIG, {"position_buckets": 0}, "position_buckets: expected an integer from 4"),
    (MODERN, CONFIG, {"norm_bias": True}, "norm_bias: expected false, found true"),
    (SCORES, CONFIG, {"id2label": {}}, "id2label: expected an object of 1 to 65536 labels"),
    (SCORES, CONFIG, {"model_type": "clip"}, 'a model that scores, .*"clip"'),
    (SCORES, CONFIG, SOFTMAX, r"activation_fn: expected .*Identity.* or .*Sigm.*; found .*Softmax"),
    (LLAMA, CONFIG, {"use_bidirectional_attention": True}, "attention: expected null or false"),
    (ROBERTA_SCORES, CONFIG, {"type_vocab_size": 2}, "type_vocab_size: expected 1 for roberta"),
)


def test_what_is_not_built_is_told_with_file_key_and_value(directory):
    write(directory / SETTINGS, {})
    write(directory / TOKENIZER, {"tokenizer_class": "BertTokenizer"})
    for base, file, changes, told in NOT_BUILT:
        if base is not BERT:
            (directory / "modules.json").unlink(missing_ok=True)
        write(directory / CONFIG, base)
        shape = model_registry.describe_encoder(config_file.load_encoder(directory))
        assert shape.scores == ("identity" if "sentence_transformers" in base else None)
        before = (directory / file).read_bytes()
        edit(directory / file, **changes)
        with pytest.raises(CheckpointError, match=told) as raised:
            model_registry.describe_encoder(config_file.load_encoder(directory))
        assert file.rpartition("/")[2] in str(raised.value)
        (directory / file).write_bytes(before)


def test_settings_under_the_names_of_old_files_are_read_in_the_order_of_the_reference(directory):
    old = directory / "sentence_distilbert_config.json"
    write(old, {"max_seq_length": 7})
    write(directory / "sentence_xlnet_config.json", {"max_seq_length": 5})
    assert read_layout(directory).max_tokens == 10
    write(directory / SIZES, {})
    layout = read_layout(directory)
    assert (layout.max_tokens, old in layout.files) == (7, True)
    write(old, {"do_lower_case": True})
    with pytest.raises(CheckpointError, match=f"{old.name}: do_lower_case: expected false"):
        read_layout(directory)
    old.unlink()
    (directory / "sentence_xlnet_config.json").unlink()
    for limits, found in (({"max_len": 6}, 6), ({"max_len": 6, "model_max_length": 8}, 8)):
        write(directory / TOKENIZER, limits)
        assert read_layout(directory).max_tokens == found


def test_the_default_prompt_of_a_model_that_scores_is_refused(directory):
    module = {"path": "", "type": "sentence_transformers.models.Transformer"}
    write(directory / "modules.json", [module])
    (directory / "sentence_bert_config.json").unlink()
    write(directory / "config.json", SCORES)
    write(directory / SETTINGS, {"prompts": {"q": "q: "}})
    assert read_layout(directory).scores
    edit(directory / SETTINGS, default_prompt_name="q")
    with pytest.raises(CheckpointError, match=f"{SETTINGS}: default_prompt_name: expected null"):
        read_layout(directory)


def test_modules_that_are_missing_in_another_order_or_outside_are_told(directory):
    modules = json.loads((directory / "modules.json").read_text())
    place = "modules.json: path of the module Pooling: expected a directory "
    for path, told in (("", place), ("gone", place), ("../elsewhere", r"\[1\].path")):
        modules[1]["path"] = path
        write(directory / "modules.json", modules)
        with pytest.raises(CheckpointError, match=f'{told}.*found "{path}"'):
            read_layout(directory)
    for kinds, told in (
        (("Transformer", "Pooling", "CNN"), r"\[2\].type: expected one of"),
        (("Transformer", "Normalize", "Pooling"), "found Transformer, Normalize, Pooling"),
        ((), "found none"),
    ):
        modules = [{"path": k, "type": f"sentence_transformers.models.{k}"} for k in kinds]
        write(directory / "modules.json", modules)
        with pytest.raises(CheckpointError, match=told):
            read_layout(directory)


def test_tensors_of_tensorflows_names_and_heads_are_taken_and_a_pickle_is_not(directory):
    """bert-base-uncased: norms have gamma and beta, and two heads are in the file."""

    def rename(name):
        name = name.replace("LayerNorm.weight", "LayerNorm.gamma")
        return "bert." + name.replace("LayerNorm.bias", "LayerNorm.beta")

    write_weights(directory, rename)
    tensors = load_file(directory / "model.safetensors")
    for head in ("cls.predictions.bias", "cls.seq_relationship.weight", "bert.pooler.dense.bias"):
        tensors[head] = np.zeros(3, np.float32)
    save_file(tensors, directory / "model.safetensors")
    assert "bert.embeddings.LayerNorm.weight" in open_encoder(directory).names
    weights = directory / "2_Dense" / "model.safetensors"
    weights.rename(weights.with_name("pytorch_model.bin"))
    with pytest.raises(CheckpointError, match=r"found pytorch_model.bin"):
        open_encoder(directory)


def test_a_head_of_its_own_is_refused(directory):
    (directory / "modules.json").unlink()
    for family, sizes, head in (
        ("bert", BERT, "classifier.weight"),
        ("roberta", BERT, "classifier.dense.weight"),
        ("distilbert", DISTILBERT, "pre_classifier.weight"),
    ):
        write(directory / "config.json", {**sizes, "model_type": family, "architectures": None})
        tensors = zeros(directory)
        save_file(tensors, directory / "model.safetensors")
        assert open_encoder(directory).names
        save_file({**tensors, head: np.ones(3, np.float32)}, directory / "model.safetensors")
        with pytest.raises(CheckpointError, match=f"unexpected {re.escape(head)}\n") as raised:
            _ = open_encoder(directory).names
        assert "a part that prejit does not build" in str(raised.value.hint)


def test_an_architecture_with_a_head_or_of_another_section_is_refused(directory):
    edit(directory / "config.json", architectures=["BertForMaskedLM"])
    assert open_encoder(directory).names
    edit(directory / "config.json", architectures=["BertForTokenClassification"])
    wanted = r"config\.json: architectures: .* for \[encode\], found \"BertForToken.*, whose head"
    with pytest.raises(CheckpointError, match=wanted):
        _ = open_encoder(directory).names
    edit(directory / "config.json", architectures=["BertModel"])
    with pytest.raises(CheckpointError, match=r'for \[generate\], found "bert"') as raised:
        _ = open_checkpoint(directory).names
    assert "[encode]" in str(raised.value.hint)
    edit(directory / "config.json", model_type="phi3")
    with pytest.raises(CheckpointError, match=r'for \[encode\], found "phi3"') as raised:
        _ = open_encoder(directory).names
    assert "[generate]" not in str(raised.value.hint)


def test_a_file_must_be_small_json(directory):
    for file, content, told in (
        ("modules.json", b"\xff", "utf-8"),
        ("modules.json", b"[" * 3000 + b"]" * 3000, "nested too deeply"),
        ("modules.json", b"[1" + b"0" * 5000 + b"]", "cannot read"),
        ("modules.json", b"[" + b" " * (16 << 20) + b"]", "expected at most 16777216 bytes"),
        ("config.json", b"[NaN]", "which has no NaN"),
    ):
        before = (directory / file).read_bytes()
        (directory / file).write_bytes(content)
        with pytest.raises(CheckpointError, match=told) as raised:
            config_file.load_encoder(directory)
        assert str(directory / file) in str(raised.value)
        (directory / file).write_bytes(before)
