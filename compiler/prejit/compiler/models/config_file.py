"""Read config.json of a checkpoint through transformers, and check it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prejit.compiler.base.json_file import read_json
from prejit.compiler.base.suggestions import did_you_mean, shown
from prejit.compiler.models.families.family import Family
from prejit.compiler.models.families.family_table import DECODERS, ENCODERS
from prejit.compiler.models.families.sentence import EncoderSource
from prejit.compiler.models.families.sentence_layout import read_layout
from prejit.compiler.models.layers.config_checks import Checks, check_config, check_file
from prejit.compiler.models.layers.layer_config import BRING_YOUR_OWN
from prejit.runtime.errors import CheckpointError

_TEXT_MODELS = {"gemma3": ("gemma3_text",), "mistral3": ("mistral", "ministral3")}
"""Model types that contain a text model of a supported family, which is built; the rest is ignored. The first
family is that of a text_config without model_type."""

_HEADS = {
    "[encode]": ("Model", "ForMaskedLM", "ForPreTraining"),
    "[generate]": ("Model", "ForCausalLM", "ForConditionalGeneration"),
}
"""The last parts of the names of transformers' classes that each section builds. An encoder is built without
the heads with which it was pretrained; any other head is what the model is for."""

_UNREAD = frozenset(
    (
        *("num_labels", "id2label", "label2id", "dtype", "torch_dtype", "vision_config"),
        *("name_or_path", "_name_or_path", "quantization_config"),
    )
)
"""Keys that no family reads. transformers would act on them: it makes a name for each of a billion labels."""


def load_config(directory: Path) -> Any:
    """Return the configuration of a decoder's checkpoint, as transformers reads it.

    Args:
        directory: holds config.json.

    Raises:
        CheckpointError: there is no config.json, transformers does not accept it, or its family is not
            supported.
    """
    return _load_config(directory, sorted([*DECODERS, *_TEXT_MODELS]), "[generate]")


def load_encoder(directory: Path) -> EncoderSource:
    """Return the configuration of an encoder: its transformer, and the modules that follow it.

    Args:
        directory: in the layout of sentence-transformers, or a plain one with config.json.

    Raises:
        CheckpointError: as `load_config`, or a module or setting is not supported.
    """
    layout = read_layout(directory)
    is_plain = layout.files[:1] != (directory / "modules.json",)
    config = _load_config(layout.transformer, sorted(ENCODERS), "[encode]", other=is_plain)
    return EncoderSource(config, layout)


def _load_config(directory: Path, known: list[str], section: str, *, other: bool = True) -> Any:
    """Return the configuration of a model that a section of a manifest builds.

    `known` are the model types of the section; `other` is whether the hint may be to give the other
    section.
    """
    file = directory / "config.json"
    content = read_json(
        file, "expected a directory in the Hugging Face layout, with config.json in it"
    )
    family = content.get("model_type") if isinstance(content, dict) else None
    if not isinstance(family, str) or family not in known:
        others = {"[encode]": [*DECODERS], "[generate]": [*ENCODERS]}[section] if other else []
        there = "encode" if section == "[generate]" else "generate"
        raise CheckpointError(
            f"{file}: model_type: expected one of {', '.join(map(shown, known))} for {section}, found "
            f"{shown(family)}{did_you_mean(str(family), known)}",
            hint=f"give the manifest [{there}] instead of {section}"
            if str(family) in others
            else BRING_YOUR_OWN,
        )
    classes = content.get("architectures")
    for name in classes if isinstance(classes, list) else ():
        # The class of a base model, or of a model's own code, may have any name; its tensors decide.
        if "For" in str(name) and not str(name).endswith(_HEADS[section]):
            names = " or ".join(f"...{end}" for end in _HEADS[section])
            raise CheckpointError(
                f"{file}: architectures: expected {names} for {section}, found "
                f"{shown(name)}, whose head prejit does not build",
                hint=BRING_YOUR_OWN,
            )
    quantized = content.get("quantization_config")
    method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
    if quantized and method not in _family(family).quantized:
        found = shown(quantized)
        raise CheckpointError(
            f"{file}: quantization_config: expected none, found {found}",
            hint="take the checkpoint in float32, bfloat16 or float16",
        )
    config = _completed(file, content)
    check_config(file, config, _checks(config.model_type))
    return config


def _family(model_type: str) -> Family:
    """Return the family of a model type, or of the text model in it."""
    return {**DECODERS, **ENCODERS}[_TEXT_MODELS.get(model_type, (model_type,))[0]]


def _checks(family: str) -> Checks:
    return {**DECODERS, **ENCODERS}[family].keys


def _completed(file: Path, content: Mapping[str, Any]) -> Any:
    """Return the content of config.json as transformers' configuration of the text model.

    Raises:
        CheckpointError: a value is one that no model can have, or transformers does not accept it.
    """
    # At import transformers would advise to install torch, which no step here needs.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import CONFIG_MAPPING

    text, prefix, family = content, "", content["model_type"]
    if family in _TEXT_MODELS:
        part = content.get("text_config")
        if not isinstance(part, dict):
            raise CheckpointError(
                f"{file}: text_config: expected an object, found {shown(part)}",
                hint="correct config.json, or take the one that was published with the weights",
            )
        families = _TEXT_MODELS[family]
        text, prefix, family = part, "text_config.", part.get("model_type", families[0])
        if family not in families:
            raise CheckpointError(
                f"{file}: text_config.model_type: expected {' or '.join(map(shown, families))}, found "
                f"{shown(family)}",
                hint=BRING_YOUR_OWN,
            )
    if family not in CONFIG_MAPPING:
        raise CheckpointError(
            f"{file}: {prefix}model_type: the transformers installed here does not have {shown(family)}",
            hint="pip install --upgrade transformers",
        )
    check_file(file, text, _checks(family), CONFIG_MAPPING[family].attribute_map, prefix)
    read = {key: value for key, value in text.items() if key not in _UNREAD}
    try:
        config = CONFIG_MAPPING[family].from_dict(read)
        if text is not content:
            # The only key that transformers reads beside text_config. Its default differs by family; a
            # checkpoint that does not fit it is refused.
            tied = text.get("tie_word_embeddings", content["model_type"] == "gemma3")
            config.tie_word_embeddings = content.get("tie_word_embeddings", tied)
        if family == "t5":
            # transformers always says true, and 5.0.0 scales the head of every T5. In files that it wrote
            # scale_decoder_outputs says what tie_word_embeddings said in the first one.
            tied = text.get("tie_word_embeddings") is not False
            config.tie_word_embeddings = text.get("scale_decoder_outputs", tied)
        config.name_or_path = str(file.parent)
    except Exception as error:  # KeyError, ValueError, huggingface_hub's own and others
        reason = error.args[0] if error.args else type(error).__name__
        raise CheckpointError(f"{file}: transformers refuses it: {reason}") from error
    return config
