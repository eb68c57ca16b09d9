"""The bytes of single tokens, for clients that show the probabilities of tokens."""

from __future__ import annotations

from typing import final

from tokenizers import Tokenizer as _Tokenizer

from prejit.runtime.errors import UsageError
from prejit.runtime.text.vocabulary import bytes_by_decoder


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
