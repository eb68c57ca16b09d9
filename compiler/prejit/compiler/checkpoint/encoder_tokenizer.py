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

_OF_WORDS = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MPNetTokenizer")
"""How the names of transformers' classes begin that make their own normalizer, by keys of _NORMALIZED."""
_OF_WORDS_TOO = ("bert", "distilbert", "electra", "mpnet", "nomic_bert")
"""The values of model_type whose tokenizer is of such a class where no file names one."""
_OF_BYTES = ("CodeGenTokenizer", "GPT2Tokenizer", "GPTNeoXTokenizer", "RobertaTokenizer")
"""How the names of transformers' classes begin that split texts by add_prefix_space, false if missing."""
_NORMALIZED = {
    "lowercase": ("do_lower_case", True),
    "strip_accents": ("strip_accents", None),
    "handle_chinese_chars": ("tokenize_chinese_chars", True),
}
"""Each setting of BertNormalizer with the key of tokenizer_config.json, and the value if that is missing."""


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
    config = read_object(file.with_name("config.json"), required=False)
    kind = settings.get("tokenizer_class") or config.get("tokenizer_class")
    if str(kind).startswith(_OF_WORDS) or (
        kind is None and config.get("model_type") in _OF_WORDS_TOO
    ):
        _check_normalizer(file, _part(found, "normalizer"), settings_file, settings)
    if config.get("model_type") == "clip":
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


def check_prefix_space(file: Path, content: bytes) -> None:
    """Check that a tokenizer.json puts a space before texts where transformers does, and only there.

    Raises:
        CheckpointError: it does otherwise than tokenizer_config.json beside it says.
    """
    settings_file, key = file.with_name("tokenizer_config.json"), "add_prefix_space"
    settings = read_object(settings_file, required=False)
    config = read_object(file.with_name("config.json"), required=False)
    kind = settings.get("tokenizer_class") or config.get("tokenizer_class")
    if kind is None and config.get("model_type") == "roberta":
        kind = "RobertaTokenizer"
    splits, wanted = _part(json.loads(content), "pre_tokenizer"), bool(settings.get(key, False))
    if not str(kind).startswith(_OF_BYTES) or splits.get("type") != "ByteLevel":
        return
    if splits.get(key, True) is not wanted:
        where = f"{file}: pre_tokenizer.{key}"
        raise _differing(where, wanted, f"the {key} of {settings_file}", splits.get(key))


def _check_normalizer(
    file: Path, normalizer: Mapping[str, Any], settings_file: Path, settings: Mapping[str, Any]
) -> None:
    """Refuse a BertNormalizer that differs from the one that transformers makes of its settings."""
    if normalizer.get("type") != "BertNormalizer":
        return
    found = {key: normalizer.get(key, default) for key, (_, default) in _NORMALIZED.items()}
    wanted = {key: settings.get(name, default) for key, (name, default) in _NORMALIZED.items()}
    for each in (found, wanted):  # without a value accents go where letters become small
        if each["strip_accents"] is None:
            each["strip_accents"] = each["lowercase"]
    for key, (name, _) in _NORMALIZED.items():
        if bool(found[key]) is not bool(wanted[key]):
            where = f"{file}: normalizer.{key}"
            of = f"the {name} of {settings_file}"
            raise _differing(where, bool(wanted[key]), of, normalizer.get(key))


def _differing(where: str, wanted: bool, of: str, found: object) -> CheckpointError:
    return CheckpointError(
        f"{where}: expected {shown(wanted)}, {of}, found {shown(found)}",
        hint="a bundle follows tokenizer.json, transformers tokenizer_config.json: correct the wrong one",
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
