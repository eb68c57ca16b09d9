"""Read the configuration of a model that reads images.

An image encoder is made as an abstract flax nnx module. For a decoder whose prompts may hold images this
reads the tower in config.json, the processor and the tokenizer.
"""

from __future__ import annotations

import json
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
from prejit.compiler.models.families.image_processing import FILES, ImageProcessing, read_processing
from prejit.compiler.models.families.image_table import IMAGE_MODELS, ImageRow
from prejit.compiler.models.families.image_towers import ImageFamily
from prejit.compiler.models.families.seeing_decoder import Sight
from prejit.compiler.models.families.sentence import EncoderConfig
from prejit.compiler.models.families.sentence_layout import read_layout
from prejit.compiler.models.layers import kernel_calls
from prejit.compiler.models.layers.config_checks import (
    Checks,
    check_config,
    check_file,
    checks_of,
    config_classes,
    transformers_config,
)
from prejit.compiler.models.layers.layer_config import BRING_YOUR_OWN, Naming, refused
from prejit.compiler.models.layers.linear import ACTIVATIONS
from prejit.compiler.models.parameters import Parameter, parameters_of
from prejit.runtime.errors import CheckpointError
from prejit.runtime.format.bundle_schema import Images

_LABELED = "ForImageClassification"
_MOST_LABELS = 2**16
SEEING = {"gemma3": "siglip_vision_model"}
"""The model types whose images are read, with the model_type of their tower."""

_PROCESSOR = "Gemma3ImageProcessor"
_VISION = checks_of(
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "layer_norm_eps", "hidden_act"),
    *("image_size", "patch_size", "intermediate_size"),
)
_MARKS = ("boi_token", "image_token", "eoi_token")
_TOKENS = 256
"""The tokens of an image where a file does not say it, as in transformers."""


def load_images(directory: Path) -> ImageSource:
    """Return the configuration of a model that reads images, as transformers reads it.

    Raises:
        CheckpointError: a file is missing, transformers does not accept it, or a setting is not supported;
            the error names file, key, value and what is allowed.
    """
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
    kind = config_classes()[family]
    _check_content(file, content, row, kind)
    config = transformers_config(file, kind, content)
    config.name_or_path = str(directory)
    for part, prefix in _parts(config, row):
        texts = prefix == "text_config."
        checks = row.text_keys if texts else row.keys
        _check_tower(file, part, checks, row.text_allowed if texts else row.allowed, prefix)
    processing = read_processing(directory, row.processor)
    _check_image(file, config, row, processing)
    labels, scores = _labels(file, content) if labeled else ((), "softmax")
    return ImageSource(config, processing, labels, scores, read_layout(directory))


def _check_tower(
    file: Path, part: Any, checks: Checks, allowed: Mapping[str, tuple[Any, ...]], prefix: str
) -> None:
    """Check the configuration of a tower; `prefix` precedes its keys."""
    check_config(file, part, checks, prefix)
    for key, values in {**allowed, "hidden_act": tuple(ACTIVATIONS)}.items():
        found = getattr(part, key, values[0])
        if found not in values:
            raise refused(file, prefix + key, " or ".join(map(shown, values)), found)
    if part.hidden_size % part.num_attention_heads:
        multiple = f"a multiple of num_attention_heads = {part.num_attention_heads}"
        raise refused(file, f"{prefix}hidden_size", multiple, part.hidden_size)


def _check_size(file: Path, processing: ImageProcessing, size: int, prefix: str) -> None:
    """Check that the processor makes pictures of the size that the tower takes."""
    if processing.size != (size, size):
        wanted = f"{size} x {size}, the {prefix}image_size of {file}"
        key = "size" if processing.size == processing.resize else "crop_size"
        raise refused(processing.file, key, wanted, " x ".join(map(str, processing.size)))


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
    if fixed:
        _check_size(file, processing, size, prefix)
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

    with kernel_calls.storing(out_in=out_in):
        module: ImageModel = nnx.eval_shape(build)
    quantizing.store(module, dtype, groups)
    return module


def published_parameters(directory: Path, *, out_in: bool) -> tuple[dict[str, Parameter], Naming]:
    """Return the parameters of a model that reads images, and how checkpoints name its tensors."""
    source = load_images(directory)
    parameters = parameters_of(make_images(source, out_in=out_in))
    return parameters, IMAGE_MODELS[source.config.model_type].naming


