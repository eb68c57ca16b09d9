"""Text to token ids and back, with the bundle's own tokenizer.json (the `tokenizers` library)."""

from __future__ import annotations

import re
from codecs import getincrementaldecoder
from collections.abc import Sequence
from typing import final

from tokenizers import Tokenizer as _Tokenizer

from prejit.runtime.errors import RejectError, UsageError

_REPLACEMENT = "\ufffd"
_UNFINISHED_TOKENS = 3
"""A character has at most 4 bytes in UTF-8, and a token at least one: so many may be an unfinished one."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PROMPT_TOKENS = 8
"""Of a prompt, what the text of the first new token may depend on."""
_PENDING_TOKENS = 16
"""More than this without whole text is no text: some of it is settled, so that a push stays cheap."""


@final
class Tokenizer:
    """The tokenizer of a bundle. Safe for many threads."""

    def __init__(self, content: bytes, path: str) -> None:
        """Reads a tokenizer.json. Its truncation and padding are left out, as transformers does.

        Raises:
            RejectError: it is none that this version of `tokenizers` reads.
        """
        try:
            self._tokenizer = _Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises plain Exception
            raise RejectError(path, f"expected a tokenizer.json: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            text: special tokens that it spells become those tokens.
            add_special_tokens: whether the tokenizer adds its own (a BOS, say). Not to a rendered chat
                template, which spells them.

        Raises:
            UsageError: the text holds a lone surrogate, which no encoding has.
        """
        _check_unicode(text)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Token ids of many texts at once, on all cores. As `encode`, and raises as it does."""
        for text in texts:
            _check_unicode(text)
        encodings = self._tokenizer.encode_batch_fast(
            list(texts), add_special_tokens=add_special_tokens
        )
        return [encoding.ids for encoding in encodings]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def stream(self, prompt_ids: Sequence[int]) -> TextStream:
        """Text of the tokens that follow a prompt, piece by piece."""
        return TextStream(self._tokenizer, self._special, prompt_ids)


@final
class TextStream:
    """Turns tokens into text as they come, never splitting a character.

    A character whose bytes are spread over several tokens comes with the last of them. The pieces together
    are what decoding all tokens at once would add to the prompt's text. One exception: a SentencePiece
    model's byte tokens, where a byte that begins no character turns all bytes around it into U+FFFD when they
    are decoded at once; here characters that were whole before stay.

    Of the tokens before, only those of the last piece are kept (a decoder strips the space that begins a
    text, so the next token alone does not tell), and of a prompt the last few: a push costs the same
    however long the text is. `tokenizers.decoders.DecodeStream` decodes the whole prompt with the first
    token, grows without end on tokens that make no text, and raises where a byte is wrong.
    """

    def __init__(
        self, tokenizer: _Tokenizer, special: frozenset[int], prompt_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._special = special
        tail = self._tail(prompt_ids)
        begun = self._begun(tail)
        self._context, self._pending = tail[: len(tail) - begun], tail[len(tail) - begun :]
        given, self._of_prompt, self._pushed = self._decode(self._context), "", False
        if begun == 0 or not self._byte(tail[-1]):
            # U+FFFD at the end of a prompt is the start of a character, or stands there itself.
            given = _settled(given)
            self._of_prompt = self._decode(tail)[len(given) :]
        self._given = len(given)

    def push(self, token_id: int) -> str:
        """The text that is complete with this token; may be empty."""
        if token_id in self._special:
            return ""
        self._pushed = True
        self._pending.append(token_id)
        text = self._decode(self._context + self._pending)
        settled = _settled(text)
        piece = self._give(settled)
        if piece and settled == text:
            self._settle(len(self._pending), text)
        elif len(self._pending) > _PENDING_TOKENS:
            count = len(self._pending) - _UNFINISHED_TOKENS
            text = self._decode(self._context + self._pending[:count])
            piece += self._give(text)
            self._settle(count, text)
        return piece

    def finish(self) -> str:
        """What is left when no token follows: an unfinished character, as U+FFFD."""
        if not self._pushed:
            return ""
        piece = self._give(self._decode(self._context + self._pending))
        self._settle(len(self._pending), "")
        self._given = len(self._decode(self._context))
        return piece

    def _give(self, text: str) -> str:
        """What of a text was not given yet."""
        piece = text[self._given :]
        self._given += len(piece)
        if piece and self._of_prompt:
            piece = piece.removeprefix(self._of_prompt)
            self._of_prompt = ""
        return piece

    def _settle(self, count: int, text: str) -> None:
        """Makes the first `count` pending tokens the context; `text` is theirs and the old context's."""
        ahead = self._given - len(text)
        self._context, self._pending = self._pending[:count], self._pending[count:]
        self._given = len(self._decode(self._context)) + max(0, ahead)

    def _tail(self, prompt_ids: Sequence[int]) -> list[int]:
        """The last tokens of a prompt that make text, from where a character begins."""
        tail: list[int] = []
        for token_id in reversed(prompt_ids):
            if token_id in self._special:
                continue
            tail.append(token_id)
            if len(tail) >= _PROMPT_TOKENS and _REPLACEMENT not in self._decode([token_id]):
                break
        return tail[::-1]

    def _begun(self, token_ids: list[int]) -> int:
        """How many tokens at the end hold the start of a character."""
        if token_ids and self._byte(token_ids[-1]):
            # Decoded at once, one byte of an unfinished character makes U+FFFD of all the run.
            decoder = getincrementaldecoder("utf-8")("replace")
            decoder.decode(b"".join(self._byte(i) or b" " for i in token_ids[-_UNFINISHED_TOKENS:]))
            return len(decoder.getstate()[0])
        for count in range(_UNFINISHED_TOKENS + 1):
            if not self._decode(token_ids[: len(token_ids) - count]).endswith(_REPLACEMENT):
                return count
        return 0

    def _byte(self, token_id: int) -> bytes | None:
        """The byte of a SentencePiece model's byte token (`<0x0A>`)."""
        match = _BYTE_TOKEN.fullmatch(self._tokenizer.id_to_token(token_id) or "")
        return bytes.fromhex(match[1]) if match else None

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)


def _settled(text: str) -> str:
    """A text without the U+FFFD at its end that may yet become characters.

    All of them: a SentencePiece model's byte tokens are U+FFFD together until the last character is whole.
    """
    return text.rstrip(_REPLACEMENT)


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"text: expected Unicode, found a lone surrogate {text[error.start]!r} "
            f"at character {error.start}"
        ) from error
