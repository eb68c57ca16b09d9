"""A model under test, with the texts, sources and shapes that all checks use.

Texts are random tokens from a fixed seed: ROWS rows of 4 P tokens. P, the piece, is 4 tokens, or less for a
model of few positions. Whole prompts have 3 P tokens, which leaves P for decode steps. No cache has
more than 6 P positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from prejit.compiler.lowering.kv_cache_arrays import POSITIONS, CacheLayout, cache_layout
from prejit.compiler.models.layers.layer_config import DecoderConfig
from prejit.compiler.models.parameters import Parametrized
from prejit.compiler.models.protocol import Cache

TOLERANCE = 1e-4
"""Largest difference of equal logits, relative to their spread. XLA adds float32 numbers in another order for
another shape, which changes logits of large models by up to 1e-5 of their spread."""


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        name: the check: `chunks`.
        passed: whether the model keeps the rule.
        difference: the worst difference of logits, relative to their spread; None: the check compares none.
        found: what was expected and what was found; empty if the model keeps the rule.
        change: what to change in the model; empty if it keeps the rule.
    """

    name: str
    passed: bool
    difference: float | None = None
    found: str = ""
    change: str = ""


def difference(one: Any, other: Any) -> float:
    """Return the largest difference of logits relative to their spread: the largest minus the smallest.

    Args:
        one: float32, any shape.
        other: the logits to compare with, of the same shape; they define the spread.

    Returns:
        0 for equal logits, infinity if some are not finite.
    """
    one, other = (np.asarray(each, np.float64) for each in (one, other))
    if not (np.isfinite(one).all() and np.isfinite(other).all()):
        return float("inf")
    apart = float(np.max(np.abs(one - other), initial=0.0))
    spread = float(np.ptp(other)) if other.size else 0.0
    return apart / spread if spread else (0.0 if apart == 0 else float("inf"))


Array = np.ndarray[Any, Any]

ROWS = 3
"""Rows of a batch: one beside another, and a third that differs from both."""
FEWEST_POSITIONS = 12
"""The fewest positions of a model that the checks can run."""
_LARGEST_PIECE = 4
_SOURCE_TOKENS = 32
"""Tokens of a source are below this number, because the protocol does not give the source's vocabulary."""


