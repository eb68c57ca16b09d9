"""Methods of a bundle with an encoder: embeddings of sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from prejit.runtime.base.process_facts import importing
from prejit.runtime.base.threads_and_forks import once
from prejit.runtime.errors import UsageError
from prejit.runtime.loaded_bundle import LoadedBundle

if TYPE_CHECKING:
    import numpy as np

    from prejit.runtime.encoding.encoder import Encoded, EncoderPrograms
    from prejit.runtime.encoding.sentences import OnTooLong
    from prejit.runtime.generation.options import Prompt


class BundleEncodes(LoadedBundle):
    """The methods of `Bundle` that encode."""

    def encode(
        self, sentences: str | Sequence[Prompt], *, on_too_long: OnTooLong = "truncate"
    ) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return embeddings of sentences, float32 [N, D] in their order.

        Args:
            sentences: texts or lists of token ids; any number, of any lengths. One text is as good as a list
                of one.
            on_too_long: what to do with a sentence that has more tokens than the model or the longest shape
                of the manifest takes. `truncate`: cut it before its last special tokens, with one
                TruncationWarning per call. `error`: raise.

        Raises:
            UsageError: the bundle holds no encoder, or no tokenizer for a text; a token does not exist.
            ContextError: a sentence is too long, and on_too_long is `error`.
            RejectError: a program is damaged.
        """
        return self.encode_batch(sentences, on_too_long=on_too_long).embeddings

    def encode_batch(
        self, sentences: str | Sequence[Prompt], *, on_too_long: OnTooLong = "truncate"
    ) -> Encoded:
        """Return embeddings as `encode` does, with statistics: tokens, padding, buckets, times, programs."""
        self._programs.ask()
        from prejit.runtime.encoding.sentences import embed, tokenize

        encoded = embed(self.encoder, tokenize(self.encoder, self.text, sentences, on_too_long))
        self.finish()
        return encoded

    @once
    def encoder(self) -> EncoderPrograms:
        """The programs of an encoder.

        Raises:
            UsageError: the bundle holds no encoder.
        """
        if self.config.encoder is None:
            raise UsageError(
                f"{self.name}: this bundle holds no encoder", hint=self._programs.usage
            )
        with importing():
            from prejit.runtime.encoding.encoder import EncoderPrograms  # decoders do not need it

        return EncoderPrograms(self.config.encoder, self._programs, self._device)
