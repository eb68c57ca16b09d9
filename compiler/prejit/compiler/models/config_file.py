"""Read config.json of a checkpoint through transformers, and check it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prejit.compiler.base.json_file import read_json
from prejit.compiler.base.suggestions import did_you_mean, shown
from prejit.compiler.models.families.encoder_table import ENCODERS, HEADS
from prejit.compiler.models.families.family import Family
from prejit.compiler.models.families.family_table import DECODERS
from prejit.compiler.models.families.sentence import EncoderSource
from prejit.compiler.models.families.sentence_layout import SentenceLayout, read_layout
from prejit.compiler.models.layers.config_checks import (
    check_config,
    check_file,
    config_classes,
    transformers_config,
)
from prejit.compiler.models.layers.layer_config import BRING_YOUR_OWN, refused, require
from prejit.compiler.models.quantization_settings import read_quantization
from prejit.runtime.errors import CheckpointError

_TEXT_MODELS = {
    "gemma3": ("gemma3_text",),
    "gemma4": ("gemma4_text",),
    "gemma4_unified": ("gemma4_unified_text",),
    "llama4": ("llama4_text",),
    "mistral3": ("mistral", "ministral3"),
    "qwen3_5": ("qwen3_5_text",),
    "qwen3_5_moe": ("qwen3_5_moe_text",),
}
"""Model types that contain a text model of a supported family, which is built; the rest is ignored. The first
family is that of a text_config without model_type."""

_HEADS = {
    "[encode]": ("Model", "ForMaskedLM", "ForPreTraining", "ForCausalLM"),
    "[generate]": ("Model", "ForCausalLM", "ForConditionalGeneration"),
}
"""The last parts of the names of transformers' classes that each section builds. An encoder is built without
the heads with which it was pretrained; any other head is what the model is for."""

_SCORES = "ForSequenceClassification"
"""The end of the names of classes that score texts."""

_CAP = "final_logit_softcapping"
_TUNING = "attn_temperature_tuning"
"""A flag that is 4 in the published files of Llama 4, as transformers 4 wrote it; 5 refuses a number."""
_MOST_LABELS = 2**16

_FLOAT = "__float__"
"""The key of such an object."""


def load_config(directory: Path, *, images: bool = False) -> Any:
    """Return the configuration of a decoder's checkpoint, as transformers reads it.

    Args:
        directory: holds config.json.
        images: whether its prompts may hold images. Then the configuration has a `sight` (seeing_decoder.py).

    Raises:
        CheckpointError: there is no config.json, transformers does not accept it, or its family is not
            supported.
    """
    config = _load_config(directory, DECODERS, "[generate]")
    if images:
        from prejit.compiler.models.image_config import read_sight  # few models have any

        config.sight = read_sight(directory, config)
    return config


def load_encoder(directory: Path, layout: SentenceLayout | None = None) -> EncoderSource:
    """Return the configuration of an encoder: its transformer, and the modules that follow it."""
    layout = layout or read_layout(directory)
    is_plain = layout.files[:1] != (directory / "modules.json",)
    families = {kind: row for kind, row in ENCODERS.items() if kind in HEADS or not layout.scores}
    if layout.answers:
        families = {kind: row for kind, row in families.items() if HEADS[kind].is_causal}
    config = _load_config(
        layout.transformer,
        families,
        "[encode]",
        other=is_plain and not layout.scores,
        heads=("ForCausalLM",) if layout.answers else (_SCORES,) if layout.scores else None,
    )
    if layout.answers:
        require(config, _CAP, getattr(config, _CAP, None), [None])
    labels = 1 if layout.answers else _labels(layout) if layout.scores else 0
    return EncoderSource(config, layout, labels)


def _labels(layout: SentenceLayout) -> int:
    """Return how many scores of each text a model gives, as transformers' PreTrainedConfig counts them."""
    file = layout.transformer / "config.json"
    content = read_json(file, "")
    names = content.get("id2label")
    count = content.get("num_labels", 2) if names is None else names
    count = len(count) if isinstance(count, dict) else count
    if type(count) is not int or not 0 < count <= _MOST_LABELS:
        raise CheckpointError(
            f"{file}: id2label: expected an object of 1 to {_MOST_LABELS} labels, found {shown(names)}",
            hint="correct config.json, or take the one that was published with the weights",
        )
    return count


