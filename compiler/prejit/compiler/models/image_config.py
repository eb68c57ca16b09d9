"""Read the configuration of a model that reads images, and make it as an abstract flax nnx module."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flax import nnx

from prejit.compiler.base.json_file import read_object
from prejit.compiler.base.stored_dtypes import GROUPS_OF_32, Groups
from prejit.compiler.base.suggestions import did_you_mean, shown
from prejit.compiler.models import quantizing
from prejit.compiler.models.families.image_models import (
    ImageModel,
    ImageSource,
    SingleTower,
    TwoTowers,
)
from prejit.compiler.models.families.image_processing import ImageProcessing, read_processing
from prejit.compiler.models.families.image_table import IMAGE_MODELS, ImageRow
from prejit.compiler.models.families.image_towers import ImageFamily
from prejit.compiler.models.families.sentence import EncoderConfig
from prejit.compiler.models.families.sentence_layout import read_layout
from prejit.compiler.models.layers import forms_while_tracing
from prejit.compiler.models.layers.config_checks import check_config, check_file
from prejit.compiler.models.layers.layer_config import BRING_YOUR_OWN, Naming, refused
from prejit.compiler.models.layers.linear import ACTIVATIONS
from prejit.compiler.models.parameters import Parameter, parameters_of
from prejit.runtime.errors import CheckpointError
from prejit.runtime.format.bundle_schema import Images

_LABELED = "ForImageClassification"
_MOST_LABELS = 2**16
_UNREAD = (
    *("num_labels", "id2label", "label2id", "dtype", "torch_dtype", "name_or_path"),
    "_name_or_path",
)
"""Keys that no family reads. transformers would act on them."""


def load_images(directory: Path) -> ImageSource:
    """Return the configuration of a model that reads images, as transformers reads it.

    Raises:
        CheckpointError: a file is missing, transformers does not accept it, or a setting is not supported;
            the error names file, key, value and what is allowed.
    """
    # At import transformers would advise to install torch, which no step here needs.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import CONFIG_MAPPING

    file = directory / "config.json"
    content = read_object(
        file, "expected a directory in the Hugging Face layout, with config.json in it"
    )
    family = content.get("model_type")
    if not isinstance(family, str) or family not in IMAGE_MODELS:
        known = ", ".join(map(shown, IMAGE_MODELS))
        naflex = " (its pictures have no fixed size; fixed sizes are of siglip)" * (
            family == "siglip2"
        )
        raise CheckpointError(
            f"{file}: model_type: expected one of {known} for encode.images, found {shown(family)}{naflex}"
            f"{did_you_mean(str(family), IMAGE_MODELS)}",
            hint=BRING_YOUR_OWN,
        )
    row = IMAGE_MODELS[family]
    labeled = _is_labeled(file, content, row)
    if content.get("quantization_config"):
        raise CheckpointError(
            f"{file}: quantization_config: expected none, found {shown(content['quantization_config'])}",
            hint="take the checkpoint in float32, bfloat16 or float16",
        )
    _check_content(file, content, row, CONFIG_MAPPING[family])
    read = {key: value for key, value in content.items() if key not in _UNREAD}
    try:
        config: Any = CONFIG_MAPPING[family].from_dict(read)
    except Exception as error:  # ValueError, huggingface_hub's own and others
        reason = error.args[0] if error.args else type(error).__name__
        raise CheckpointError(f"{file}: transformers refuses it: {reason}") from error
    config.name_or_path = str(directory)
    for part, prefix in _parts(config, row):
        texts = prefix == "text_config."
        check_config(file, part, row.text_keys if texts else row.keys, prefix)
        allowed = row.text_allowed if texts else row.allowed
        for key, values in {**allowed, "hidden_act": tuple(ACTIVATIONS)}.items():
            found = getattr(part, key, values[0])
            if found not in values:
                raise refused(file, prefix + key, " or ".join(map(shown, values)), found)
        if part.hidden_size % part.num_attention_heads:
            raise refused(
                file,
                f"{prefix}hidden_size",
                f"a multiple of num_attention_heads = {part.num_attention_heads}",
                part.hidden_size,
            )
    processing = read_processing(directory, row.processor)
    _check_image(file, config, row, processing)
    labels, scores = _labels(file, content) if labeled else ((), "softmax")
    return ImageSource(config, processing, labels, scores, read_layout(directory))


def _is_labeled(file: Path, content: Mapping[str, Any], row: ImageRow) -> bool:
    """Return whether the model has a head of labels."""
    classes = content.get("architectures")
    heads = (
        [name for name in classes or () if "For" in str(name)] if isinstance(classes, list) else []
    )
    for name in heads:
        if not (row.classifies and str(name).endswith(_LABELED)):
            allowed = "...Model" + f" or ...{_LABELED}" * row.classifies
            raise CheckpointError(
                f"{file}: architectures: expected {allowed}, found {shown(name)}, whose head prejit does "
                "not build",
                hint=BRING_YOUR_OWN,
            )
    return bool(heads)


def _check_content(file: Path, content: Mapping[str, Any], row: ImageRow, kind: Any) -> None:
    """Check the values in the file, before transformers computes with them."""
    if isinstance(row.towers, ImageFamily):
        check_file(file, content, row.keys, kind)
        return
    for name, checks in (("text_config", row.text_keys), ("vision_config", row.keys)):
        for key in (name, f"{name}_dict"):
            part = content.get(key)
            if part is None and key != name:
                continue
            if not isinstance(part, dict):
                raise refused(file, key, "an object", part)
            check_file(file, part, checks, kind.sub_configs[name], f"{key}.")


def _parts(config: Any, row: ImageRow) -> list[tuple[Any, str]]:
    """Return the configurations of the towers, each with what precedes its keys."""
    if isinstance(row.towers, ImageFamily):
        return [(config, "")]
    return [(config.text_config, "text_config."), (config.vision_config, "vision_config.")]


def _check_image(file: Path, config: Any, row: ImageRow, processing: ImageProcessing) -> None:
    """Check that pictures have the size that the model takes."""
    (*_, (image, prefix)) = _parts(config, row)
    tower = row.towers if isinstance(row.towers, ImageFamily) else row.towers.image
    fixed = tower.resampling is None and bool(tower.positions)
    size, patch = image.image_size, image.patch_size
    if patch > min(size, *processing.size):
        raise refused(file, f"{prefix}patch_size", "at most the size of pictures", patch)
    if fixed and processing.size != (size, size):
        found = " x ".join(map(str, processing.size))
        raise refused(
            processing.file, "size", f"{size} x {size}, the {prefix}image_size of {file}", found
        )
    if tower.block.rotary and (image.hidden_size // image.num_attention_heads) % 4:
        wanted = "4 times as many numbers for each head, or a multiple of that"
        raise refused(file, f"{prefix}hidden_size", wanted, image.hidden_size)
    if isinstance(row.towers, ImageFamily):
        return
    if row.towers.pads:
        text = config.text_config
        if text.projection_size != image.hidden_size:
            wanted = f"{image.hidden_size}, the vision_config.hidden_size"
            raise refused(file, "text_config.projection_size", wanted, text.projection_size)
        _check_padding(file.with_name("tokenizer_config.json"), text.max_position_embeddings)
    else:
        _check_end(file, config)


def _check_end(file: Path, config: Any) -> None:
    """Check that the last token of a text, which a bundle pools, is that which the reference pools."""
    end, last = config.text_config.eos_token_id, config.text_config.vocab_size - 1
    if end not in (2, last):
        wanted = f"{last}, the last of the vocabulary, or 2, by which transformers means it"
        raise refused(file, "text_config.eos_token_id", wanted, end)
    if type(config.projection_dim) is not int or not 0 < config.projection_dim <= 2**20:
        raise refused(
            file, "projection_dim", f"an integer from 1 to {2**20}", config.projection_dim
        )


def _check_padding(file: Path, most: int) -> None:
    """Check that a tokenizer fills up texts behind their end, to `most`, with tokens that count."""
    settings = read_object(file, required=False)
    reads_texts = file.with_name("tokenizer.json").is_file()
    for key, wanted in {"padding_side": "right", "model_input_names": ["input_ids"]}.items():
        # Where the key is missing, many classes pad left, and all return a mask.
        if (reads_texts or key in settings) and settings.get(key) != wanted:
            raise refused(file, key, shown(wanted), settings.get(key))
    if not reads_texts:
        return
    kind = settings.get("tokenizer_class")
    if not kind or str(kind).startswith("Siglip"):
        wanted = "another class than Siglip..., the default: these change texts in Python"
        raise refused(file, "tokenizer_class", wanted, kind)
    length = settings.get("model_max_length")
    if length not in (None, most) and not (type(length) in (int, float) and length > 10**9):
        wanted = f"{most}, the text_config.max_position_embeddings, or no such key"
        raise refused(file, "model_max_length", wanted, length)


def _padding(source: ImageSource) -> int:
    """Return the token that fills texts up: the tokenizer's, or config.json's if that names none."""
    file = Path(source.config.name_or_path, "tokenizer_config.json")
    token = read_object(file, required=False).get("pad_token")
    text = token.get("content") if isinstance(token, dict) else token
    tokenizer = file.with_name("tokenizer.json")
    if text is None or not tokenizer.is_file():
        return int(source.config.text_config.pad_token_id)
    try:
        added = json.loads(tokenizer.read_bytes())["added_tokens"]
        return int(next(each["id"] for each in added if each["content"] == text))
    except (OSError, ValueError, TypeError, LookupError, StopIteration) as error:
        wanted = f"one of the added_tokens of {tokenizer}"
        raise refused(file, "pad_token", wanted, text) from error


def _labels(file: Path, content: Mapping[str, Any]) -> tuple[tuple[str, ...], str]:
    """Return the names of labels, and the activation of transformers' pipeline for them."""
    names, count = content.get("id2label"), content.get("num_labels", 2)
    if names is None:
        names = (
            {str(n): f"LABEL_{n}" for n in range(count)}
            if type(count) is int and count < 2**16
            else {}
        )
    keys = [str(n) for n in range(len(names))] if isinstance(names, dict) else []
    if not 0 < len(keys) <= _MOST_LABELS or not all(
        isinstance(names.get(key), str) for key in keys
    ):
        wanted = f'an object of 1 to {_MOST_LABELS} names, with keys from "0" on'
        raise refused(file, "id2label", wanted, names)
    kinds = {None: "softmax", "single_label_classification": "softmax"}
    kinds["multi_label_classification"] = "sigmoid"
    kind = content.get("problem_type")
    if kind not in kinds:
        raise refused(file, "problem_type", " or ".join(map(shown, kinds)), kind)
    return tuple(names[key] for key in keys), "sigmoid" if len(keys) == 1 else kinds[kind]


