"""Grammars as token masks: an answer can be nothing but JSON, or JSON that meets a schema.

The library is llguidance. It computes the mask of each token from the grammar and the vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

import llguidance
import numpy as np

from prejit.runtime.base.once import once
from prejit.runtime.errors import UsageError

if TYPE_CHECKING:
    from prejit.runtime.bundle import Bundle

_OPTIONS: Any = {"whitespace_flexible": False}
"""A small model that may write any whitespace writes nothing else until its limit. `x-guidance` in a schema
comes before these."""


@final
class Grammars:
    """Makes token masks for the vocabulary of a bundle. Safe to use from many threads."""

    def __init__(self, bundle: Bundle) -> None:
        """Keep a bundle. Its vocabulary is read for the first mask."""
        self._bundle = bundle

    def json_object(self) -> Mask:
        """Return a new mask that allows a JSON object.

        Raises:
            UsageError: the bundle has no tokenizer.
        """
        return self.json_schema({"type": "object"})

    def json_schema(self, schema: dict[str, Any]) -> Mask:
        """Return a new mask that allows JSON that meets a schema.

        Raises:
            UsageError: the schema is wrong, or uses what the library does not know; or the bundle has no
                tokenizer.
        """
        tokenizer = self._tokenizer
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(
                json.dumps(schema), defaults=_OPTIONS
            )
            matcher = llguidance.LLMatcher(tokenizer, grammar)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"expected a JSON Schema, found {error!s:.300}") from error
        if matcher.is_error():
            raise UsageError(f"expected a JSON Schema, found {matcher.get_error():.300}")
        return Mask(matcher, self._bundle.decoder.decoder.vocab_size)

    @once
    def _tokenizer(self) -> llguidance.LLTokenizer:
        decoder = self._bundle.decoder.decoder
        return llguidance.LLTokenizer(
            self._bundle.tokenizer.json(),
            n_vocab=decoder.vocab_size,
            eos_token=[*decoder.eos_token_ids],
        )


@final
class Mask:
    """The token mask of one request."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._taken = 0

    def __call__(self, token_ids: Sequence[int]) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Return bool [V], true for each token that may come after those generated so far."""
        new = list(token_ids[self._taken :])
        self._taken = len(token_ids)
        if new and not self._matcher.consume_tokens(new):
            raise UsageError(f"grammar: {self._matcher.get_error():.300}")
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").astype(np.bool_)
