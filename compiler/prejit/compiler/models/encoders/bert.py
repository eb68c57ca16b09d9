"""BERT (Devlin et al. 2018, arXiv 1810.04805) as published by Hugging Face (models/bert/modeling_bert.py).

Only the transformer of a checkpoint is read: the heads of pretraining (`cls`) and `pooler`, which no
embedding of sentence-transformers uses, are ignored. Every token belongs to the first segment, as when one
sentence is tokenized.

Shapes: B batch, T tokens, D width.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from prejit.compiler.models.encoders.sentence import attention, check_activation, product
from prejit.compiler.models.layers.layer_config import Naming, require
from prejit.compiler.models.layers.linear import Embedding
from prejit.compiler.models.layers.norms import LayerNorm

NAMING = Naming(
    prefix="bert.",
    head="",
    embedding="",
    buffers=("embeddings.position_ids", "embeddings.token_type_ids"),
    ignored=("cls.", "pooler.", "bert.pooler."),
)


def check(config: Any) -> None:
    """Check that a configuration is supported.

    Raises:
        CheckpointError: a setting that is not supported.
    """
    check_activation(config, "hidden_act")
    require(config, "is_decoder", getattr(config, "is_decoder", False), [False])
    require(config, "add_cross_attention", getattr(config, "add_cross_attention", False), [False])
    kind = getattr(config, "position_embedding_type", None) or "absolute"
    require(config, "position_embedding_type", kind, ["absolute"])


def max_tokens(config: Any) -> int:
    """Return the maximum tokens of a sequence."""
    return int(config.max_position_embeddings)


def build(config: Any) -> Bert:
    """Return the transformer."""
    return Bert(config)


class Bert(nnx.Module):
    """The transformer (see sentence.Transformer). Parameters have the names of the published tensors."""

    def __init__(self, config: Any, padding: int | None = None) -> None:
        self.embeddings = Embeddings(config, padding)
        self.encoder = Stack(config)

    @property
    def layers(self) -> nnx.List[Block]:
        """The layers in order."""
        return self.encoder.layer


class Embeddings(nnx.Module):
    """Tokens, positions and the first segment, summed and normalized."""

    def __init__(self, config: Any, padding: int | None) -> None:
        """Create the tables.

        Args:
            config: of transformers.
            padding: a token that takes no position, with whose id positions begin, as in RoBERTa.
        """
        width = config.hidden_size
        self.word_embeddings = Embedding(config.vocab_size, width)
        self.position_embeddings = Embedding(config.max_position_embeddings, width)
        self.token_type_embeddings = Embedding(config.type_vocab_size, width)
        self.LayerNorm = LayerNorm(width, config.layer_norm_eps)
        self.padding = padding

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Map tokens [B, T] to [B, T, D]."""
        segment = self.token_type_embeddings(jnp.zeros((), jnp.int32))
        places = self.position_embeddings(self._positions(tokens)) + segment
        return self.LayerNorm(self.word_embeddings(tokens) + places)

    def _positions(self, tokens: jax.Array) -> jax.Array:
        """Return the positions of tokens: int32 [T] or [B, T]."""
        if self.padding is None:
            return jnp.arange(tokens.shape[1])
        # modeling_roberta.py, create_position_ids_from_input_ids
        counted = (tokens != self.padding).astype(jnp.int32)
        return jnp.cumsum(counted, axis=1) * counted + self.padding


class Stack(nnx.Module):
    """The list of layers, under the published name."""

    def __init__(self, config: Any) -> None:
        self.layer = nnx.List([Block(config) for _ in range(config.num_hidden_layers)])


class Block(nnx.Module):
    """Attention and MLP, each with a norm after it."""

    def __init__(self, config: Any) -> None:
        self.attention = Attention(config)
        self.intermediate = Intermediate(config)
        self.output = Output(config.intermediate_size, config)

    def __call__(self, x: jax.Array, length: jax.Array) -> jax.Array:
        """Map x [B, T, D] to [B, T, D]."""
        x = self.attention(x, length)
        return self.output(self.intermediate(x), x)


class Attention(nnx.Module):
    """Self-attention, the residual and the norm."""

    def __init__(self, config: Any) -> None:
        self.self = SelfAttention(config)
        self.output = Output(config.hidden_size, config)

    def __call__(self, x: jax.Array, length: jax.Array) -> jax.Array:
        """Map x [B, T, D] to [B, T, D]."""
        return self.output(self.self(x, length), x)


class SelfAttention(nnx.Module):
    """Multi-head attention without its last product."""

    def __init__(self, config: Any) -> None:
        self.num_heads = config.num_attention_heads
        width = config.hidden_size
        self.query = product(width, width)
        self.key = product(width, width)
        self.value = product(width, width)

    def __call__(self, x: jax.Array, length: jax.Array) -> jax.Array:
        """Map x [B, T, D] to [B, T, D]."""
        return attention(self.query(x), self.key(x), self.value(x), length, self.num_heads)


class Intermediate(nnx.Module):
    """The wide layer of the MLP and its activation."""

    def __init__(self, config: Any) -> None:
        self.dense = product(config.hidden_size, config.intermediate_size)
        self.activation = config.hidden_act

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map x [B, T, D] to [B, T, inner]."""
        return self.dense(x, activation=self.activation)


class Output(nnx.Module):
    """A linear layer, the residual and the norm."""

    def __init__(self, inputs: int, config: Any) -> None:
        self.dense = product(inputs, config.hidden_size)
        self.LayerNorm = LayerNorm(config.hidden_size, config.layer_norm_eps)

    def __call__(self, x: jax.Array, residual: jax.Array) -> jax.Array:
        """X [B, T, in] and the residual [B, T, D] to [B, T, D]."""
        return self.LayerNorm(self.dense(x, residual=residual))
