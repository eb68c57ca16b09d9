"""The transformer of BERT and its relatives: one module, and what differs between families as data.

Only the transformer of a checkpoint is read: heads of pretraining, and poolers, which no embedding of
sentence-transformers uses, are ignored. Every token belongs to the first segment, as when one sentence is
tokenized. family_table.py names the papers.

Shapes: B batch, T tokens, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from prejit.compiler.models.families.sentence import attention, product
from prejit.compiler.models.layers.linear import Embedding, LayerNorm
from prejit.compiler.models.parameters import part_of, place


@dataclass(frozen=True)
class EncoderNames:
    """How a family publishes its parts, BERT by default. Names from `qkv` on begin at the block."""

    layers: str = "encoder.layer"
    qkv: tuple[str, ...] = ("attention.self.query", "attention.self.key", "attention.self.value")
    output: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    up: str = "intermediate.dense"
    down: str = "output.dense"
    mlp_norm: str = "output.LayerNorm"


@dataclass(frozen=True)
class EncoderFamily:
    """Differences between families. The defaults are BERT's.

    Attributes:
        names: names of the tensors.
        activation, inner: keys of the MLP's activation and of the width inside it.
        epsilon: key of the epsilon of norms, or the epsilon.
        has_segments: whether embeddings have a table of segments.
        counts_padding: whether positions begin behind the id of the padding token, which takes none itself.
    """

    names: EncoderNames = EncoderNames()
    activation: str = "hidden_act"
    inner: str = "intermediate_size"
    epsilon: str | float = "layer_norm_eps"
    has_segments: bool = True
    counts_padding: bool = False

    def norm(self, config: Any) -> LayerNorm:
        """Return a norm of the model's width."""
        epsilon = getattr(config, self.epsilon) if isinstance(self.epsilon, str) else self.epsilon
        return LayerNorm(config.hidden_size, epsilon)


class TextEncoder(nnx.Module):
    """The transformer (see sentence.Transformer). Parameters have the names of the published tensors."""

    def __init__(self, family: EncoderFamily, config: Any) -> None:
        self.embeddings = Embeddings(family, config)
        self.name = family.names.layers
        blocks = [EncoderBlock(family, config) for _ in range(config.num_hidden_layers)]
        place(self, self.name, nnx.List(blocks))

    @property
    def layers(self) -> nnx.List[EncoderBlock]:
        """The layers in order."""
        return part_of(self, self.name)


class Embeddings(nnx.Module):
    """Tokens, positions and the first segment, summed and normalized."""

    def __init__(self, family: EncoderFamily, config: Any) -> None:
        width = config.hidden_size
        self.word_embeddings = Embedding(config.vocab_size, width)
        self.position_embeddings = Embedding(config.max_position_embeddings, width)
        if family.has_segments:
            self.token_type_embeddings = Embedding(config.type_vocab_size, width)
        self.LayerNorm = family.norm(config)
        self.padding: int | None = config.pad_token_id if family.counts_padding else None

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Map tokens [B, T] to [B, T, D]."""
        places = self.position_embeddings(self._positions(tokens))
        if hasattr(self, "token_type_embeddings"):
            places = places + self.token_type_embeddings(jnp.zeros((), jnp.int32))
        return self.LayerNorm(self.word_embeddings(tokens) + places)

    def _positions(self, tokens: jax.Array) -> jax.Array:
        """Return the positions of tokens: int32 [T] or [B, T]."""
        if self.padding is None:
            return jnp.arange(tokens.shape[1])
        # modeling_roberta.py, create_position_ids_from_input_ids
        counted = (tokens != self.padding).astype(jnp.int32)
        return jnp.cumsum(counted, axis=1) * counted + self.padding


class EncoderBlock(nnx.Module):
    """Attention and MLP, each with a norm after it."""

    def __init__(self, family: EncoderFamily, config: Any) -> None:
        names, width, inner = family.names, config.hidden_size, getattr(config, family.inner)
        self.names, self.heads = names, config.num_attention_heads
        self.activation: str = getattr(config, family.activation)
        for name in (*names.qkv, names.output):
            place(self, name, product(width, width))
        place(self, names.up, product(width, inner))
        place(self, names.down, product(inner, width))
        for name in (names.attention_norm, names.mlp_norm):
            place(self, name, family.norm(config))

    def __call__(self, x: jax.Array, length: jax.Array) -> jax.Array:
        """Map x [B, T, D] to [B, T, D]; in row b the first length[b] tokens are valid."""
        names = self.names
        query, keys, values = (part_of(self, name)(x) for name in names.qkv)
        mixed = attention(query, keys, values, length, self.heads)
        x = part_of(self, names.attention_norm)(part_of(self, names.output)(mixed, residual=x))
        inner = part_of(self, names.up)(x, activation=self.activation)
        return part_of(self, names.mlp_norm)(part_of(self, names.down)(inner, residual=x))
