"""Make tokenizer.json from the metadata of a GGUF file: the tokens that llama.cpp gives.

    gpt2    byte-level BPE; the file has its merges, and the name of the expression that splits texts
    llama   SentencePiece's BPE with bytes for what it lacks; merges follow from the tokens' scores

transformers has llama.cpp's expressions by name. A name that is not listed here may stand for other rules.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from prejit.compiler.base.suggestions import shown
from prejit.compiler.checkpoint.gguf_config import BESIDE, unsupported
from prejit.compiler.models.layers.config_checks import silence_transformers
from prejit.runtime.errors import CheckpointError

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
"""Types of tokens that are found in a text before it is split."""
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "tekken")
"""Splits whose texts begin with a token, and whose words are looked up before they are merged."""
_SPLITS = (*_WHOLE_WORDS, "qwen2", "deepseek-r1-qwen", "gpt-4o", "dbrx")
_PLAIN_SPLIT = "gpt-2"
_USUAL_IDS = {"llama": (1, 2)}
"""The tokens that begin and end texts, of files that do not name them."""
_SPACE = "▁"
_NOT_STRIPPED = ("<unk>", "<s>", "<|endoftext|>")
"""Tokens of Phi 3 that do not take the white space that follows, as its others do."""


def tokenizer_of(path: Path, metadata: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the content of tokenizer.json, and that of tokenizer_config.json.

    Raises:
        CheckpointError: the tokenizer is of another kind, or a part of it is missing.
    """
    said = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    kind = said.get("model")
    if kind not in ("gpt2", "llama"):
        raise unsupported(
            f'{path}: tokenizer.ggml.model: expected "gpt2" or "llama", found {shown(kind)}'
        )
    _check_lists(path, said, "merges" if kind == "gpt2" else "scores")
    _check_ids(path, said)
    tokens: list[str] = said["tokens"]
    kinds: list[int] = said["token_type"]
    silence_transformers()
    is_gemma = str(metadata.get("general.architecture")).startswith("gemma")
    if is_gemma:  # llama.cpp writes a run of spaces as spaces
        tokens = [_SPACE * len(each) if each and not each.strip(" ") else each for each in tokens]
    model = {"type": "BPE", "vocab": {each: place for place, each in enumerate(tokens)}}
    rest = _byte_level(path, said) if kind == "gpt2" else _sentence_piece(said, tokens, is_gemma)
    starts = kind == "llama" or said.get("pre") in _WHOLE_WORDS
    bos, eos = _USUAL_IDS.get(kind, (None, None))
    first, last = (
        said.get(f"{name}_token_id", usual) if said.get(f"add_{name}_token", default) else None
        for name, usual, default in (("bos", bos, starts), ("eos", eos, False))
    )
    added = [
        _added(
            place,
            text,
            each,
            is_phi=metadata.get("general.architecture") == "phi3" and kind == "llama",
        )
        for place, (text, each) in enumerate(zip(tokens, kinds, strict=True))
        if each in (_UNKNOWN, _CONTROL) or (each == _USER_DEFINED and set(text) != {_SPACE})
    ]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        **rest,
        "post_processor": _template(first, last, tokens),
        "model": {**model, **rest["model"]},
    }
    special = {
        f"{name}_token": tokens[place]
        for name in ("bos", "eos", "unk", "pad")
        if (place := said.get(f"{_IDS.get(name, name)}_token_id")) is not None
        and place < len(tokens)
    }
    _check_loads(path, tokenizer)
    templates = _templates(metadata)
    return tokenizer, special | ({} if templates is None else {"chat_template": templates})


def _templates(metadata: Mapping[str, Any]) -> Any:
    """Return the chat template, or a list with those that have names, as tokenizer_config.json has them."""
    default, start = metadata.get("tokenizer.chat_template"), "tokenizer.chat_template."
    named = {
        key.removeprefix(start): each for key, each in metadata.items() if key.startswith(start)
    }
    if not named:
        return default
    every = named if default is None else {"default": default, **named}
    return [{"name": name, "template": template} for name, template in every.items()]


_IDS = {"unk": "unknown", "pad": "padding"}
_OF_LISTS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "tokens": ("texts", lambda each: isinstance(each, str)),
    "token_type": ("integers", lambda each: type(each) is int),
    "scores": ("numbers", lambda each: type(each) in (int, float) and not math.isnan(each)),
    "merges": ("pairs of texts", lambda each: isinstance(each, str) and " " in each[1:-1]),
}


def _check_lists(path: Path, said: Mapping[str, Any], third: str) -> None:
    """Check the tokens, their types, and their scores or merges."""
    needed = ("tokens", "token_type", third)
    lengths = {key: len(said[key]) if isinstance(said.get(key), list) else 0 for key in needed}
    of_tokens = {length for key, length in lengths.items() if key != "merges"}
    if not all(lengths.values()) or len(of_tokens) > 1:
        found = ", ".join(f"{length} {key}" for key, length in lengths.items())
        raise unsupported(
            f"{path}: tokenizer.ggml: expected as many tokens, types and scores, or merges; found {found}"
        )
    for key in needed:
        what, holds = _OF_LISTS[key]
        if (
            at := next((at for at, each in enumerate(said[key]) if not holds(each)), None)
        ) is not None:
            raise unsupported(
                f"{path}: tokenizer.ggml.{key}: expected {what}, found {shown(said[key][at])} at {at}"
            )


