"""Read what a decoder's checkpoint says of images: the tower in config.json, the processor, the tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prejit.compiler.base.json_file import read_object
from prejit.compiler.base.suggestions import shown
from prejit.compiler.models.families.image_processing import FILES, read_processing
from prejit.compiler.models.families.seeing_decoder import Sight
from prejit.compiler.models.layers.config_checks import check_config, check_file, checks_of
from prejit.compiler.models.layers.layer_config import refused
from prejit.compiler.models.layers.linear import ACTIVATIONS
from prejit.runtime.errors import CheckpointError
from prejit.runtime.format.bundle_schema import Images

SEEING = {"gemma3": "siglip_vision_model"}
"""The model types whose images are read, with the model_type of their tower."""

_PROCESSOR = "Gemma3ImageProcessor"
_VISION = checks_of(
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "layer_norm_eps", "hidden_act"),
    *("image_size", "patch_size", "intermediate_size"),
)
_MARKS = ("boi_token", "image_token", "eoi_token")
_UNREAD = ("dtype", "torch_dtype", "num_labels", "id2label", "label2id", "_name_or_path")
_TOKENS = 256
"""The tokens of an image where a file does not say it, as in transformers."""


def read_sight(directory: Path, text: Any) -> Sight:
    """Return what a decoder needs to read images.

    Raises:
        CheckpointError: the model reads no images, a file is missing or has a mistake, or a setting is not
            supported; the error names file, key, value and what is allowed.
    """
    from transformers import CONFIG_MAPPING

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
    kind = CONFIG_MAPPING[SEEING[family]]
    if (found := part.get("model_type", SEEING[family])) != SEEING[family]:
        raise refused(file, "vision_config.model_type", shown(SEEING[family]), found)
    check_file(file, part, _VISION, kind, "vision_config.")
    try:
        vision: Any = kind.from_dict({key: v for key, v in part.items() if key not in _UNREAD})
    except Exception as error:  # ValueError, huggingface_hub's own and others
        reason = error.args[0] if error.args else type(error).__name__
        raise CheckpointError(
            f"{file}: vision_config: transformers refuses it: {reason}"
        ) from error
    check_config(file, vision, _VISION)
    wanted: Mapping[str, tuple[Any, ...]] = {"num_channels": (3,), "hidden_act": tuple(ACTIVATIONS)}
    for key, values in wanted.items():
        if (found := getattr(vision, key)) not in values:
            raise refused(file, f"vision_config.{key}", " or ".join(map(shown, values)), found)
    if vision.hidden_size % vision.num_attention_heads:
        multiple = f"a multiple of num_attention_heads = {vision.num_attention_heads}"
        raise refused(file, "vision_config.hidden_size", multiple, vision.hidden_size)
    if (cap := getattr(text, "final_logit_softcapping", None)) is not None:
        # transformers' class for images has no bound of logits, its class for texts has.
        raise refused(file, "text_config.final_logit_softcapping", "null", cap)
    tokens = _tokens(file, content, vision)
    processing = read_processing(directory, _PROCESSOR)
    size = vision.image_size
    if processing.size != (size, size):
        wanted_size = f"{size} x {size}, the vision_config.image_size of {file}"
        found = " x ".join(map(str, processing.size))
        raise refused(processing.file, "size", wanted_size, found)
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
