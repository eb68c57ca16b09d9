"""Requests of a release's own, for gates and canaries: seeded prompts that reach each part of a bundle."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from prejit.server.served.served import Served

_NEW_TOKENS = 24
_LETTERS = "etaoin shrdlu 0123 ETA."
"""The characters of prompts, some more often than others, so that tokens of several characters come."""
_SHORT, _MEDIUM = 40, 200
"""Characters of texts."""
_PROMPTS = 4
_COMPLETIONS, _CHATS = "/v1/completions", "/v1/chat/completions"
_EMBEDDINGS, _SCORES = "/v1/embeddings", "/v1/score"


def own_requests(served: Served, seed: int) -> list[dict[str, Any]]:
    """Return requests to a bundle; the same seed gives the same ones.

    For a decoder: short prompts, most likely tokens and seeded samples; one with the bundle's own sampling; a
    conversation, where it has a template; and one that fills the longest context. For an encoder: sentences
    or, if it scores, a query and texts.
    None for functions: golden answers try these.
    """
    config = served.bundle.config
    random = np.random.default_rng(seed)
    if config.encoder is not None and config.encoder.scores is not None:
        query, *texts = _sentences(random)
        if config.encoder.width > 1:  # the server has no route for several labels
            return []
        return [_line(_SCORES, {"text_1": query, "text_2": texts, "model": served.name})]
    if config.encoder is not None:
        return [
            _line(_EMBEDDINGS, {"input": each, "model": served.name}) for each in _sentences(random)
        ]
    if config.decoder is None or served.bundle.decoder.source is not None:
        return []
    return [*_texts(served, random, seed)]


def why_compiles(served: Served) -> str:
    """Return why a bundle's programs are compiled here; empty: they are not."""
    bundle = served.bundle
    found = {each.target: each.reason() for each in bundle.verdicts}
    return "" if bundle.matched else found[bundle.target]


def _sentences(random: np.random.Generator) -> list[str]:
    return [_text(random, size) for size in (_SHORT, _SHORT, _MEDIUM, _MEDIUM)]


def _texts(served: Served, random: np.random.Generator, seed: int) -> Iterator[dict[str, Any]]:
    longest = served.engine.plan.context
    most = min(_NEW_TOKENS, longest // 4)
    common = {"model": served.name, "max_tokens": most, "seed": seed}
    greedy = {**common, "temperature": 0, "ignore_eos": True}
    for size in (_SHORT, _MEDIUM) * (_PROMPTS // 2):
        prompt = _prompt(served, random, size, longest - most)
        yield _line(_COMPLETIONS, {**greedy, "prompt": prompt}, seed)
    prompt = _prompt(served, random, _SHORT, longest - most)
    yield _line(_COMPLETIONS, {**greedy, "temperature": 0.9, "prompt": prompt}, seed)
    yield _line(_COMPLETIONS, {**common, "prompt": prompt}, seed)
    if served.bundle.has_chat_template and served.bundle.has_tokenizer:
        said = [{"role": "user", "content": _text(random, _SHORT)}]
        yield _line(_CHATS, {**greedy, "messages": said}, seed)
    filling = _token_ids(served, random, longest - most)
    yield _line(_COMPLETIONS, {**greedy, "prompt": filling}, seed)


def _prompt(served: Served, random: np.random.Generator, size: int, most: int) -> str | list[int]:
    """Return a text of so many characters; token ids where there is no tokenizer or little context."""
    if served.bundle.has_tokenizer:
        text = _text(random, size)
        if len(served.bundle.tokenizer.encode(text)) <= most:
            return text
    return _token_ids(served, random, min(size, most))


def _token_ids(served: Served, random: np.random.Generator, count: int) -> list[int]:
    if not served.bundle.has_tokenizer:
        vocabulary = served.bundle.config.decoder.vocab_size  # type: ignore[union-attr]
        return [int(each) for each in random.integers(0, vocabulary, count)]
    found: list[int] = []
    while len(found) < count:  # a text may have fewer tokens than characters
        found += served.bundle.tokenizer.encode(_text(random, count))
    return [*map(int, found[:count])]


def _text(random: np.random.Generator, size: int) -> str:
    return "".join(random.choice(list(_LETTERS), size))


def _line(path: str, body: dict[str, Any], seed: int | None = None) -> dict[str, Any]:
    call = (
        {"kind": "encode", "model": body["model"]}
        if seed is None
        else {"kind": "generate", "model": body["model"], "seed": seed}
    )
    return {
        "event": "request",
        "id": "",
        "method": "POST",
        "path": path,
        "status": 200,
        "headers": {"content-type": "application/json"},
        "body": json.dumps(body),
        "calls": [call],
    }