def _check_ids(path: Path, said: Mapping[str, Any]) -> None:
    """Check that what names a token is a number. llama.cpp leaves out one that is no token."""
    for key, each in said.items():
        if key.endswith("_token_id") and not (type(each) is int and each >= 0):
            raise unsupported(
                f"{path}: tokenizer.ggml.{key}: expected a token id, found {shown(each)}"
            )


def _check_loads(path: Path, tokenizer: dict[str, Any]) -> None:
    try:
        Tokenizer.from_str(json.dumps(tokenizer))
    except Exception as error:  # the library raises nothing narrower
        raise unsupported(f"{path}: tokenizer.ggml: expected a tokenizer: {error}") from error


def _added(place: int, text: str, kind: int, *, is_phi: bool) -> dict[str, Any]:
    """Return a token that is found in a text before it is split."""
    strips = is_phi and text not in _NOT_STRIPPED
    return {
        "id": place,
        "content": text,
        "single_word": False,
        "lstrip": False,
        "rstrip": strips,
        "normalized": False,
        "special": kind != _USER_DEFINED,
    }


def _byte_level(path: Path, said: Mapping[str, Any]) -> dict[str, Any]:
    name = said.get("pre")
    if name not in (*_SPLITS, _PLAIN_SPLIT):
        known = ", ".join(map(shown, (*_SPLITS, _PLAIN_SPLIT)))
        raise unsupported(
            f"{path}: tokenizer.ggml.pre: expected one of {known}, found {shown(name)}"
        )
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    if name == _PLAIN_SPLIT:
        split: dict[str, Any] = {**byte_level, "use_regex": True}
    else:
        try:
            from transformers.integrations.gguf.gguf_tokenizer_mapping import (
                GGUF_PRE_TOKENIZER_SPLITS,
            )
        except ImportError as error:
            raise CheckpointError(
                f"{path}: the transformers installed here does not have llama.cpp's rules that split texts",
                hint=f"pip install --upgrade transformers, or {BESIDE}",
            ) from error
        pattern = {"Regex": GGUF_PRE_TOKENIZER_SPLITS[name]}
        parts = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
        split = {"type": "Sequence", "pretokenizers": [parts, byte_level]}
    return {
        "normalizer": {"type": "NFC"} if name == "qwen2" else None,
        "pre_tokenizer": split,
        "decoder": byte_level,
        "model": {
            "merges": [each.split(" ", 1) for each in said["merges"]],
            "ignore_merges": name in _WHOLE_WORDS,
        },
    }


def _sentence_piece(said: Mapping[str, Any], tokens: list[str], is_gemma: bool) -> dict[str, Any]:
    """Return the parts of SentencePiece's BPE. Gemma merges in the order of its tokens."""
    from transformers.tokenization_utils_base import generate_merges

    spaced = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    decoders = [back, {"type": "ByteFallback"}, {"type": "Fuse"}]
    normalizer: dict[str, Any] = spaced
    if said.get("add_space_prefix", not is_gemma):
        prefix = {"type": "Prepend", "prepend": _SPACE}
        normalizer = {"type": "Sequence", "normalizers": [prefix, spaced]}
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    vocabulary = {each: place for place, each in enumerate(tokens)}
    scores = range(0, -len(tokens), -1) if is_gemma else said["scores"]
    merges = generate_merges(vocabulary, dict(zip(tokens, scores, strict=True)))
    unknown = said.get("unknown_token_id", 0)
    return {
        "normalizer": normalizer,
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "merges": [list(each) for each in merges],
            "byte_fallback": True,
            "fuse_unk": True,
            "unk_token": tokens[unknown] if unknown < len(tokens) else None,
        },
    }


def _template(first: int | None, last: int | None, tokens: list[str]) -> dict[str, Any] | None:
    known = [each for each in (first, last) if each is not None]
    if not known or max(known) >= len(tokens):
        return None

    def special(place: int | None, type_id: int) -> list[dict[str, Any]]:
        return (
            [] if place is None else [{"SpecialToken": {"id": tokens[place], "type_id": type_id}}]
        )

    def part(name: str, type_id: int) -> list[dict[str, Any]]:
        text = {"Sequence": {"id": name, "type_id": type_id}}
        return [*special(first, type_id), text, *special(last, type_id)]

    return {
        "type": "TemplateProcessing",
        "single": part("A", 0),
        "pair": [*part("A", 0), *part("B", 1)],
        "special_tokens": {
            tokens[each]: {"id": tokens[each], "ids": [each], "tokens": [tokens[each]]}
            for each in known
        },
    }