@dataclass(frozen=True)
class Subject:
    """A model under test.

    Attributes:
        model: the model apart from its parameters.
        values: the values of its parameters, by name.
        tolerance: the largest difference of logits that counts as none, relative to their spread.
        source_size: N of an encoder-decoder's sources.
    """

    model: Parametrized
    values: Mapping[str, Any]
    tolerance: float
    source_size: int

    @cached_property
    def bound(self) -> Any:
        """The model with its values."""
        return self.model.bind(self.values)

    @property
    def encodes(self) -> bool:
        """True if the model is an encoder-decoder: `encode` takes the place of `make_cache`."""
        return hasattr(self.bound, "encode") and not hasattr(self.bound, "make_cache")

    @cached_property
    def piece(self) -> int:
        """P, the tokens of a piece."""
        most = self.bound.max_positions
        return _LARGEST_PIECE if most is None else min(_LARGEST_PIECE, most // 6)

    @property
    def positions(self) -> int:
        """S of most caches: 4 P."""
        return 4 * self.piece

    @cached_property
    def texts(self) -> Array:
        """The texts of all rows: int32 [ROWS, 4 P]."""
        return self._tokens(0)

    @cached_property
    def others(self) -> Array:
        """Other texts of the same shape, which differ from `texts` in every token."""
        shift = 1 + self._tokens(1) % max(1, self.bound.vocab_size - 1)
        return (self.texts + shift) % np.int32(self.bound.vocab_size)

    def _tokens(self, seed: int) -> Array:
        random = np.random.default_rng(seed)
        size = (ROWS, self.positions)
        return random.integers(0, self.bound.vocab_size, size, dtype=np.int32)

    # ---------------------------------------------------------------- sources

    @cached_property
    def source_sizes(self) -> tuple[int, ...]:
        """Sizes N of sources: the one to check and its double, if the model takes both."""
        one, two = self.source_size, 2 * self.source_size
        try:
            self.cache_shapes(1, self.positions, size=two)
        except Exception:
            # The model's own refusal: it takes one size, as one of spectrograms of 30 s.
            return (one,)
        return (one, two)

    @cached_property
    def source_axis(self) -> int:
        """The axis of a source that has N places. Needs two sizes."""
        one, two = (self.bound.source(1, size).shape for size in self.source_sizes)
        return next(axis for axis, (a, b) in enumerate(zip(one, two, strict=True)) if a != b)

    def sources(self, seed: int = 0) -> Array:
        """Return random sources of all rows, of the smaller size."""
        shape = self.bound.source(ROWS, self.source_size)
        random = np.random.default_rng(seed)
        if jnp.issubdtype(shape.dtype, jnp.integer):
            most = min(self.bound.vocab_size, _SOURCE_TOKENS)
            return random.integers(0, most, shape.shape).astype(shape.dtype)
        return random.standard_normal(shape.shape).astype(shape.dtype)

    # ---------------------------------------------------------------- caches

    def cache_shapes(
        self, rows: int, positions: int, dtype: str = "float32", size: int | None = None
    ) -> Any:
        """Return the shapes and dtypes of a new cache; an encoder-decoder's has sources of N = `size`."""
        size = size or self.source_size

        def make(values: Any) -> Cache:
            model = self.model.bind(values)
            if not self.encodes:
                return model.make_cache(rows, positions, dtype)
            shape = model.source(rows, size)
            length = jnp.full(rows, size, jnp.int32)
            return model.encode(jnp.zeros(shape.shape, shape.dtype), length, positions, dtype)

        return jax.eval_shape(make, self.values)

    def cache(self, rows: Sequence[int] = range(ROWS), positions: int | None = None) -> Cache:
        """Return the cache of these rows' empty texts, each with its whole source."""
        positions = positions or self.positions
        if not self.encodes:
            return self._make(self.values, len(rows), positions)
        lengths = np.full(len(rows), self.source_size, np.int32)
        return self.encode(self.sources()[list(rows)], lengths, positions)

    def encode(self, sources: Array, lengths: Array, positions: int | None = None) -> Cache:
        """Return the cache of texts about sources."""
        return self._encode(self.values, sources, lengths, positions or self.positions)

    @cached_property
    def layout(self) -> CacheLayout:
        """The arrays of the cache as a build finds them.

        Raises:
            BuildError: a build refuses them.
        """
        bound = self.bound
        described = DecoderConfig(
            "checked", bound.vocab_size, "float32", bound.max_positions or 6 * self.piece
        )
        return cache_layout(self.model, described, self.source_size if self.encodes else None)

    @property
    def has_positions(self) -> tuple[bool, ...]:
        """True if each array of the cache has positions."""
        return tuple(POSITIONS in array.variables for array in self.layout.arrays)

    # ---------------------------------------------------------------- calls

    def call(
        self, tokens: Array, start: Any, length: Any, cache: Cache, *, every: bool = False
    ) -> tuple[Array, Cache]:
        """Call the model, compiled; start and length may be one number for all rows.

        Returns:
            the logits as NumPy array, and the cache.
        """
        rows = len(tokens)
        start, length = (
            np.broadcast_to(np.asarray(each, np.int32), rows) for each in (start, length)
        )
        logits, cache = self._call(self.values, tokens, start, length, cache, every)
        return np.asarray(logits), cache

    def feed(
        self, tokens: Array, cache: Cache, start: int = 0, width: int = 1
    ) -> tuple[Array, Cache]:
        """Put texts [B, C] into a cache, in pieces of `width` tokens; C is a multiple of it.

        Returns:
            the logits after each piece, [B, C / width, V], and the cache.
        """
        found = []
        for at in range(0, tokens.shape[1], width):
            logits, cache = self.call(tokens[:, at : at + width], start + at, width, cache)
            found.append(logits)
        return np.stack(found, 1), cache

    @cached_property
    def _call(self) -> Callable[..., Any]:
        def call(
            values: Any, tokens: Any, start: Any, length: Any, cache: Cache, every: bool
        ) -> tuple[jax.Array, Cache]:
            logits, cache = self.model.bind(values)(tokens, start, length, cache, every=every)
            return logits, cache

        return jax.jit(call, static_argnums=5)

    @cached_property
    def _make(self) -> Callable[..., Cache]:
        def make(values: Any, rows: int, positions: int) -> Cache:
            return self.model.bind(values).make_cache(rows, positions, "float32")

        return jax.jit(make, static_argnums=(1, 2))

    @cached_property
    def _encode(self) -> Callable[..., Cache]:
        def encode(values: Any, sources: Any, lengths: Any, positions: int) -> Cache:
            return self.model.bind(values).encode(sources, lengths, positions, "float32")

        return jax.jit(encode, static_argnums=3)
