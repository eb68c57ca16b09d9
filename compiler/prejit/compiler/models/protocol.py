"""The protocol of models that `prejit` generates with: those of our families, and those of users.

A decoder is one function of new tokens and a cache. Prefill, chunked prompts, decode steps and the
verification of drafts are that function at different shapes. What the cache is made of is the model's affair:
keys and values, the state of a recurrence, or both.

Shapes: B rows, T new tokens, S positions, N places of a source, V vocabulary.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import jax

Cache = Any
"""A pytree of arrays, each [B, ...]. An array with one more axis of size S holds something for each position;
an array without one holds the state of the whole text. For one B and one S, shapes and dtypes are always the
same."""


class WritingModel(Protocol):
    """A model that writes a text, token by token: of these two kinds.

    Attributes:
        vocab_size: V, the number of logits.
        max_positions: the longest text that the model was made for; None: any.
    """

    vocab_size: int
    max_positions: int | None

    def __call__(
        self,
        tokens: jax.Array,
        start: jax.Array,
        length: jax.Array,
        cache: Cache,
        *,
        every: bool = False,
    ) -> tuple[jax.Array, Cache]:
        """Return the logits after the new tokens, and the cache that holds these tokens.

        A row depends neither on other rows, nor on padding, nor on how its text is cut into calls. A row
        whose length is 0 keeps its cache.

        Args:
            tokens: int32 [B, T], T <= S; in row b the first length[b] are valid, the rest is padding.
            start: int32 [B], the position of tokens[b, 0]: how many tokens the row has seen before.
            length: int32 [B]; 0 for an idle row, whose logits are then meaningless.
            cache: holds the positions before start. Later positions may hold anything finite, left by drafts
                that were rejected. Arrays without positions hold the state after exactly `start` tokens; if
                start is 0, they are as `make_cache` made them.
            every: whether to return logits after every token rather than after the last valid one.

        Returns:
            float32 [B, V] for the last valid token of each row, and the cache. With `every` float32
            [B, T, V], in which logits of padding are meaningless.
        """
        ...


@runtime_checkable
class DecoderModel(WritingModel, Protocol):
    """A model that writes a text, and reads nothing else."""

    def make_cache(self, rows: int, positions: int, dtype: str) -> Cache:
        """Return the cache of texts that have no token yet.

        Args:
            rows: B.
            positions: S, the number of tokens that each row has room for.
            dtype: the dtype of keys and values that the manifest asks for: `float32` or `bfloat16`. A model
                may ignore it.
        """
        ...


@runtime_checkable
class EncoderDecoderModel(WritingModel, Protocol):
    """A model that writes a text about a source: a translator, a transcriber.

    It is called as a DecoderModel is. `encode` takes the place of `make_cache`.
    """

    def source(self, rows: int, size: int) -> jax.ShapeDtypeStruct:
        """Return the shape and dtype of B sources with N = `size` places each.

        For example int32 [B, N] of tokens, or float32 [B, 80, N] of a spectrogram. One axis has size N; of
        several that have this size, the last one counts.
        """
        ...

    def encode(self, source: jax.Array, length: jax.Array, positions: int, dtype: str) -> Cache:
        """Read sources, and return the cache of texts that have no token yet.

        An array of the cache may have an axis of size N. It is padded with zeros to the longest source that
        the manifest asks for, so the model has to keep `length` in the cache where it masks that axis.

        Args:
            source: as `source` says.
            length: int32 [B], how many places are valid; 1 to N.
            positions: S, the number of tokens that each row has room for.
            dtype: as for `DecoderModel.make_cache`.
        """
        ...
