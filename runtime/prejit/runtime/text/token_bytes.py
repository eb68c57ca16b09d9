"""The bytes of single tokens, for clients that show the probabilities of tokens."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any, final

from tokenizers import Tokenizer as _Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"
"""What SentencePiece writes for a space."""


@final
class TokenBytes:
    """Bytes by token id. Together, the bytes of the tokens of a text are the text.

    Decoding one token at a time does not give that: decoders strip the space at the beginning of a text, and
    a part of a character becomes U+FFFD. So this class reads the token's own spelling, by the rule of its
    decoder: GPT-2's alphabet of bytes, or SentencePiece's pieces and byte tokens.
    """

    def __init__(self, tokenizer: _Tokenizer) -> None:
        """Read which spelling a tokenizer uses."""
        state: dict[str, Any] = {}
        if tokenizer.decoder is not None:
            state = json.loads(tokenizer.decoder.__getstate__())
        steps = [state, *state.get("decoders", ())]
        self._tokenizer = tokenizer
        self._alphabet = (
            byte_alphabet() if any(s.get("type") == "ByteLevel" for s in steps) else None
        )
        self._added = {
            token_id: token.content.encode()
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
        }

    def __getitem__(self, token_id: int) -> bytes:
        """Return the bytes of a token; none if the vocabulary does not have it, as padding of a model."""
        if (added := self._added.get(token_id)) is not None:
            return added
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._alphabet is not None:
            found = [self._alphabet.get(character) for character in token]
            if None not in found:
                return bytes(byte for byte in found if byte is not None)
            return token.encode()
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(match[1])
        return token.replace(_SPACE, " ").encode()


@cache
def byte_alphabet() -> dict[str, int]:
    """Return the byte of each character of GPT-2's alphabet (bytes_to_unicode of its encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + place): byte for place, byte in enumerate(others)}