def describe_images(source: ImageSource) -> Images:
    """Return the sizes of an image encoder, which lowering and encoding need."""
    config, processing = source.config, source.processing
    row = IMAGE_MODELS[config.model_type]
    scores: str | None = source.scores if source.labels else None
    if isinstance(row.towers, ImageFamily):
        width = len(source.labels) or config.hidden_size
    else:
        width = _width(config, row)
        scores = "sigmoid" if row.towers.pads else "softmax"
    return Images(
        config.model_type,
        width,
        processing.size,
        processing.resize,
        processing.resample,
        scores,
        source.labels or None,
    )


def describe_texts(source: ImageSource) -> EncoderConfig | None:
    """Return the sizes of the encoder of texts; None: the model has none."""
    config, row = source.config, IMAGE_MODELS[source.config.model_type]
    if isinstance(row.towers, ImageFamily):
        return None
    text = config.text_config
    return EncoderConfig(
        config.model_type,
        text.vocab_size,
        _width(config, row),
        text.max_position_embeddings,
        "lasttoken",
        True,
        padding=_padding(source) if row.towers.pads else None,
    )


def _width(config: Any, row: ImageRow) -> int:
    assert not isinstance(row.towers, ImageFamily)
    return int(config.projection_dim if row.towers.projection else config.vision_config.hidden_size)


def make_images(
    source: ImageSource,
    dtype: str = "float32",
    *,
    out_in: bool = False,
    groups: Groups = GROUPS_OF_32,
) -> ImageModel:
    """Return a model as an abstract module; arguments as of `model_registry.make_encoder`."""
    row = IMAGE_MODELS[source.config.model_type]

    def build() -> ImageModel:
        if not isinstance(row.towers, ImageFamily):
            return TwoTowers(row.towers, source)
        prefix = row.naming.prefix.removesuffix(".")
        return SingleTower(row.towers, source, prefix, with_mean=row.with_mean)

    with forms_while_tracing.storing(out_in=out_in):
        module: ImageModel = nnx.eval_shape(build)
    quantizing.store(module, dtype, groups)
    return module


def published_parameters(directory: Path, *, out_in: bool) -> tuple[dict[str, Parameter], Naming]:
    """Return the parameters of a model that reads images, and how checkpoints name its tensors."""
    source = load_images(directory)
    parameters = parameters_of(make_images(source, out_in=out_in))
    return parameters, IMAGE_MODELS[source.config.model_type].naming
