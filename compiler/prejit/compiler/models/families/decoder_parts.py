"""Parts of the blocks of few decoders: a mixture of experts, and embeddings of tokens for each layer.

The mixture has the names of its family.

The embeddings are those of Gemma, which a block adds behind its MLP. A table has a short vector for each
token and layer. A product of the token's embedding gives another one; a layer multiplies the mean of both
with a gate that reads x. Results agree with those of transformers 5, models/gemma4/modeling_gemma4.py.

Shapes: B batch, T new positions, L layers, P the width of such a vector, D model width.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from prejit.compiler.models.families.decoder_family import DecoderFamily, Experts, MixtureSettings
from prejit.compiler.models.layers.experts import (
    ExpertGate,
    ExpertMatrices,
    Mixture,
    NormedRouter,
    Router,
    Routing,
)
from prejit.compiler.models.layers.linear import Embedding, Linear
from prejit.compiler.models.parameters import part_of, place


def place_experts(
    block: Any, family: DecoderFamily, experts: Experts, config: Any
) -> MixtureSettings:
    """Put the parts of a mixture, and of an MLP beside it, into a block; return how it mixes."""
    names, width = family.names, config.hidden_size
    count, inner = getattr(config, experts.count), getattr(config, experts.inner)
    is_normalized = bool(family.of(config, experts.is_normalized))
    epsilon = family.of(config, family.epsilon)
    swiglu = (getattr(config, key, None) or default for key, default in experts.swiglu)
    gate = ExpertGate(block.activation, *swiglu, is_gated=experts.is_gated)
    routing = Routing(experts.of_token(config), is_normalized)
    routing = routing if experts.routing is None else experts.routing(config)
    bias = experts.has_biases
    for name in (names.experts_norm, names.after_experts, names.after_shared):
        if name:
            place(block, name, family.norm(width, epsilon))
    if experts.shared is not None and (beside := experts.shared(config)):
        block.has_shared = True
        block.place_mlp(names.shared_up, names.shared_down, beside, width, False)
        if names.shared_gate:
            place(block, names.shared_gate, Linear(width, 1, bias=False))
    # ERNIE's files hold a row of corrections for each group of experts, and have one group
    corrections = (1, count) if routing.is_softmax else (count,)
    correction = corrections if routing.is_corrected else None
    if experts.norms_router:
        place(block, names.router, NormedRouter(width, count, epsilon))
    else:
        place(block, names.router, Router(width, count, bias=bias, correction=correction))
    latent = experts.latent(config)
    block.has_latent = latent is not None
    if latent is not None:
        place(block, names.latent_in, Linear(width, latent, bias=False))
        place(block, names.latent_out, Linear(latent, width, bias=False))
        width = latent
    outputs = 2 * inner if experts.is_gated else inner
    is_mxfp4 = getattr(config, "published_as", None) == "mxfp4"
    options = {"bias": bias, "is_mxfp4": is_mxfp4}
    place(block, names.experts_up, ExpertMatrices(count, width, outputs, **options))
    place(block, names.experts_down, ExpertMatrices(count, inner, width, **options))
    return MixtureSettings(routing, gate, experts.averages(config))


def mixed(block: Any, sizes: MixtureSettings, x: jax.Array, before: jax.Array) -> jax.Array:
    """Return the results of each token's experts: [B, T, D] to [B, T, D].

    `before` is what x is the norm of. Experts with a norm of their own read it, and so does their router.
    """
    names = block.names
    rows = (before if names.experts_norm else x).reshape(-1, x.shape[-1])
    router, up, down = (
        part_of(block, name) for name in (names.router, names.experts_up, names.experts_down)
    )
    shares, chosen = router(rows, sizes.routing)
    rows = block.normed(rows, names.experts_norm)
    rows = part_of(block, names.latent_in)(rows) if block.has_latent else rows
    mix = Mixture(up, down, sizes.gate)
    if sizes.routing.scales_inputs:
        pairs = (rows[:, None] * shares[..., None]).reshape(-1, rows.shape[-1])
        ones = jnp.ones((len(pairs), 1))
        y = mix(pairs, ones, chosen.reshape(-1, 1)).reshape(*shares.shape, -1).sum(1)
    else:
        y = mix(rows, shares, chosen)
    y = (part_of(block, names.latent_out)(y) if block.has_latent else y).reshape(x.shape)
    y = block.normed(y, names.after_experts)
    if not block.has_shared:
        return y
    shared = part_of(block, names.shared_down)(block.widened(x, names.shared_up))
    if names.shared_gate:
        shared = shared * jax.nn.sigmoid(part_of(block, names.shared_gate)(x))
    y = y + block.normed(shared, names.after_shared)
    return y / 2 if sizes.averages else y


_TABLE, _PRODUCT = "embed_tokens_per_layer", "per_layer_model_projection"
_NORM = "per_layer_projection_norm"
_GATE, _BACK, _AFTER = "per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm"


def place_layer_tables(stack: nnx.Module, family: DecoderFamily, config: Any) -> int:
    """Put the parts of all layers into a stack of blocks, and return P."""
    width, model = family.layer_embeddings(config), config.hidden_size
    if width:
        of_all = config.num_hidden_layers * width
        place(stack, _TABLE, Embedding(config.vocab_size_per_layer_input, of_all))
        place(stack, _PRODUCT, Linear(model, of_all, bias=False))
        place(stack, _NORM, family.norm(width, family.of(config, family.epsilon)))
    return width


def place_layer_products(block: nnx.Module, family: DecoderFamily, config: Any) -> None:
    """Put the parts of a layer into its block."""
    width, model = family.layer_embeddings(config), config.hidden_size
    place(block, _GATE, Linear(model, width, bias=False))
    place(block, _BACK, Linear(width, model, bias=False))
    place(block, _AFTER, family.norm(model, family.of(config, family.epsilon)))


def layer_vectors(stack: Any, tokens: jax.Array, x: jax.Array) -> jax.Array:
    """Return the vectors of tokens [B, T] with embeddings x [B, T, D]: float32 [B, T, L, P]."""
    width = stack.layer_embeddings
    shape = (*tokens.shape, -1, width)
    found = part_of(stack, _TABLE)(tokens).reshape(shape) * width**0.5
    product = part_of(stack, _PRODUCT)(x) * x.shape[-1] ** -0.5
    return (part_of(stack, _NORM)(product.reshape(shape)) + found) * 2.0**-0.5


def with_layer_vectors(block: Any, x: jax.Array, vectors: jax.Array) -> jax.Array:
    """Return x [B, T, D] plus what a layer makes of its vectors [B, T, P]."""
    gate = part_of(block, _GATE)(x, activation=block.activation)
    return x + part_of(block, _AFTER)(part_of(block, _BACK)(gate * vectors))
