"""Encoders whose heads turn with the position: ModernBERT, nomic-bert, and decoders that embed.

A block is that of decoders.py, with attention to the whole text instead of a cache. Layers of one model may
differ in their window and in how heads turn. One program runs for each layer, so these numbers are parameters
too. No checkpoint has them: `derived` gives their values.

Hidden states agree with those of transformers 5, models/NAME/modeling_NAME.py; encoder_table.py names the
papers. Shapes: B batch, T tokens, N query heads, H head size, P pairs of a head that turn, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from prejit.compiler.models.families.decoder_family import DecoderFamily, Heads
from prejit.compiler.models.families.decoders import Block
from prejit.compiler.models.families.sentence import biased_attention
from prejit.compiler.models.layers import rope
from prejit.compiler.models.layers.layer_config import unsupported
from prejit.compiler.models.layers.linear import Embedding
from prejit.compiler.models.parameters import part_of, place

Values = np.ndarray[Any, np.dtype[np.float32]]

_EVERYWHERE = 2.0**24
"""The window of a layer without one: more than any text has tokens, exact in float32."""


@dataclass(frozen=True)
class RotaryFamily:
    """Differences between families of encoders whose heads turn. A text is a key of config.json.

    Attributes:
        blocks: what blocks are, as of a decoder.
        embeddings: makes the module of embeddings from a configuration; None: a table of tokens.
        embeddings_norm: name of a norm that follows embeddings; empty: none does.
        is_causal: returns whether a token sees only itself and those before it.
        window: returns how many tokens on each side, or before it, a token sees, from the window of
            `blocks`.
        norms_sums: whether a norm follows each sum of a block, and none the last block; otherwise norms
            precede attention and MLP.
        starts_bare: whether the first block has no norm before attention.
    """

    blocks: DecoderFamily
    embeddings: Callable[[Any], nnx.Module] | None = None
    embeddings_norm: str = ""
    is_causal: Callable[[Any], bool] = lambda config: False
    window: Callable[[int], int] = lambda window: window - 1
    norms_sums: bool = False
    starts_bare: bool = False


class RotaryEncoder(nnx.Module):
    """The transformer (see sentence.Transformer). Parameters have the names of the published tensors."""

    shared: tuple[nnx.Module, ...] = ()

    def __init__(self, family: RotaryFamily, config: Any) -> None:
        blocks, names = family.blocks, family.blocks.names
        self.names, self.ends_normed = names, not family.norms_sums
        self.embeddings_norm, epsilon = family.embeddings_norm, blocks.of(config, blocks.epsilon)
        if self.embeddings_norm:
            place(self, self.embeddings_norm, blocks.norm(config.hidden_size, epsilon))
        table = Embedding(config.vocab_size, config.hidden_size)
        place(self, names.embedding, family.embeddings(config) if family.embeddings else table)
        heads = blocks.heads(config)
        if len({each.rotary.scale for each in heads if each.rotary}) != 1:
            raise unsupported(
                config, "rope_parameters: expected one attention_factor of all layers"
            )
        layers = [RotaryBlock(family, config, each, at) for at, each in enumerate(heads)]
        place(self, names.layers, nnx.List(layers))
        if self.ends_normed:
            place(self, names.norm, blocks.norm(config.hidden_size, epsilon))
        scale = blocks.embedding_scale
        self.scaling = Scaling(None if scale is None else scale(config))

    @property
    def embedding(self) -> tuple[nnx.Module, ...]:
        """See Transformer."""
        names = filter(None, (self.names.embedding, self.embeddings_norm))
        return (*(part_of(self, name) for name in names), self.scaling)

    @property
    def blocks(self) -> nnx.List[RotaryBlock]:
        """See Transformer."""
        return part_of(self, self.names.layers)

    @property
    def final(self) -> tuple[nnx.Module, ...]:
        """See Transformer."""
        return (part_of(self, self.names.norm),) if self.ends_normed else ()


class Scaling(nnx.Module):
    """A factor of embeddings; None: there is none."""

    def __init__(self, factor: float | None) -> None:
        self.factor = factor

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return x times the factor."""
        return x if self.factor is None else x * self.factor


