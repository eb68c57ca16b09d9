"""Give the added tokens of a tokenizer.json the properties that transformers gives them.

transformers makes a tokenizer from two files. Where tokenizer_config.json describes a token too, in
`added_tokens_decoder` or as a special token such as `eos_token`, that decides: whether the spaces beside a
token belong to it, whether it may lie within a word, and whether a decoded text shows it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from prejit.compiler.base.json_file import read_object
from prejit.compiler.models.chat_files import special_tokens

_PROPERTIES = ("single_word", "lstrip", "rstrip", "normalized", "special")
_LIST = re.compile(r'"added_tokens"\s*:\s*(?=\[)')


def with_configured_tokens(file: Path, content: bytes) -> bytes:
    """Return a tokenizer.json whose added tokens are as tokenizer_config.json beside it says.

    The content is returned as it is if they are so, or if it is no tokenizer: its check says what is wrong.

    Raises:
        CheckpointError: tokenizer_config.json cannot be read.
    """
    wanted = _wanted(file.parent)
    try:
        text = content.decode()
        # Only a tokenizer that changes is read whole: it may have 30 MB.
        found, _ = json.JSONDecoder().raw_decode(text, _LIST.search(text).end())  # type: ignore[union-attr]
        described = {each for each in wanted if _is_whole(wanted[each])}
        if (
            described <= {each["content"] for each in found}
            and _changed(found, wanted, {}) == found
        ):
            return content
        tree = json.loads(text)
        tokens = _changed(found, wanted, _ids(tree["model"]["vocab"]))
        changed = json.dumps({**tree, "added_tokens": tokens}, ensure_ascii=False).encode()
    except (AttributeError, ValueError, TypeError, LookupError, RecursionError):
        return content
    return content if tokens == found else changed


def _wanted(directory: Path) -> dict[str, dict[str, bool]]:
    """Return the properties of tokens that tokenizer_config.json describes, by their texts."""
    settings = read_object(directory / "tokenizer_config.json", required=False)
    described = settings.get("added_tokens_decoder")
    wanted: dict[str, dict[str, bool]] = {}
    for each in described.values() if isinstance(described, dict) else ():
        if isinstance(each, dict) and isinstance(each.get("content"), str):
            start = dict.fromkeys(_PROPERTIES, False) | {"normalized": not each.get("special")}
            found = {key: each[key] for key in _PROPERTIES if isinstance(each.get(key), bool)}
            wanted[each["content"]] = start | found
    for text in special_tokens(directory).values():
        wanted[text] = wanted.get(text, {}) | {"special": True}
    return wanted


def _changed(
    found: Iterable[Mapping[str, Any]],
    wanted: Mapping[str, Mapping[str, bool]],
    ids: Mapping[str, int],
) -> list[dict[str, Any]]:
    """Return added tokens with these properties; `ids` has the tokens that may become added ones."""
    tokens = {each["content"]: dict(each) for each in found}
    for text, properties in wanted.items():
        # A name alone makes no added token: the padding of a GGUF file may be any word.
        if text in tokens or (text in ids and _is_whole(properties)):
            new = {"id": ids.get(text), "content": text, **dict.fromkeys(_PROPERTIES, False)}
            token = tokens.setdefault(text, new)
            is_special = token["special"] or properties["special"]  # the library forgets none
            token |= {**properties, "special": is_special}
    return list(tokens.values())


def _is_whole(properties: Mapping[str, bool]) -> bool:
    return properties.keys() == {*_PROPERTIES}


def _ids(vocab: Any) -> Mapping[str, int]:
    """Return the ids of tokens; Unigram has a list of tokens with their scores."""
    return vocab if isinstance(vocab, dict) else {each[0]: n for n, each in enumerate(vocab)}
