"""DistilBERT (Sanh et al. 2019, arXiv 1910.01108) as published by Hugging Face.

Its code is models/distilbert/modeling_distilbert.py. Only the transformer of a checkpoint is read: the head
of pretraining (`vocab_transform`, `vocab_layer_norm`, `vocab_projector`) is ignored.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from prejit.compiler.models.encoders.sentence import attention, check_activation, product
from prejit.compiler.models.layers.layer_config import Naming
from prejit.compiler.models.layers.linear import Embedding
from prejit.compiler.models.layers.norms import LayerNorm

NAMING = Naming(
    prefix="distilbert.",
    head="",
    embedding="",
    buffers=("embeddings.position_ids",),
    ignored=("vocab_transform.", "vocab_layer_norm.", "vocab_projector."),
)

_EPSILON = 1e-12
"""Epsilon of every norm. It is a constant in the code of the reference, not a setting."""


def check(config: Any) -> None:
    """Check that a configuration is supported.

    Raises:
        CheckpointError: a setting that is not supported.
    """
    check_activation(config, "activation")


def max_tokens(config: Any) -> int:
    """Return the maximum tokens of a sequence."""
    return int(config.max_position_embeddings)


def build(config: Any) -> DistilBert:
    """Return the transformer."""
    return DistilBert(config)


class DistilBert(nnx.Module):
    """The transformer (see sentence.Transformer). Parameters have the names of the published tensors."""

    def __init__(self, config: Any) -> None:
        self.embeddings = Embeddings(config)
        self.transformer = Stack(config)

    @property
    def layers(self) -> nnx.List[Block]:
        """The layers in order."""
        return self.transformer.layer


class Embeddings(nnx.Module):
    """Tokens and positions, summed and normalized."""

    def __init__(self, config: Any) -> None:
        self.word_embeddings = Embedding(config.vocab_size, config.dim)
        self.position_embeddings = Embedding(config.max_position_embeddings, config.dim)
        self.LayerNorm = LayerNorm(config.dim, _EPSILON)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Map tokens [B, T] to [B, T, D]."""
        positions = self.position_embeddings(jnp.arange(tokens.shape[1]))
        return self.LayerNorm(self.word_embeddings(tokens) + positions)


class Stack(nnx.Module):
    """The list of layers, under the published name."""

    def __init__(self, config: Any) -> None:
        self.layer = nnx.List([Block(config) for _ in range(config.n_layers)])


class Block(nnx.Module):
    """Attention and MLP, each with a norm after it."""

    def __init__(self, config: Any) -> None:
        self.attention = Attention(config)
        self.sa_layer_norm = LayerNorm(config.dim, _EPSILON)
        self.ffn = MLP(config)
        self.output_layer_norm = LayerNorm(config.dim, _EPSILON)

    def __call__(self, x: jax.Array, length: jax.Array) -> jax.Array:
        """Map x [B, T, D] to [B, T, D]."""
        x = self.sa_layer_norm(self.attention(x, length))
        return self.output_layer_norm(self.ffn(x))


class Attention(nnx.Module):
    """Multi-head self-attention and the residual."""

    def __init__(self, config: Any) -> None:
        self.num_heads = config.n_heads
        self.q_lin = product(config.dim, config.dim)
        self.k_lin = product(config.dim, config.dim)
        self.v_lin = product(config.dim, config.dim)
        self.out_lin = product(config.dim, config.dim)

    def __call__(self, x: jax.Array, length: jax.Array) -> jax.Array:
        """Map x [B, T, D] to [B, T, D]."""
        query, keys, values = self.q_lin(x), self.k_lin(x), self.v_lin(x)
        mixed = attention(query, keys, values, length, self.num_heads)
        return self.out_lin(mixed, residual=x)


class MLP(nnx.Module):
    """Two layers with an activation between them, and the residual."""

    def __init__(self, config: Any) -> None:
        self.lin1 = product(config.dim, config.hidden_dim)
        self.lin2 = product(config.hidden_dim, config.dim)
        self.activation = config.activation

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map x [B, T, D] to [B, T, D]."""
        return self.lin2(self.lin1(x, activation=self.activation), residual=x)
