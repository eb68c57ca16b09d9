"""How a tokenizer spells the bytes that a token adds to a text: by the rule of its decoder."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from typing import Any, final

from tokenizers import Tokenizer as _Tokenizer

from prejit.runtime.errors import UsageError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@cache
def byte_alphabet() -> dict[str, int]:
    """Return the byte of each character of GPT-2's alphabet (bytes_to_unicode of its encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + place): byte for place, byte in enumerate(others)}


def _byte_level(token: str) -> bytes:
    alphabet = byte_alphabet()
    try:
        return bytes([alphabet[character] for character in token])
    except KeyError:  # the decoder, too, leaves a token with another character as it is
        return token.encode()


def _bytes_or_text(token: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes.fromhex(match[1]) if match else token.encode()


def bytes_by_decoder(tokenizer: _Tokenizer) -> Callable[[str], bytes]:
    """Return the function that turns a token of the vocabulary into the bytes that it adds to a text.

    It is for tokens in the middle of a text: decoders that strip a space do so at the beginning only.

    Raises:
        UsageError: the bytes of a token depend on its neighbours (WordPiece), or the decoder is not known.
    """
    # The object `decoder` of a tokenizer.json.
    decoder = None if tokenizer.decoder is None else json.loads(tokenizer.decoder.__getstate__())
    match decoder:
        case {"type": "ByteLevel"}:
            return _byte_level
        case {"type": "Metaspace", "replacement": str(space)}:
            return lambda token: token.replace(space, " ").encode()
        case {"type": "Sequence", "decoders": list(parts)}:
            return _sequence(parts)
    raise _refusal(decoder)


def _sequence(parts: list[Any]) -> Callable[[str], bytes]:
    """Return the function for a decoder that is a list of others, such as that of Llama 2."""
    replaced: list[tuple[str, str]] = []
    last: Callable[[str], bytes] = str.encode
    for part in parts:
        match part:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                replaced.append((old, new))
            case {"type": "ByteFallback"}:
                last = _bytes_or_text
            case {"type": "Fuse" | "Strip"}:
                pass
            case {"type": "ByteLevel"}:
                last = _byte_level
            case {"type": "Metaspace", "replacement": str(old)}:
                replaced.append((old, " "))
            case _:
                raise _refusal(part)

    def of(token: str) -> bytes:
        for old, new in replaced:
            token = token.replace(old, new)
        return last(token)

    return of


def _refusal(decoder: object) -> UsageError:
    found = json.dumps(decoder)
    return UsageError(
        "decoder of the tokenizer: expected ByteLevel, Metaspace or a Sequence of Replace, ByteFallback, "
        f"Fuse and Strip, found {found if len(found) <= 120 else found[:120] + '...'}",
        hint="a grammar needs a tokenizer whose tokens are bytes, such as byte-level BPE or SentencePiece",
    )


@final
class TokenBytes:
    """Bytes by token id. Together, the bytes of the tokens of a text are the text.

    Decoding one token at a time does not give that: decoders strip the space at the beginning of a text, and
    a part of a character becomes U+FFFD. A token whose bytes depend on its neighbours, as in WordPiece, has
    the bytes of its own spelling.
    """

    def __init__(self, tokenizer: _Tokenizer) -> None:
        """Read how a tokenizer spells bytes."""
        self._tokenizer = tokenizer
        try:
            self._bytes_of = bytes_by_decoder(tokenizer)
        except UsageError:
            self._bytes_of = str.encode
        self._added = {
            token_id: token.content.encode()
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
        }

    def __getitem__(self, token_id: int) -> bytes:
        """Return the bytes of a token; none if the vocabulary does not have it, as padding of a model."""
        if (added := self._added.get(token_id)) is not None:
            return added
        token = self._tokenizer.id_to_token(token_id)
        return b"" if token is None else self._bytes_of(token)
