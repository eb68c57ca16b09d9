"""Adapters of PEFT: each tensor is used or is an error, and rows are those of the whole matrix."""

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.encoders import bert_config
from tests.parity import encoder_cases, sibling_cases
from tests.parity.adapter_cases import CASES, write_adapter

from prejit.compiler.checkpoint.checkpoint import open_checkpoint, open_encoder
from prejit.runtime.errors import CheckpointError

TIED, UNTIED, GPT2, _, QWEN3 = CASES
LAYER = "model.layers.0.self_attn.q_proj"
A, B = (f"base_model.model.{LAYER}.lora_{part}.weight" for part in "AB")
SHAPES = {A: (2, 24), B: (24, 2)}
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
HEAD, EMBEDDING = "base_model.model.lm_head.weight", "base_model.model.model.embed_tokens.weight"


def with_adapter(at, base, change=lambda config, shapes: None):
    """A checkpoint of a model and an adapter of one layer, which a change may damage."""
    config, shapes = {**CONFIG}, {**SHAPES}
    change(config, shapes)
    base.write(at / "base")
    write_adapter(at / "adapter", config, shapes, 1)
    return open_checkpoint(at / "base", adapters=(at / "adapter",))


def at(module):
    """Move the adapter from its layer to another module."""

    def change(config, shapes):
        config.update(target_modules=[module.rpartition(".")[2]])
        shapes.update({name.replace(LAYER, module): shapes.pop(name) for name in (A, B)})

    return change


def beside(end, *ends, **changes):
    """Add tensors of the layer, and change keys."""

    def change(config, shapes):
        config.update(changes)
        shapes.update({f"base_model.model.{LAYER}.{each}": (24,) for each in (end, *ends)})

    return change


REFUSED = {
    "kind": (lambda c, s: c.update(peft_type="LOHA"), 'peft_type: expected "LORA", found "LOHA"'),
    "beginning": (lambda c, s: c.update(init_lora_weights="pissa"), "init_lora_weights: expected"),
    "key": (lambda c, s: c.update(use_qalora=True), "use_qalora: expected none, found true"),
    "unknown key": (lambda c, s: c.update(use_next=1), "use_next: expected none, found 1"),
    "experts": (lambda c, s: c.update(target_parameters=["x"]), "target_parameters: expected none"),
    "biases of B": (lambda c, s: c.update(lora_bias=True), "lora_bias: expected none"),
    "no rank": (lambda c, s: c.update(r=0), "r: expected an integer of at least 1, found 0"),
    "alpha": (
        lambda c, s: c.update(lora_alpha="4"),
        'lora_alpha: expected a number of at most 1e\\+06, found "4"',
    ),
    "large alpha": (
        lambda c, s: c.update(lora_alpha=1e29),
        "lora_alpha: expected .*, found 1e[+]29",
    ),
    "pattern": (lambda c, s: c.update(rank_pattern={"(": 2}), "expected a regular expression"),
    "a list": (lambda c, s: c.update(alpha_pattern=[2]), "alpha_pattern: expected dict"),
    "other rank": (lambda c, s: c.update(r=3), r"\(2, 24\).*expected \[\(3, 24\), \(24, 3\)\]"),
    "other width": (lambda c, s: s.update({A: (2, 20)}), r"q_proj of shapes \[\(2, 20\)"),
    "other layers": (at(LAYER.replace("0", "7")), "layers.7.self_attn.q_proj, which is no matrix"),
    "not a target": (lambda c, s: c.update(target_modules="k_proj"), "which target_modules of"),
    "excluded": (lambda c, s: c.update(exclude_modules=["q_proj"]), "which exclude_modules of"),
    "layer excluded": (
        lambda c, s: c.update(exclude_modules=r".*\.0\..*"),
        "which exclude_modules of",
    ),
    "saved": (lambda c, s: c.update(modules_to_save=["self_attn"]), "which modules_to_save of"),
    "another layer": (
        lambda c, s: c.update(layers_to_transform=[1, 2]),
        f"{LAYER}, which layers_to_transform of adapter_config.json leaves out",
    ),
    "layers elsewhere": (
        lambda c, s: c.update(layers_to_transform=0, layers_pattern="h"),
        "which layers_to_transform of",
    ),
    "layers": (
        lambda c, s: c.update(layers_to_transform="0"),
        'layers_to_transform: expected an integer, or a list of such, found "0"',
    ),
    "no B": (lambda c, s: s.pop(B), "q_proj with lora_A.weight"),
    "no magnitude": (lambda c, s: c.update(use_dora=True), r"use_dora = True"),
    "a magnitude": (beside("lora_magnitude_vector"), r"magnitude_vector \(use_dora = False\)"),
    "empty": (lambda c, s: s.clear(), "found no tensor"),
    "unnamed bias": (beside("base_layer.bias"), "q_proj.base_layer.bias, which adapter_config"),
    "a bias twice": (beside("bias", "base_layer.bias", bias="all"), f"{LAYER}.bias, which another"),
    "unknown tensor": (
        lambda c, s: (c.update(modules_to_save=["score"]), s.update({"score.weight": (2, 24)})),
        "score.weight, which the model does not have",
    ),
    "a norm": (at("model.norm"), "model.norm, which is no matrix"),
    "tied head": (at("lm_head"), "lm_head, whose matrix the model uses twice"),
    "resized": (lambda c, s: s.update({EMBEDDING: (33, 24)}), r"\[33, 24\], expected \[31, 24\]"),
    "one of two": (
        lambda c, s: s.update({EMBEDDING: (31, 24)}),
        r"makes lm_head.weight differ from model.embed_tokens.weight \(tie_word_embeddings\)",
    ),
}


