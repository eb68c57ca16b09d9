"""The layout of sentence-transformers: what is built is read as meant; what is not is told with its file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from prejit.compiler.checkpoint.checkpoint import open_checkpoint, open_encoder
from prejit.compiler.models import config_file, model_registry
from prejit.compiler.models.families.sentence_layout import read_layout
from prejit.compiler.models.parameters import parameters_of
from prejit.runtime.errors import CheckpointError

BERT = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "hidden_act": "gelu",
    "hidden_size": 4,
    "intermediate_size": 6,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 12,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "pad_token_id": 0,
    "type_vocab_size": 2,
    "vocab_size": 9,
}
DISTILBERT = {
    "activation": "gelu",
    **{"dim": 4, "hidden_dim": 6, "max_position_embeddings": 12, "n_heads": 2, "n_layers": 1},
    "vocab_size": 9,
}
KINDS = ("Transformer", "Pooling", "Dense", "Normalize")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    modules = [
        {"path": f"{n}_{kind}" if n else "", "type": f"sentence_transformers.models.{kind}"}
        for n, kind in enumerate(KINDS)
    ]
    write(tmp_path / "modules.json", modules)
    write(tmp_path / "config.json", BERT)
    write(tmp_path / "sentence_bert_config.json", {"max_seq_length": 10, "do_lower_case": False})
    pooling = {"word_embedding_dimension": 4, "pooling_mode_mean_tokens": True}
    write(tmp_path / "1_Pooling" / "config.json", pooling)
    dense = {
        "in_features": 4,
        "out_features": 3,
        "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    write(tmp_path / "2_Dense" / "config.json", dense)
    tensors = {"linear.weight": np.ones((3, 4), np.float32), "linear.bias": np.ones(3, np.float32)}
    save_file(tensors, tmp_path / "2_Dense" / "model.safetensors")
    write_weights(tmp_path, lambda name: name)
    return tmp_path


def write(file: Path, content: Any) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(content))


def edit(file: Path, **changes: Any) -> None:
    write(file, {**json.loads(file.read_text()), **changes})


def write_weights(directory: Path, rename: Callable[[str], str]) -> None:
    """Zeros of BERT's tensors, under other names."""
    source = config_file.load_encoder(directory)
    tensors = {
        rename(name.removeprefix("bert.")): np.zeros(
            p.shape[::-1] if p.in_out else p.shape, np.float32
        )
        for name, p in parameters_of(model_registry.make_encoder(source)).items()
        if name.startswith("bert.")
    }
    save_file(tensors, directory / "model.safetensors")


def test_all_modules_are_read_and_named_for_keys(directory: Path) -> None:
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


def test_a_plain_directory_is_mean_pooling_within_its_positions(directory: Path) -> None:
    edit(directory / "sentence_bert_config.json", max_seq_length=512)
    assert model_registry.describe_encoder(config_file.load_encoder(directory)).max_tokens == 12
    (directory / "modules.json").unlink()
    layout = read_layout(directory)
    assert (layout.pooling, layout.dense, layout.normalized) == (("mean",), (), False)
    assert model_registry.describe_encoder(config_file.load_encoder(directory)).max_tokens == 12


POOLING, DENSE = "1_Pooling/config.json", "2_Dense/config.json"


@pytest.mark.parametrize(
    ("file", "changes", "told"),
    [
        (POOLING, {"pooling_mode_mean_tokens": False}, "to be true, found none"),
        (POOLING, {"pooling_mode_median": True}, "pooling_mode_median: expected one of"),
        (POOLING, {"pooling_mode": "median"}, 'pooling_mode: expected "cls" or .* found "median"'),
        (POOLING, {"word_embedding_dimension": 5}, "word_embedding_dimension: expected 4.*found 5"),
        (DENSE, {"activation_function": "my.Swish"}, 'activation_function: .*found "my.Swish"'),
        (DENSE, {"module_input_name": "token_embeddings"}, "module_input_name: expected"),
        (DENSE, {"in_features": 5}, "in_features: expected 4, .*found 5"),
        (
            DENSE,
            {"out_features": 0},
            "out_features: expected an integer from 1 to 1048576, found 0",
        ),
        ("sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case: expected false"),
        ("sentence_bert_config.json", {"max_seq_length": "9"}, "max_seq_length: expected"),
        ("config_sentence_transformers.json", {"default_prompt_name": "q"}, "default_prompt_name"),
        ("config.json", {"hidden_act": "mish"}, 'hidden_act: .*found "mish"'),
        ("config.json", {"model_type": "gpt2"}, 'for .encode., found "gpt2"'),
    ],
)
def test_what_is_not_built_is_told_with_file_key_and_value(
    directory: Path, file: str, changes: dict[str, Any], told: str
) -> None:
    if not (directory / file).exists():
        write(directory / file, {})
    edit(directory / file, **changes)
    with pytest.raises(CheckpointError, match=told) as raised:
        model_registry.describe_encoder(config_file.load_encoder(directory))
    assert file.rpartition("/")[2] in str(raised.value)


