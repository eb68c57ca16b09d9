"""Text to token ids and back with the bundle's own tokenizer.json, by the `tokenizers` library."""

from __future__ import annotations

import re
from codecs import getincrementaldecoder
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar, final

from tokenizers import Tokenizer as _Tokenizer

from prejit.runtime.base.threads_and_forks import once
from prejit.runtime.errors import ContextError, RejectError, UsageError

if TYPE_CHECKING:
    from prejit.runtime.text.vocabulary import TokenBytes

T = TypeVar("T")

_REPLACEMENT = "\ufffd"
_UNFINISHED_TOKENS = 3
"""Maximum number of tokens in an unfinished character: UTF-8 has at most 4 bytes, a token at least one."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PROMPT_TOKENS = 8
"""The text of the first new token may depend on this many tokens at the end of the prompt."""
_PENDING_TOKENS = 16
"""Maximum number of pending tokens without complete text. Beyond it, some are given up as broken text, so
that a push stays cheap."""
_TOKEN_CHARACTERS = 1024
"""No known tokenizer has a token of this many characters. A text with more than this per token of the context
is certainly too long. It is not tokenized, because that takes time in proportion to its length."""
_ALONE = 1000
"""Up to this many characters or tokens are worked on without releasing the GIL: that takes a millisecond, and
handing one to another thread a tenth of it."""
_INTERRUPTS = (KeyboardInterrupt, SystemExit, GeneratorExit)


@final
class Tokenizer:
    """The tokenizer of a bundle: `library` is its object. Safe to use from many threads."""

    def __init__(self, content: bytes, path: str) -> None:
        """Read a tokenizer.json. Its truncation and padding are turned off, as transformers does.

        Raises:
            RejectError: this version of `tokenizers` cannot read it.
        """
        try:
            self.library = _Tokenizer.from_buffer(content)
            self.library.no_truncation()
            self.library.no_padding()
            added = self.library.get_added_tokens_decoder()
        except _INTERRUPTS:
            raise
        except BaseException as error:  # also a panic of Rust, which is no Exception
            raise RejectError(path, f"expected a tokenizer.json: {error}") from error
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)

    def encode(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """Return the token ids of a text.

        Args:
            text: special tokens that are spelled out in it become those tokens.
            add_special_tokens: whether the tokenizer adds its own, such as a BOS. A rendered chat template
                spells them out, so it needs none.
            max_tokens: the room for tokens. A text that is certainly too long is not tokenized; None: every
                text is.

        Raises:
            UsageError: the text has a lone surrogate, which cannot be encoded, or the tokenizer fails on it.
            ContextError: the text has more than 1,024 characters for each of max_tokens.
        """
        _check_unicode(text)
        if max_tokens is not None and len(text) > max_tokens * _TOKEN_CHARACTERS:
            raise ContextError(
                f"prompt: expected at most {max_tokens} tokens (the longest context), found a text of "
                f"{len(text)} characters",
                hint="shorten the prompt, or add a longer context to [generate] of the manifest",
            )
        if len(text) > _ALONE:
            return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        return self.encoded(
            lambda: self.library.encode(text, add_special_tokens=add_special_tokens).ids
        )

    def encode_batch(
        self, texts: str | Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Return the token ids of many texts, computed on all cores. One text is as good as a list of one.

        Other threads run meanwhile. Raises as `encode`.
        """
        listed = [texts] if isinstance(texts, str) else list(texts)
        for text in listed:
            _check_unicode(text)
        encodings = self.encoded(
            lambda: self.library.encode_batch_fast(listed, add_special_tokens=add_special_tokens)
        )
        return [encoding.ids for encoding in encodings]

    def around(self) -> tuple[list[int], list[int]]:
        """Return the special tokens that it adds at the beginning of a text, and at its end."""
        whole, bare = self.encode("a"), self.encode("a", add_special_tokens=False)
        for first in range(len(whole) - len(bare) + 1):
            if bare and whole[first : first + len(bare)] == bare:
                return whole[:first], whole[first + len(bare) :]
        return [], []

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens.

        Raises:
            UsageError: an id is not an integer of 32 bits, or the tokenizer fails on them.
        """
        return self._decode(list(token_ids))

    def stream(self, prompt_ids: Sequence[int]) -> TextStream:
        """Return a stream that turns the tokens after a prompt into text. Raises as `decode`, also later."""
        return TextStream(self._decode, self._token, self._special, prompt_ids)

    @once
    def token_bytes(self) -> TokenBytes:
        """The bytes of each token by its id."""
        from prejit.runtime.text.vocabulary import TokenBytes  # only log-probabilities need it

        return TokenBytes(self.library)

    def special_id(self, text: str) -> int | None:
        """Return the id of the special token that is written so, or None if there is none."""
        token_id = self.library.token_to_id(text)
        return token_id if token_id in self._special else None

    def encoded(self, encode: Callable[[], T]) -> T:
        """Return the result of a call of the library; what fails there is a UsageError."""
        try:
            return encode()
        except _INTERRUPTS:
            raise
        except BaseException as error:  # as in __init__
            raise UsageError(
                f"expected a text that the tokenizer can encode, found one that it fails on: {error}",
                hint="give another text, or token ids",
            ) from error

    def _decode(self, token_ids: list[int]) -> str:
        library = self.library
        if len(token_ids) > _ALONE:  # other threads run while a batch is decoded
            return self._decoded(lambda: library.decode_batch([token_ids])[0], token_ids)
        return self._decoded(lambda: library.decode(token_ids), token_ids)

    def _token(self, token_id: int) -> str | None:
        return self._decoded(lambda: self.library.id_to_token(token_id), [token_id])

    def _decoded(self, decode: Callable[[], T], token_ids: Sequence[int]) -> T:
        try:
            return decode()
        except _INTERRUPTS:
            raise
        except BaseException as error:  # as in __init__
            raise UsageError(
                f"expected token ids that the tokenizer can decode, found {token_ids!r:.80}: {error}"
            ) from error


@final
class TextStream:
    """Turns tokens into text as they come, and never splits a character.

    A character whose bytes are spread over several tokens comes with the last of them. The pieces together
    are what decoding all tokens at once would add to the prompt's text. There is one exception, the byte
    tokens of SentencePiece models: decoded at once, a wrong byte turns all bytes around it into U+FFFD; here
    characters that were complete before stay.

    A push costs the same however long the text is, because only the tokens of the last piece are kept, or
    the last few of the prompt. The next token alone is not enough: a decoder strips the space at the
    beginning of a text. `tokenizers.decoders.DecodeStream` decodes the whole prompt with the first token,
    grows without limit on tokens that make no text, and raises on a wrong byte.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        token_of: Callable[[int], str | None],
        special: frozenset[int],
        prompt_ids: Sequence[int],
    ) -> None:
        self._decode = decode
        self._token_of = token_of
        self._special = special
        tail = self._tail(prompt_ids)
        begun = self._begun(tail)
        self._context, self._pending = tail[: len(tail) - begun], tail[len(tail) - begun :]
        given, self._of_prompt, self._pushed = self._decode(self._context), "", False
        if begun == 0 or not self._byte(tail[-1]):
            # U+FFFD at the end of a prompt is the beginning of a character, or really in the prompt.
            given = _settled(given)
            self._of_prompt = self._decode(tail)[len(given) :]
        self._given = len(given)

    def push(self, token_id: int) -> str:
        """Add a token; return the text that it completes, which may be empty."""
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
        """Return the rest of the text when no token follows: an unfinished character as U+FFFD."""
        if not self._pushed:
            return ""
        piece = self._give(self._decode(self._context + self._pending))
        self._settle(len(self._pending), "")
        self._given = len(self._decode(self._context))
        return piece

    def _give(self, text: str) -> str:
        """Return the part of a text that was not returned yet."""
        piece = text[self._given :]
        self._given += len(piece)
        if piece and self._of_prompt:
            piece = piece.removeprefix(self._of_prompt)
            self._of_prompt = ""
        return piece

    def _settle(self, count: int, text: str) -> None:
        """Make the first `count` pending tokens the context; `text` is the old context's text and theirs."""
        ahead = self._given - len(text)
        self._context, self._pending = self._pending[:count], self._pending[count:]
        self._given = len(self._decode(self._context)) + max(0, ahead)

    def _tail(self, prompt_ids: Sequence[int]) -> list[int]:
        """Return the last tokens of a prompt that make text, starting where a character begins."""
        tail: list[int] = []
        for token_id in reversed(prompt_ids):
            if token_id in self._special:
                continue
            tail.append(token_id)
            if len(tail) >= _PROMPT_TOKENS and _REPLACEMENT not in self._decode([token_id]):
                break
        return tail[::-1]

    def _begun(self, token_ids: list[int]) -> int:
        """Return how many tokens at the end hold the beginning of an unfinished character."""
        if token_ids and self._byte(token_ids[-1]):
            # The tokenizer would turn the whole run of byte tokens into U+FFFD for one unfinished character.
            decoder = getincrementaldecoder("utf-8")("replace")
            decoder.decode(b"".join(self._byte(i) or b" " for i in token_ids[-_UNFINISHED_TOKENS:]))
            return len(decoder.getstate()[0])
        for count in range(_UNFINISHED_TOKENS + 1):
            if not self._decode(token_ids[: len(token_ids) - count]).endswith(_REPLACEMENT):
                return count
        return 0

    def _byte(self, token_id: int) -> bytes | None:
        """Return the byte of a byte token of a SentencePiece model (`<0x0A>`), or None for other tokens."""
        match = _BYTE_TOKEN.fullmatch(self._token_of(token_id) or "")
        return bytes.fromhex(match[1]) if match else None


def _settled(text: str) -> str:
    """Return a text without the U+FFFDs at its end, which may yet become characters.

    It removes all of them: the byte tokens of a SentencePiece model are all U+FFFD until the last character
    is complete.
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
