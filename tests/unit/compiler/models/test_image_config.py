"""What a model that reads images may say of itself, and of its pictures."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.parity.image_cases import REFERENCE, image_cases

from prejit.compiler.checkpoint.checkpoint import open_encoder
from prejit.compiler.models.config_file import load_config, load_encoder
from prejit.compiler.models.families.image_processing import read_processing
from prejit.compiler.models.image_config import describe_images, describe_texts, load_images
from prejit.runtime.errors import CheckpointError

CASES = {case.name: case for case in image_cases()}
TEXT, IMAGE = "text_config", "vision_config"


def write(name, directory, config=None, processor=None):
    """Write the JSON files of a case with changes: of its configuration, and of its processor."""
    case = CASES[name]
    changed = {**case.config}
    for key, value in (config or {}).items():
        part, _, inner = key.rpartition(".")
        if part:
            changed[part] = {**changed[part], inner: value}
        else:
            changed[key] = value
    for file, content in (
        ("config.json", changed),
        ("preprocessor_config.json", {**case.processor, **(processor or {})}),
    ):
        content = {key: value for key, value in content.items() if value != "absent"}
        (directory / file).write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("vit-0", {"model_type": "vitt"}, 'model_type: expected .*"vit".*did you mean'),
        ("vit-0", {"model_type": "siglip2"}, "fixed sizes are of siglip"),
        ("vit-0", {"num_channels": 1}, "num_channels: expected 3, found 1"),
        ("vit-0", {"hidden_act": "mish"}, 'hidden_act: expected .*, found "mish"'),
        ("vit-0", {"hidden_size": 25}, "hidden_size: expected a multiple of num_attention_heads"),
        ("vit-0", {"image_size": [21, 21]}, r"image_size: expected an integer .*, found \[21"),
        ("vit-0", {"layer_norm_eps": None}, "layer_norm_eps: expected a value .* found null"),
        ("vit-0", {"image_size": 28}, "preprocessor_config.json: size: expected 28 x 28"),
        ("vit-0", {"patch_size": 22}, "patch_size: expected at most the size of pictures"),
        ("vit-0", {"qkv_bias": 1}, "qkv_bias: expected true or false, found 1"),
        ("vit-0", {"architectures": ["ViTForMaskedImageModeling"]}, "architectures: expected ..."),
        ("dinov3-0", {"architectures": ["DINOv3ViTForImageClassification"]}, "whose head prejit"),
        ("dinov3-0", {"num_attention_heads": 4}, "hidden_size: expected 4 times as many"),
        ("dinov3-0", {"rope_theta": 0}, "rope_theta: expected a number"),
        ("vit-1", {"id2label": {"0": "a", "2": "b"}}, "id2label: expected an object of 1 to"),
        ("vit-1", {"problem_type": "regression"}, "problem_type: expected .* found"),
        ("vit-1", {"quantization_config": {"quant_method": "x"}}, "quantization_config: expected"),
        ("clip-0", {f"{TEXT}.hidden_act": "mish"}, "text_config.hidden_act: expected"),
        ("clip-0", {f"{TEXT}.eos_token_id": 5}, "text_config.eos_token_id: expected 60"),
        ("clip-0", {f"{IMAGE}.num_hidden_layers": 0}, "vision_config.num_hidden_layers: expected"),
        ("clip-0", {f"{IMAGE}.image_size": 28}, "config.json: crop_size: expected 28 x 28"),
        ("clip-0", {TEXT: [1]}, "text_config: expected an object"),
        ("clip-0", {f"{TEXT}_dict": {"hidden_size": -1}}, "text_config_dict.hidden_size: expected"),
        ("clip-0", {"projection_dim": 0}, "projection_dim: expected an integer from 1"),
        ("siglip-0", {f"{IMAGE}.vision_use_head": False}, "vision_use_head: expected true"),
        ("siglip-0", {f"{TEXT}.projection_size": 7}, "projection_size: expected 24, the vision"),
    ],
)
def test_a_setting_that_is_not_built_is_an_error_that_names_it(tmp_path, name, changes, message):
    write(name, tmp_path, changes)
    with pytest.raises(CheckpointError, match=message) as raised:
        load_images(tmp_path)
    assert str(tmp_path) in str(raised.value)


@pytest.mark.parametrize("load", [load_config, load_encoder])
def test_a_section_that_does_not_ask_for_images_says_what_reads_them(tmp_path, load):
    write("clip-0", tmp_path)
    with pytest.raises(CheckpointError, match='found "clip"') as raised:
        load(tmp_path)
    assert "[encode] with images" in raised.value.hint


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_processor_type": "OwlViTImageProcessor"}, "image_processor_type: expected"),
        ({"resampel": 2}, "resampel: expected one of the keys .*did you mean"),
        ({"do_pad": True}, "do_pad: expected null or false; found true"),
        ({"data_format": "channels_last"}, "data_format: expected"),
        ({"do_resize": "yes"}, "do_resize: expected true or false"),
        ({"resample": 7}, r"resample: expected 0 \(nearest\), .* found 7"),
        ({"image_std": [1, 0, 1]}, "image_std: expected numbers other than 0"),
        ({"image_mean": [1, 2]}, "image_mean: expected 3 numbers"),
        ({"rescale_factor": "x"}, "rescale_factor: expected a number"),
        ({"size": {"longest_edge": 21}}, "size: expected an integer, or an object"),
        ({"size": {"shortest_edge": 21}}, "do_center_crop: expected true"),
        ({"do_resize": False}, "do_center_crop: expected true"),
        ({"size": None}, "size: expected 224, the default, or no such key; found null"),
        ({"do_rescale": None}, "do_rescale: expected true, the default"),
        ({"default_to_square": None}, "default_to_square: expected true, the default"),
        ({"image_processor_type": "SiglipImageProcessor"}, "do_center_crop: expected true, or a"),
        ({"image_processor_type": "DINOv3ViTImageProcessor", "resample": 3}, "resample: expected"),
        ({"do_center_crop": True}, "crop_size: expected an integer, or an object with height"),
    ],
)
def test_a_processor_that_would_give_other_pixels_is_an_error(tmp_path, changes, message):
    write("vit-0", tmp_path, processor=changes)
    with pytest.raises(CheckpointError, match=f"preprocessor_config.json: {message}"):
        load_images(tmp_path)


def test_a_processor_has_the_defaults_of_its_class(tmp_path):
    write("vit-0", tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("{}")
    plain = read_processing(tmp_path, "CLIPImageProcessor")
    assert (plain.size, plain.resize, plain.resample) == ((224, 224), (224,), 3)
    plain = read_processing(tmp_path, "DINOv3ViTImageProcessor")
    assert (plain.size, plain.resize, plain.mean[0]) == ((224, 224), (224, 224), 0.485)
    # a file of a whole processor counts before, if it has this part
    nested = {"image_processor": {"image_processor_type": "SiglipImageProcessor", "size": 21}}
    nested["image_processor"]["default_to_square"] = True
    (tmp_path / "processor_config.json").write_text(json.dumps(nested))
    plain = read_processing(tmp_path, "CLIPImageProcessor")
    assert (plain.size, plain.resample, plain.mean) == ((21, 21), 3, (0.5, 0.5, 0.5))
    bare = {"do_resize": False, "do_center_crop": True, "crop_size": 5, "do_rescale": False}
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": bare}))
    plain = read_processing(tmp_path, "ViTImageProcessor")
    assert (plain.size, plain.resize, plain.factor) == ((5, 5), (), 1.0)
    # Gemma's class never crops, whatever its file says.
    whole = {"do_center_crop": True, "crop_size": 5, "size": {"height": 6, "width": 7}}
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": whole}))
    assert read_processing(tmp_path, "Gemma3ImageProcessor").size == (6, 7)


def test_a_tokenizer_that_fills_texts_up_elsewhere_is_an_error(tmp_path):
    write("siglip-0", tmp_path)
    settings = tmp_path / "tokenizer_config.json"
    good = {"padding_side": "right", "model_input_names": ["input_ids"], "tokenizer_class": "T"}
    (tmp_path / "tokenizer.json").write_text("{}")
    for changes, message in (
        ({"padding_side": "left"}, 'padding_side: expected "right", found "left"'),
        ({"padding_side": None}, 'padding_side: expected "right", found null'),
        ({"model_input_names": ["input_ids", "attention_mask"]}, "model_input_names: expected"),
        ({"model_input_names": None}, "model_input_names: expected"),
        ({"tokenizer_class": "SiglipTokenizer"}, "tokenizer_class: expected another"),
        ({"tokenizer_class": "Siglip2Tokenizer"}, "tokenizer_class: expected another"),
        ({"tokenizer_class": None}, "tokenizer_class: expected another"),
        ({"model_max_length": 8}, "model_max_length: expected 13, the text_config.max_p.* found 8"),
    ):
        settings.write_text(json.dumps(good | changes))
        with pytest.raises(CheckpointError, match=f"tokenizer_config.json: {message}"):
            load_images(tmp_path)
    for length in (13, 10**30):
        settings.write_text(json.dumps({**good, "model_max_length": length}))
        assert describe_texts(load_images(tmp_path)).padding == 1, "config.json's"
    added = {"added_tokens": [{"id": 7, "content": "<pad>"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(added))
    settings.write_text(json.dumps({**good, "pad_token": {"content": "<pad>"}}))
    assert describe_texts(load_images(tmp_path)).padding == 7, "the tokenizer's"
    settings.write_text(json.dumps({**good, "pad_token": "[PAD]"}))
    with pytest.raises(CheckpointError, match="pad_token: expected one of the added_tokens"):
        describe_texts(load_images(tmp_path))


def test_activations_of_labels_are_those_of_transformers_pipeline(tmp_path):
    for changes, scores in (
        ({"id2label": "absent", "num_labels": 3}, "softmax"),
        ({"problem_type": "multi_label_classification"}, "sigmoid"),
        ({"id2label": {"0": "only"}}, "sigmoid"),
    ):
        write("vit-1", tmp_path, changes)
        assert describe_images(load_images(tmp_path)).scores == scores


def test_every_tensor_is_used_or_named(tmp_path):
    with np.load(REFERENCE) as recorded:
        shapes = json.loads(str(recorded["vit-0 tensors"]))
    CASES["vit-0"].write(tmp_path, shapes)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["decoder.weight"] = tensors.pop("layernorm.bias")
    save_file(tensors, file, metadata={"format": "pt"})
    wrong = r"missing vit\.layernorm\.bias; unexpected decoder\.weight"
    with pytest.raises(CheckpointError, match=wrong):
        open_encoder(tmp_path, images=True).names  # noqa: B018
