"""Gemma's embeddings of tokens for each layer, which a block adds behind its MLP.

A table has a short vector for each token and layer. A product of the token's embedding gives another one; a
layer multiplies the mean of both with a gate that reads x. Results agree with those of transformers 5,
models/gemma4/modeling_gemma4.py.

Shapes: B batch, T new positions, L layers, P the width of such a vector, D model width.
"""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from prejit.compiler.models.families.decoder_family import DecoderFamily
from prejit.compiler.models.layers.linear import Embedding, Linear
from prejit.compiler.models.parameters import part_of, place

_TABLE, _PRODUCT = "embed_tokens_per_layer", "per_layer_model_projection"
_NORM = "per_layer_projection_norm"
_GATE, _BACK, _AFTER = "per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm"


def place_tables(stack: nnx.Module, family: DecoderFamily, config: Any) -> int:
    """Put the parts of all layers into a stack of blocks, and return P."""
    width, model = family.layer_embeddings(config), config.hidden_size
    if width:
        of_all = config.num_hidden_layers * width
        place(stack, _TABLE, Embedding(config.vocab_size_per_layer_input, of_all))
        place(stack, _PRODUCT, Linear(model, of_all, bias=False))
        place(stack, _NORM, family.norm(width, family.of(config, family.epsilon)))
    return width


def place_products(block: nnx.Module, family: DecoderFamily, config: Any) -> None:
    """Put the parts of a layer into its block."""
    width, model = family.layer_embeddings(config), config.hidden_size
    place(block, _GATE, Linear(model, width, bias=False))
    place(block, _BACK, Linear(width, model, bias=False))
    place(block, _AFTER, family.norm(model, family.of(config, family.epsilon)))


def of_tokens(stack: Any, tokens: jax.Array, x: jax.Array) -> jax.Array:
    """Return the vectors of tokens [B, T] with embeddings x [B, T, D]: float32 [B, T, L, P]."""
    width = stack.layer_embeddings
    shape = (*tokens.shape, -1, width)
    found = part_of(stack, _TABLE)(tokens).reshape(shape) * width**0.5
    product = part_of(stack, _PRODUCT)(x) * x.shape[-1] ** -0.5
    return (part_of(stack, _NORM)(product.reshape(shape)) + found) * 2.0**-0.5


def added(block: Any, x: jax.Array, vectors: jax.Array) -> jax.Array:
    """Return x [B, T, D] plus what a layer makes of its vectors [B, T, P]."""
    gate = part_of(block, _GATE)(x, activation=block.activation)
    return x + part_of(block, _AFTER)(part_of(block, _BACK)(gate * vectors))