@pytest.mark.parametrize(
    ("kinds", "told"),
    [
        (("Transformer", "Pooling", "CNN"), r"\[2\].type: expected one of"),
        (("Transformer", "Normalize", "Pooling"), "found Transformer, Normalize, Pooling"),
        ((), "found none"),
    ],
)
def test_an_order_of_modules_is_told(directory: Path, kinds: tuple[str, ...], told: str) -> None:
    modules = [{"path": k, "type": f"sentence_transformers.models.{k}"} for k in kinds]
    write(directory / "modules.json", modules)
    with pytest.raises(CheckpointError, match=told):
        read_layout(directory)


def test_a_module_may_not_lead_out_of_the_directory(directory: Path) -> None:
    modules = json.loads((directory / "modules.json").read_text())
    modules[1]["path"] = "../elsewhere"
    write(directory / "modules.json", modules)
    with pytest.raises(CheckpointError, match=r"\[1\].path"):
        read_layout(directory)


def test_dense_weights_that_are_a_pickle_are_refused(directory: Path) -> None:
    (directory / "2_Dense" / "model.safetensors").rename(
        directory / "2_Dense" / "pytorch_model.bin"
    )
    with pytest.raises(CheckpointError, match=r"found pytorch_model.bin"):
        open_encoder(directory)


def test_tensors_of_tensorflows_names_and_heads_are_taken_as_published(directory: Path) -> None:
    """bert-base-uncased: norms have gamma and beta, and two heads are in the file."""
    ends = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}

    def rename(name: str) -> str:
        for end, published in ends.items():
            name = name.replace(end, published)
        return f"bert.{name}"

    write_weights(directory, rename)
    tensors = load_file(directory / "model.safetensors")
    for head in ("cls.predictions.bias", "cls.seq_relationship.weight", "bert.pooler.dense.bias"):
        tensors[head] = np.zeros(3, np.float32)
    save_file(tensors, directory / "model.safetensors")
    assert "bert.embeddings.LayerNorm.weight" in open_encoder(directory).names


def test_a_tensor_that_nobody_knows_is_told(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    save_file(
        {**tensors, "adapter.weight": tensors["embeddings.LayerNorm.bias"]},
        directory / "model.safetensors",
    )
    with pytest.raises(CheckpointError, match=r"unexpected adapter\.weight"):
        _ = open_encoder(directory).names


@pytest.mark.parametrize(
    ("family", "head"),
    [
        ("bert", "classifier.weight"),
        ("roberta", "classifier.dense.weight"),
        ("distilbert", "pre_classifier.weight"),
    ],
)
def test_a_head_of_its_own_is_refused(directory: Path, family: str, head: str) -> None:
    (directory / "modules.json").unlink()
    sizes = DISTILBERT if family == "distilbert" else BERT
    write(directory / "config.json", {**sizes, "model_type": family, "architectures": None})
    source = config_file.load_encoder(directory)
    tensors = {
        name: np.zeros(each.shape[::-1] if each.in_out else each.shape, np.float32)
        for name, each in parameters_of(model_registry.make_encoder(source)).items()
    }
    save_file(tensors, directory / "model.safetensors")
    assert open_encoder(directory).names
    save_file({**tensors, head: np.ones(3, np.float32)}, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"unexpected {re.escape(head)}\n") as raised:
        _ = open_encoder(directory).names
    assert "a part that prejit does not build" in str(raised.value.hint)


@pytest.mark.parametrize(
    ("name", "built"),
    [
        ("BertModel", True),
        ("BertForMaskedLM", True),
        ("BertForSequenceClassification", False),
        ("BertForTokenClassification", False),
    ],
)
def test_an_architecture_with_a_head_is_refused(directory: Path, name: str, built: bool) -> None:
    edit(directory / "config.json", architectures=[name])
    if built:
        assert open_encoder(directory).names
        return
    wanted = (
        rf"config\.json: architectures: expected .* for \[encode\], found \"{name}\", whose head"
    )
    with pytest.raises(CheckpointError, match=wanted):
        _ = open_encoder(directory).names


def test_a_model_of_another_section_is_sent_there_where_it_can_be(directory: Path) -> None:
    with pytest.raises(CheckpointError, match=r'for \[generate\], found "bert"') as raised:
        _ = open_checkpoint(directory).names
    assert "[encode]" in str(raised.value.hint)
    edit(directory / "config.json", model_type="qwen3")  # one whose last token is pooled
    with pytest.raises(CheckpointError, match=r'for \[encode\], found "qwen3"') as raised:
        _ = open_encoder(directory).names
    assert "[generate]" not in str(raised.value.hint)


@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        ("modules.json", b"\xff", "utf-8"),
        ("modules.json", b"[" * 3000 + b"]" * 3000, "nested too deeply"),
        ("modules.json", b"[1" + b"0" * 5000 + b"]", "cannot read"),
        ("modules.json", b"[" + b" " * (16 << 20) + b"]", "expected at most 16777216 bytes"),
        ("config.json", b"[NaN]", "which has no NaN"),
    ],
)
def test_a_file_must_be_small_json(file: str, content: bytes, told: str, directory: Path) -> None:
    (directory / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=told) as raised:
        config_file.load_encoder(directory)
    assert str(directory / file) in str(raised.value)