def read_sight(directory: Path, text: Any) -> Sight:
    """Return what a decoder needs to read images.

    Raises:
        CheckpointError: the model reads no images, a file is missing or has a mistake, or a setting is not
            supported; the error names file, key, value and what is allowed.
    """
    file = directory / "config.json"
    content = read_object(file)
    family = content.get("model_type")
    if family not in SEEING:
        known = " or ".join(map(shown, SEEING))
        raise CheckpointError(
            f"{file}: model_type: expected {known} for generate.images, found {shown(family)}",
            hint="leave images out of [generate]: this model is built for texts alone",
        )
    part = content.get("vision_config")
    if not isinstance(part, dict):
        raise refused(file, "vision_config", "an object", part)
    kind = config_classes()[SEEING[family]]
    if (found := part.get("model_type", SEEING[family])) != SEEING[family]:
        raise refused(file, "vision_config.model_type", shown(SEEING[family]), found)
    check_file(file, part, _VISION, kind, "vision_config.")
    vision = transformers_config(file, kind, part, "vision_config.")
    _check_tower(file, vision, _VISION, {"num_channels": (3,)}, "vision_config.")
    if (cap := getattr(text, "final_logit_softcapping", None)) is not None:
        # transformers' class for images has no bound of logits, its class for texts has.
        raise refused(file, "text_config.final_logit_softcapping", "null", cap)
    tokens = _tokens(file, content, vision)
    processing = read_processing(directory, _PROCESSOR)
    _check_size(file, processing, vision.image_size, "vision_config.")
    token_id, marks = _tokenizer(directory, content, text.vocab_size)
    return Sight(vision, processing, tokens, token_id, marks)


def describe_sight(sight: Sight, width: int) -> Images:
    """Return what generation needs to know of images; `width` is the decoder's."""
    processing = sight.processing
    return Images(
        sight.vision.model_type,
        sight.tokens * width,
        processing.size,
        processing.resize,
        processing.resample,
        tokens=sight.tokens,
        token_id=sight.token_id,
        marks=sight.marks,
    )


def _tokens(file: Path, content: Mapping[str, Any], vision: Any) -> int:
    """Return the number of tokens of an image, which make a square."""
    tokens: Any = content.get("mm_tokens_per_image", _TOKENS)
    patches = vision.image_size // vision.patch_size
    side = round(tokens**0.5) if type(tokens) is int and 0 < tokens <= 2**20 else 0
    if side == 0 or side**2 != tokens or patches < side or patches % side:
        wanted = f"the square of a number that divides the {patches} patches of a row"
        raise refused(file, "mm_tokens_per_image", wanted, tokens)
    processor = file.with_name(FILES[0])
    found = read_object(processor, required=False).get("image_seq_length", _TOKENS)
    if found != tokens:
        wanted = f"{tokens}, the mm_tokens_per_image of {file}"
        raise refused(processor, "image_seq_length", wanted, found)
    return int(tokens)


def _tokenizer(
    directory: Path, content: Mapping[str, Any], vocab_size: int
) -> tuple[int, tuple[str, str, str]]:
    """Return the token of images, and the texts of the tokens before, in and behind one."""
    file, tokenizer = directory / "tokenizer_config.json", directory / "tokenizer.json"
    settings = read_object(file, "expected the files that were published with the model")
    extra = settings.get("extra_special_tokens")
    settings = {**(extra if isinstance(extra, dict) else {}), **settings}
    added = read_object(tokenizer, "prompts with images are texts").get("added_tokens")
    try:
        ids = {str(each["content"]): int(each["id"]) for each in added or ()}
    except (TypeError, ValueError, LookupError) as error:
        raise refused(tokenizer, "added_tokens", "objects with id and content", added) from error
    texts = []
    for name in _MARKS:
        token = settings.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if not isinstance(text, str) or text not in ids:
            raise refused(file, name, f"one of the added_tokens of {tokenizer}", text)
        texts.append(text)
    token_id, found = ids[texts[1]], content.get("image_token_index", content.get("image_token_id"))
    if found is None:
        found = 262_144  # as in transformers
    if found != token_id or not 0 <= token_id < vocab_size:
        wanted = f"{token_id}, the id of {shown(texts[1])}, below the vocab_size {vocab_size}"
        raise refused(directory / "config.json", "image_token_index", wanted, found)
    return token_id, (texts[0], texts[1], texts[2])
