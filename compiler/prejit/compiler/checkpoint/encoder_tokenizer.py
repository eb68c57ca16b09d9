"""Check that an encoder's tokenizer.json says what transformers would do with its tokenizer.

transformers makes the tokenizer from two files. A bundle has tokenizer.json alone, cuts off the end of a text
that is too long, and takes every token of a single text as one of the first segment. Where that would give
other tokens, the build refuses the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prejit.compiler.base.json_file import read_object
from prejit.compiler.base.suggestions import shown
from prejit.compiler.models.families.sentence_layout import SentenceLayout
from prejit.runtime.errors import CheckpointError

_LOWERING = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer")
"""How the names of transformers' classes begin that normalize by do_lower_case, true if missing."""


def check_encoder_tokenizer(
    file: Path, content: bytes, layout: SentenceLayout, vocab_size: int
) -> None:
    """Check a tokenizer.json that the library can read.

    `file` is tokenizer.json with its content, `layout` and `vocab_size` those of its model.

    Raises:
        CheckpointError: the tokenizer would give other tokens than transformers; the error names file, key,
            value and what is allowed.
    """
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: cannot read JSON: {error}") from error
    settings_file = file.with_name("tokenizer_config.json")
    settings = read_object(settings_file, required=False)
    direction = _part(found, "truncation").get("direction", "Right")
    if direction != "Right" and settings.get("truncation_side") is None:
        raise CheckpointError(
            f'{file}: truncation.direction: expected "Right", found {shown(direction)}',
            hint="a bundle cuts off the end of a text that is too long: set Right, or truncation to null",
        )
    normalizer = _part(found, "normalizer")
    lowers = bool(settings.get("do_lower_case", True))
    if (
        str(settings.get("tokenizer_class")).startswith(_LOWERING)
        and normalizer.get("type") == "BertNormalizer"
        and normalizer.get("lowercase", True) is not lowers
    ):
        raise CheckpointError(
            f"{file}: normalizer.lowercase: expected {shown(lowers)}, the do_lower_case of {settings_file}, "
            f"found {shown(normalizer.get('lowercase'))}",
            hint="a bundle follows tokenizer.json, transformers tokenizer_config.json: correct the wrong one",
        )
    if read_object(file.with_name("config.json"), required=False).get("model_type") == "clip":
        _check_pooled(file, found, vocab_size - 1)
    if layout.scores or layout.has_segments is False:
        return
    single = _part(found, "post_processor").get("single")
    for piece in single if isinstance(single, list) else ():
        for name, value in piece.items():
            if value["type_id"] != 0:
                raise CheckpointError(
                    f"{file}: post_processor.single: expected type_id 0 everywhere, found "
                    f"{shown(value['type_id'])} of {name} {shown(value['id'])}",
                    hint="an embedding takes all tokens as of the first segment: set type_id to 0",
                )


def _check_pooled(file: Path, content: Mapping[str, Any], end: int) -> None:
    """Refuse texts that do not end with the token at whose place CLIP pools."""
    processor = _part(content, "post_processor")
    last: Any = None
    for part in processor.get("processors", [processor]):
        if part.get("type") in ("RobertaProcessing", "BertProcessing"):
            last = part["sep"][1]
        if part.get("type") == "TemplateProcessing":
            token = part["single"][-1].get("SpecialToken") if part["single"] else None
            last = token and part["special_tokens"][token["id"]]["ids"][-1]
    if last != end:
        raise CheckpointError(
            f"{file}: post_processor: expected {end}, the last of the vocabulary, at the end of texts, found "
            f"{shown(last)}",
            hint="CLIP pools at that token: take the tokenizer.json that belongs to the model",
        )


def _part(content: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    part = content.get(key)
    return part if isinstance(part, dict) else {}