def _load_config(
    directory: Path,
    families: Mapping[str, Family],
    section: str,
    *,
    other: bool = True,
    heads: tuple[str, ...] | None = None,
) -> Any:
    """Return the configuration of a model that a section of a manifest builds.

    `families` are those of the section; `other` is whether the hint may be to give the other section, and
    `heads` are the ends of the classes of a model that scores; None: it does not.
    """
    what = f"a model that scores, in {section}" if heads else section
    known = sorted([*families, *(_TEXT_MODELS if section == "[generate]" else ())])
    file = directory / "config.json"
    content = read_json(
        file, "expected a directory in the Hugging Face layout, with config.json in it"
    )
    family = content.get("model_type") if isinstance(content, dict) else None
    if not isinstance(family, str) or family not in known:
        from prejit.compiler.models.families.image_table import IMAGE_MODELS

        others = {"[encode]": [*DECODERS], "[generate]": [*ENCODERS]}[section] if other else []
        there = "encode" if section == "[generate]" else "generate"
        hint = BRING_YOUR_OWN
        if str(family) in others:
            hint = f"give the manifest [{there}] instead of {section}"
        elif str(family) in IMAGE_MODELS:
            hint = "give the manifest [encode] with images = [1, 8]: this model reads images"
        raise CheckpointError(
            f"{file}: model_type: expected one of {', '.join(map(shown, known))} for {what}, found "
            f"{shown(family)}{did_you_mean(str(family), known)}",
            hint=hint,
        )
    classes = content.get("architectures")
    heads = heads or _HEADS[section]
    for name in classes if isinstance(classes, list) else ():
        # The class of a base model, or of a model's own code, may have any name; its tensors decide.
        if "For" in str(name) and not str(name).endswith(heads):
            names = " or ".join(f"...{end}" for end in heads)
            raise CheckpointError(
                f"{file}: architectures: expected {names} for {what}, found "
                f"{shown(name)}, whose head prejit does not build",
                hint=BRING_YOUR_OWN,
            )
    of_family = families[_TEXT_MODELS.get(family, (family,))[0]].quantized
    quantization = content.get("quantization_config")
    is_familys = read_quantization(file, quantization, of_family) is None and bool(quantization)
    config = _completed(file, content, families)
    check_config(file, config, families[config.model_type].keys)
    # the form of matrices that the family reads itself
    config.published_as = quantization["quant_method"] if is_familys else None
    return config


def _with_floats(value: Any) -> Any:
    """Return the content of a file with the numbers that JSON lacks, which transformers writes as objects."""
    if isinstance(value, list):
        return [_with_floats(each) for each in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_FLOAT} and value[_FLOAT] in ("Infinity", "-Infinity", "NaN"):
        return float(value[_FLOAT])
    return {key: _with_floats(each) for key, each in value.items()}


def _completed(file: Path, content: Mapping[str, Any], families: Mapping[str, Family]) -> Any:
    """Return the content of config.json as transformers' configuration of the text model.

    Raises:
        CheckpointError: a value is one that no model can have, or transformers does not accept it.
    """
    classes, content = config_classes(), _with_floats(content)
    text, prefix, family = content, "", content["model_type"]
    if family in _TEXT_MODELS:
        part = content.get("text_config")
        if not isinstance(part, dict):
            raise CheckpointError(
                f"{file}: text_config: expected an object, found {shown(part)}",
                hint="correct config.json, or take the one that was published with the weights",
            )
        kinds = _TEXT_MODELS[family]
        text, prefix, family = part, "text_config.", part.get("model_type", kinds[0])
        if family not in kinds:
            raise refused(file, "text_config.model_type", " or ".join(map(shown, kinds)), family)
    if family not in classes:
        raise CheckpointError(
            f"{file}: {prefix}model_type: the transformers installed here does not have {shown(family)}",
            hint="pip install --upgrade transformers",
        )
    if type(text.get(_TUNING)) is int:
        text = {**text, _TUNING: text[_TUNING] != 0}
    kind = classes[family]
    check_file(file, text, families[family].keys, kind, prefix)

    def complete(config: Any) -> Any:
        if prefix:
            # The only key that transformers reads beside text_config. Its default differs by family; a
            # checkpoint that does not fit it is refused.
            tied = text.get("tie_word_embeddings", content["model_type"].startswith("gemma"))
            config.tie_word_embeddings = content.get("tie_word_embeddings", tied)
        if family == "t5":
            # transformers always says true, and 5.0.0 scales the head of every T5. In files that it wrote
            # scale_decoder_outputs says what tie_word_embeddings said in the first one.
            tied = text.get("tie_word_embeddings") is not False
            config.tie_word_embeddings = text.get("scale_decoder_outputs", tied)
        config.name_or_path = str(file.parent)
        return with_layer_heads(config)

    # A text model does not read the tower of images beside it.
    read = {key: value for key, value in text.items() if key != "vision_config"}
    return transformers_config(file, kind, read, prefix, complete)


def with_layer_heads(config: Any) -> Any:
    """Return a configuration with `layer_heads`: the heads of keys of each layer, and the size of its heads.

    transformers raises an error when one reads a value that some layers have in place of the one of all.
    """
    if getattr(config, "is_heterogeneous", False):
        layers = config.per_layer_config
        config.layer_heads = [(each.num_key_value_heads, each.head_dim) for each in layers]
        config.per_layer_config = None
    return config