@pytest.mark.parametrize(("change", "said"), REFUSED.values(), ids=REFUSED)
def test_an_adapter_that_does_not_fit_is_refused_with_its_file(change, said, tmp_path):
    with pytest.raises(CheckpointError, match=said) as caught:
        _ = with_adapter(tmp_path, TIED.base, change).names
    assert str(tmp_path / "adapter" / "adapter_") in str(caught.value)
    assert ("trained" if "alpha:" in said else "merge_and_unload") in str(caught.value.hint)


LAYERS = (
    {"layers_to_transform": 0},
    {"layers_to_transform": [2, 0], "layers_pattern": ["h", "layers"]},
)


@pytest.mark.parametrize("chosen", LAYERS)
def test_layers_that_are_chosen_are_changed(chosen, tmp_path):
    exact = with_adapter(tmp_path, TIED.base).read(f"{LAYER}.weight")
    found = with_adapter(tmp_path, TIED.base, lambda config, shapes: config.update(chosen))
    np.testing.assert_array_equal(found.read(f"{LAYER}.weight"), exact)


def test_all_linear_leaves_out_the_head(tmp_path):
    def change(config, shapes):
        at("lm_head")(config, shapes)
        config.update(target_modules="all-linear")
        shapes.update({name: (31, 2) for name in shapes if "lora_B" in name})

    with pytest.raises(CheckpointError, match="lm_head, which target_modules of"):
        _ = with_adapter(tmp_path, UNTIED.base, change).names


def test_a_tied_model_takes_an_embedding_whose_copy_is_equal(tmp_path):
    checkpoint = with_adapter(tmp_path, TIED.base)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    new = np.full((31, 24), 2, np.float32)
    save_file({**load_file(file), HEAD: new, EMBEDDING: new}, file)
    assert np.array_equal(checkpoint.read("model.embed_tokens.weight"), new)


def test_the_bias_of_a_head_may_lie_beside_its_change(tmp_path):
    base = next(case for case in sibling_cases.cases() if case.name == "phi-0")
    vocabulary, width = base.config["vocab_size"], base.config["hidden_size"]
    head = "base_model.model.lm_head"

    def change(config, shapes):
        config.update(target_modules=["lm_head"])
        shapes.clear()
        kept = {"weight": (vocabulary, width), "bias": (vocabulary,)}
        shapes.update({f"{head}.base_layer.{end}": shape for end, shape in kept.items()})
        shapes.update({f"{head}.lora_A.weight": (2, width)})
        shapes.update({f"{head}.lora_B.weight": (vocabulary, 2)})

    found = with_adapter(tmp_path, base, change).read("lm_head.bias")
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert np.array_equal(found, saved[f"{head}.base_layer.bias"])


def test_files_that_are_damaged_or_not_finite_or_in_another_format_are_refused(tmp_path):
    checkpoint = with_adapter(tmp_path, TIED.base)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    content = load_file(file)
    save_file({**content, A: content[A] * np.float32(np.inf)}, file)
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors: .*NaN or infinite"):
        checkpoint.read(f"{LAYER}.weight")
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors: damaged"):
        _ = open_checkpoint(tmp_path / "base", adapters=(tmp_path / "adapter",)).names
    file.rename(file.with_suffix(".bin"))
    with pytest.raises(CheckpointError, match=r"expected a file, found adapter_model\.bin"):
        open_checkpoint(tmp_path / "base", adapters=(tmp_path / "adapter",))


@pytest.mark.parametrize("case", [GPT2, QWEN3], ids=["(in, out)", "(out, in)"])
@pytest.mark.parametrize("out_in", [False, True])
def test_rows_are_those_of_the_whole_matrix(case, out_in, tmp_path):
    adapters = case.write(tmp_path)
    checkpoint = open_checkpoint(tmp_path / "base", out_in=out_in, adapters=adapters)
    for name in checkpoint.names:
        rows = checkpoint.rows(name)
        count = rows.shape[0]
        parts = [slice(at, min(at + 3, count)) for at in range(0, count, 3)]
        pieces = np.concatenate([rows[part] for part in parts])
        np.testing.assert_allclose(pieces, checkpoint.read(name), rtol=1e-5, atol=1e-7)


def test_an_encoder_has_adapters_too_and_ignores_what_it_does_not_build(tmp_path):
    encoder_cases.Case("bert", bert_config(), 1).write(tmp_path / "base")
    name, ignored = "encoder.layer.0.attention.self.query", "pooler.dense"
    width = bert_config()["hidden_size"]
    shapes = {
        f"base_model.model.{module}.lora_{part}.weight": shape
        for module in (name, ignored)
        for part, shape in {"A": (2, width), "B": (width, 2)}.items()
    }
    write_adapter(tmp_path / "a", {**CONFIG, "target_modules": "all-linear"}, shapes, 1)
    plain = open_encoder(tmp_path / "base", out_in=True)
    adapted = open_encoder(tmp_path / "base", out_in=True, adapters=(tmp_path / "a",))
    given = load_file(tmp_path / "a" / "adapter_model.safetensors")
    a, b = (given[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
    for parameter in plain.names:
        expected = plain.read(parameter) + (2 * b @ a if f"{name}.weight" in parameter else 0)
        np.testing.assert_allclose(adapted.read(parameter), expected, atol=1e-6)