class NormedTokens(nnx.Module):
    """A table of tokens, and a norm of its rows: ModernBERT's embeddings."""

    def __init__(self, config: Any, norm: nnx.Module) -> None:
        self.tok_embeddings = Embedding(config.vocab_size, config.hidden_size)
        self.norm = norm

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Map tokens [B, T] to [B, T, D]."""
        return self.norm(self.tok_embeddings(tokens))


class SegmentedTokens(nnx.Module):
    """A table of tokens and one of segments: nomic-bert's embeddings before their norm."""

    def __init__(self, config: Any) -> None:
        self.word_embeddings = Embedding(config.vocab_size, config.hidden_size)
        self.token_type_embeddings = Embedding(config.type_vocab_size, config.hidden_size)

    def __call__(self, tokens: jax.Array, segments: jax.Array | None = None) -> jax.Array:
        """Map tokens and segments [B, T] to [B, T, D]; None: all are of the first segment."""
        kind = jnp.zeros((), jnp.int32) if segments is None else segments
        return self.word_embeddings(tokens) + self.token_type_embeddings(kind)


class RotaryBlock(Block):
    """Attention to the whole text and an MLP."""

    def __init__(self, family: RotaryFamily, config: Any, heads: Heads, layer: int) -> None:
        super().__init__(family.blocks, config, heads, layer)
        assert heads.rotary is not None
        self.is_causal, self.norms_sums = family.is_causal(config), family.norms_sums
        self.starts_bare = family.starts_bare
        window = _EVERYWHERE if heads.window is None else family.window(heads.window)
        derived = {"window": (window,), "frequencies": heads.rotary.frequencies}
        if family.starts_bare:
            derived["is_bare"] = (float(layer == 0),)
            if layer == 0:
                derived[f"{self.names.attention_norm}.weight"] = (1.0,) * config.hidden_size
        self.derived_values = tuple(derived.items())
        for name in ("window", "frequencies", "is_bare"):
            if name in derived:
                setattr(self, name, nnx.Param(jnp.zeros(len(derived[name]))))

    def derived(self) -> dict[str, Values]:
        """Return the parameters that follow from config.json, by their names in the block."""
        return {name: np.array(values, np.float32) for name, values in self.derived_values}

    def __call__(self, x: jax.Array, length: jax.Array) -> jax.Array:  # type: ignore[override]
        """Map x [B, T, D] to [B, T, D]; in row b the first length[b] tokens are valid."""
        names, rotary = self.names, self.heads.rotary
        assert rotary is not None
        positions = jnp.arange(x.shape[1])
        angles = positions[None, :, None, None] * self.frequencies[...]
        cos, sin = jnp.cos(angles) * rotary.scale, jnp.sin(angles) * rotary.scale
        turns = {rotary: rope.Turns(cos, sin, rotary.is_interleaved, None)}
        text = WholeText(length, self._visible(positions))
        if self.norms_sums:
            mixed, _ = self._attend(x, turns, text, None, last=False)  # type: ignore[arg-type]
            x = part_of(self, names.output)(mixed, residual=x)
            x = part_of(self, names.attention_norm)(x)
            x = part_of(self, names.down)(self.widened(x, names.up), residual=x)
            return part_of(self, names.mlp_norm)(x)
        normed = part_of(self, names.attention_norm)(x)
        if self.starts_bare:
            normed = jnp.where(self.is_bare[...] > 0, x, normed)
        mixed, _ = self._attend(normed, turns, text, None, last=False)  # type: ignore[arg-type]
        x = self._add(x, names.output, mixed, names.after_attention)
        inner = self.widened(part_of(self, names.mlp_norm)(x), names.up)
        return self._add(x, names.down, inner, names.after_mlp)

    def _visible(self, positions: jax.Array) -> jax.Array:
        """Return which of all tokens each one sees: bool [T, T]."""
        before = positions[:, None] - positions
        seen = jnp.abs(before) <= self.window[...]
        return seen & (before >= 0) if self.is_causal else seen


@dataclass(frozen=True)
class WholeText:
    """The tokens of a whole text that a block attends to. A decoder's block has NewTokens.

    Attributes:
        length: int32 [B], the number of valid tokens.
        visible: bool [T, T], which of all tokens each one sees.
    """

    length: jax.Array
    visible: jax.Array

    def attend(
        self,
        query: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        layer: None,
        scale: float,
        *,
        last: bool,
        window: int | None,
        cap: float | None,
    ) -> tuple[jax.Array, None]:
        """Return attention, [B, T, N * H]; `visible` has the window, and families with a cap are none."""
        mixed = biased_attention(query * scale, keys, values, self.length, visible=self.visible)
        return mixed, layer


def derived_of(module: nnx.Module) -> Mapping[str, Values]:
    """Return the parameters of a module that follow from config.json, by their names."""
    return {
        ".".join(map(str, (*path, name))): values
        for path, part in nnx.iter_modules(module)
        if isinstance(part, RotaryBlock)
        for name, values in part.derived().items()
    }
