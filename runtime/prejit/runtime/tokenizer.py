"""Text to token ids and back, with the bundle's own tokenizer.json (the `tokenizers` library)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from tokenizers import Tokenizer as _Tokenizer
from tokenizers.decoders import DecodeStream

from prejit.runtime.errors import RejectError


@final
class Tokenizer:
    """The tokenizer of a bundle."""

    def __init__(self, content: bytes, path: str) -> None:
        """Reads a tokenizer.json.

        Raises:
            RejectError: it is none that this version of `tokenizers` reads.
        """
        try:
            self._tokenizer = _Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises plain Exception
            raise RejectError(path, f"expected a tokenizer.json: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer adds by itself."""
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def stream(self, prompt_ids: Sequence[int]) -> TextStream:
        """Text of the tokens that follow a prompt, piece by piece."""
        return TextStream(self._tokenizer, list(prompt_ids))


@final
class TextStream:
    """Turns tokens into text as they come, never splitting a character.

    A character whose bytes are spread over several tokens comes with the last of them.
    """

    def __init__(self, tokenizer: _Tokenizer, prompt_ids: list[int]) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(ids=prompt_ids, skip_special_tokens=True)
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """The text that is complete with this token; may be empty."""
        piece = self._stream.step(self._tokenizer, token_id)
        if piece is None:
            self._pending.append(token_id)
            return ""
        self._pending.clear()
        return piece

    def finish(self) -> str:
        """What is left when no token follows: an unfinished character, as U+FFFD."""
        text = self._tokenizer.decode(self._pending, skip_special_tokens=True)
        self._pending.clear()
        return text
