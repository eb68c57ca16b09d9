"""The bytes of single tokens, for clients that show the probabilities of tokens."""

from __future__ import annotations

from typing import final

from tokenizers import Tokenizer as _Tokenizer

from prejit.runtime.errors import UsageError
from prejit.runtime.text.vocabulary import decoder_of, token_bytes


@final
class TokenBytes:
    """Bytes by token id. Together, the bytes of the tokens of a text are the text.

    Decoding one token at a time does not give that: decoders strip the space at the beginning of a text, and
    a part of a character becomes U+FFFD. So the bytes come from the token's own spelling.
    """

    def __init__(self, tokenizer: _Tokenizer) -> None:
        """Read which spelling a tokenizer uses."""
        self._tokenizer = tokenizer
        self._added = {
            token_id: token.content.encode()
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
        }
        try:
            self._bytes_of = token_bytes(decoder_of(tokenizer), "tokenizer.json")
        except UsageError:  # its bytes depend on its neighbours: the spelling is the best there is
            self._bytes_of = str.encode

    def __getitem__(self, token_id: int) -> bytes:
        """Return the bytes of a token; none if the vocabulary does not have it, as padding of a model."""
        if (added := self._added.get(token_id)) is not None:
            return added
        token = self._tokenizer.id_to_token(token_id)
        return b"" if token is None else self._bytes_of(token)
