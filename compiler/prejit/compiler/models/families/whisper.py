"""Whisper: an encoder of log-mel spectrograms and a decoder that writes what is said in them.

Sources: Radford et al. 2022, "Robust Speech Recognition via Large-Scale Weak Supervision", arXiv 2212.04356,
section 2.2; transformers 5, models/whisper/modeling_whisper.py, with which the logits agree. Like that code,
the encoder masks nothing: silence after the speech is a part of the source, and `scale_embedding` changes
nothing.

Shapes: B rows, T new tokens, S positions, K heads, H head size, D width, N frames of the spectrogram.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from prejit.compiler.models.encoders import sentence
from prejit.compiler.models.layers.attention import NewTokens, attention_to_all
from prejit.compiler.models.layers.layer_config import (
    DecoderConfig,
    LayerCache,
    Naming,
    require,
    unsupported,
)
from prejit.compiler.models.layers.linear import ACTIVATIONS, Embedding, Linear, dot
from prejit.compiler.models.layers.norms import LayerNorm
from prejit.runtime.errors import ManifestError

NAMING = Naming(
    prefix="model.",
    head="proj_out.weight",
    embedding="model.decoder.embed_tokens.weight",
)

BlockCache = tuple[LayerCache, LayerCache]
"""Keys and values of the text, [B, K, S, H], which new tokens extend; those of the source, [B, K, N / 2, H],
which do not change."""

TextCache = tuple[BlockCache, ...]
"""One BlockCache for each block of the decoder."""

_EPSILON = 1e-5
"""Epsilon of all norms; config.json has none."""

_TAPS, _STRIDE = 3, 2
"""Frames that a convolution reads for one result; frames that the second one advances."""


def describe(config: Any) -> DecoderConfig:
    """Return the sizes of a Whisper's decoder.

    Raises:
        CheckpointError: its configuration asks for something that is not built here.
    """
    require(config, "activation_function", config.activation_function, ACTIVATIONS)
    require(config, "tie_word_embeddings", config.tie_word_embeddings, [True])
    for key in ("encoder_attention_heads", "decoder_attention_heads"):
        heads = getattr(config, key)
        if config.d_model % heads:
            raise unsupported(
                config, f"d_model: expected a multiple of {key} = {heads}, found {config.d_model}"
            )
    return DecoderConfig(
        family="whisper",
        vocab_size=config.vocab_size,
        cache_dtype="float32",
        max_positions=config.max_target_positions,
    )


def build(config: Any, context: int | None) -> Whisper:
    """Return a Whisper, which is the same for every context."""
    return Whisper(config)


class Whisper(nnx.Module):
    """A Whisper (see EncoderDecoderModel). Parameters have the names of the published tensors."""

    def __init__(self, config: Any) -> None:
        self.model = Transformer(config)
        self.vocab_size: int = config.vocab_size
        self.max_positions: int | None = config.max_target_positions
        self.mel_bins: int = config.num_mel_bins
        self.frames: int = _STRIDE * config.max_source_positions

    def source(self, rows: int, size: int) -> jax.ShapeDtypeStruct:
        """Return the shape of B log-mel spectrograms: float32 [B, mel bins, N].

        Raises:
            ManifestError: the model was made for another number of frames.
        """
        self._check_frames(size)
        return jax.ShapeDtypeStruct((rows, self.mel_bins, size), jnp.float32)

    def encode(self, source: jax.Array, length: jax.Array, positions: int, dtype: str) -> TextCache:
        """Read spectrograms, and return the cache of texts that have no token yet.

        `length` changes nothing, because a Whisper masks no part of its source.

        Args:
            source: float32 [B, mel bins, N].
            length: int32 [B].
            positions: S.
            dtype: the dtype of all keys and values.

        Raises:
            ManifestError: the model was made for another number of frames.
        """
        self._check_frames(source.shape[2])
        hidden = self.model.encoder(source)
        return self.model.decoder.make_cache(hidden, positions, dtype)

    def __call__(
        self,
        tokens: jax.Array,
        start: jax.Array,
        length: jax.Array,
        cache: TextCache,
        *,
        every: bool = False,
    ) -> tuple[jax.Array, TextCache]:
        """See models.protocol.DecoderModel."""
        new = NewTokens(start, length, tokens.shape[1], every)
        x, cache = self.model.decoder(tokens, new, cache)
        return self.model.decoder.embed_tokens.logits(x if every else x[:, 0]), cache

    def _check_frames(self, size: int) -> None:
        if size != self.frames:
            raise ManifestError(
                f"generate.source: expected {self.frames} frames of a spectrogram, which is {_STRIDE} * "
                f"max_source_positions of the model's config.json; found {size}",
                hint=f"give source = [{self.frames}], and pad the sound with silence to that length",
            )


class Transformer(nnx.Module):
    """The encoder and the decoder, under the published name."""

    def __init__(self, config: Any) -> None:
        self.encoder = AudioEncoder(config)
        self.decoder = TextDecoder(config)


class AudioEncoder(nnx.Module):
    """Two convolutions over time, positions, and blocks in which every frame sees all others."""

    def __init__(self, config: Any) -> None:
        width = config.d_model
        self.conv1 = Convolution(config.num_mel_bins, width, 1)
        self.conv2 = Convolution(width, width, _STRIDE)
        self.embed_positions = Embedding(config.max_source_positions, width)
        self.layers = nnx.List([EncoderBlock(config) for _ in range(config.encoder_layers)])
        self.layer_norm = LayerNorm(width, _EPSILON)

    def __call__(self, source: jax.Array) -> jax.Array:
        """Map spectrograms [B, mel bins, N] to hidden states [B, N / 2, D]."""
        x = jax.nn.gelu(self.conv1(source.swapaxes(1, 2)), approximate=False)
        x = jax.nn.gelu(self.conv2(x), approximate=False)
        x = x + self.embed_positions(jnp.arange(x.shape[1]))
        for block in self.layers:
            x = block(x)
        return self.layer_norm(x)


class Convolution(nnx.Module):
    """A convolution over time, padded with one frame of zeros at each end.

    The weight has the published shape and is always float32.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        self.weight = nnx.Param(jnp.zeros((outputs, inputs, _TAPS)))
        self.bias = nnx.Param(jnp.zeros(outputs))
        self.stride = stride

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map x [B, N, in] to [B, N / stride, out].

        It is one product with the frames that each result reads, side by side, and so needs no library of
        convolutions, which would choose an algorithm on each machine.
        """
        batch, count, inputs = x.shape
        padded = jnp.pad(x, ((0, 0), (1, 1), (0, 0)))
        shifted = [padded[:, first : first + count : self.stride] for first in range(_TAPS)]
        read = jnp.stack(shifted, -1).reshape(batch, -1, inputs * _TAPS)
        weight = self.weight[...].reshape(-1, inputs * _TAPS)
        return dot(read, weight, 1) + self.bias[...]


class EncoderBlock(nnx.Module):
    """Attention and MLP, each applied to the norm of its input and added to it."""

    def __init__(self, config: Any) -> None:
        width, inner = config.d_model, config.encoder_ffn_dim
        self.self_attn = Attention(width, config.encoder_attention_heads)
        self.self_attn_layer_norm = LayerNorm(width, _EPSILON)
        self.fc1 = Linear(width, inner, bias=True)
        self.fc2 = Linear(inner, width, bias=True)
        self.final_layer_norm = LayerNorm(width, _EPSILON)
        self.activation = config.activation_function

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map x [B, N / 2, D] to the same shape."""
        normed, part = self.self_attn_layer_norm(x), self.self_attn
        everything = jnp.full(len(x), x.shape[1], jnp.int32)
        mixed = sentence.attention(
            part.q_proj(normed), part.k_proj(normed), part.v_proj(normed), everything, part.heads
        )
        x = part.out_proj(mixed, residual=x)
        inner = self.fc1(self.final_layer_norm(x), activation=self.activation)
        return self.fc2(inner, residual=x)


class Attention(nnx.Module):
    """The four matrices of an attention with several heads. Keys have no bias: softmax would cancel it."""

    def __init__(self, width: int, heads: int) -> None:
        self.heads = heads
        self.scale = (width // heads) ** -0.5
        self.q_proj = Linear(width, width, bias=True)
        self.k_proj = Linear(width, width, bias=False)
        self.v_proj = Linear(width, width, bias=True)
        self.out_proj = Linear(width, width, bias=True)

    def split(self, x: jax.Array) -> jax.Array:
        """Return the heads of x: [B, T, K, H] of [B, T, D]."""
        return x.reshape(*x.shape[:2], self.heads, -1)


class TextDecoder(nnx.Module):
    """Tokens with learned positions, and blocks that see the text so far and all of the source."""

    def __init__(self, config: Any) -> None:
        width = config.d_model
        self.embed_tokens = Embedding(config.vocab_size, width)
        self.embed_positions = Embedding(config.max_target_positions, width)
        self.layers = nnx.List([DecoderBlock(config) for _ in range(config.decoder_layers)])
        self.layer_norm = LayerNorm(width, _EPSILON)

    def make_cache(self, hidden: jax.Array, positions: int, dtype: str) -> TextCache:
        """Return the cache of texts without tokens, from the encoder's hidden states [B, N / 2, D]."""
        return tuple(block.make_cache(hidden, positions, dtype) for block in self.layers)

    def __call__(
        self, tokens: jax.Array, new: NewTokens, cache: TextCache
    ) -> tuple[jax.Array, TextCache]:
        """Return the hidden states that results need, [B, 1, D] or [B, T, D], and the cache."""
        x = self.embed_tokens(tokens) + self.embed_positions(new.positions)
        layers: list[BlockCache] = []
        for block, layer in zip(self.layers, cache, strict=True):
            x, layer = block(x, new, layer, last=len(layers) == len(cache) - 1)
            layers.append(layer)
        return self.layer_norm(x), tuple(layers)


class DecoderBlock(nnx.Module):
    """Attention to the text, attention to the source and MLP, each added to its input."""

    def __init__(self, config: Any) -> None:
        width, inner, heads = (
            config.d_model,
            config.decoder_ffn_dim,
            config.decoder_attention_heads,
        )
        self.self_attn = Attention(width, heads)
        self.self_attn_layer_norm = LayerNorm(width, _EPSILON)
        self.encoder_attn = Attention(width, heads)
        self.encoder_attn_layer_norm = LayerNorm(width, _EPSILON)
        self.fc1 = Linear(width, inner, bias=True)
        self.fc2 = Linear(inner, width, bias=True)
        self.final_layer_norm = LayerNorm(width, _EPSILON)
        self.activation = config.activation_function

    def make_cache(self, hidden: jax.Array, positions: int, dtype: str) -> BlockCache:
        """Return an empty cache of the text, and the keys and values of the source."""
        part = self.encoder_attn
        keys, values = (
            part.split(product(hidden)).swapaxes(1, 2).astype(dtype)
            for product in (part.k_proj, part.v_proj)
        )
        batch, heads, _, size = keys.shape
        empty = jnp.zeros((batch, heads, positions, size), dtype)
        return (empty, empty), (keys, values)

    def __call__(
        self, x: jax.Array, new: NewTokens, cache: BlockCache, *, last: bool
    ) -> tuple[jax.Array, BlockCache]:
        """Map x [B, T, D] to [B, T, D], or [B, 1, D] in the last block; return it and the cache."""
        text, source = cache
        normed, part = self.self_attn_layer_norm(x), self.self_attn
        query, keys, values = (
            part.split(product(normed)) for product in (part.q_proj, part.k_proj, part.v_proj)
        )
        mixed, text = new.attend(query, keys, values, text, part.scale, last=last)
        x = part.out_proj(mixed, residual=new.wanted(x) if last else x)

        part = self.encoder_attn
        query = part.split(part.q_proj(self.encoder_attn_layer_norm(x)))
        mixed, source = attention_to_all(query, source, new.length, part.scale)
        x = part.out_proj(mixed, residual=x)

        inner = self.fc1(self.final_layer_norm(x), activation=self.activation)
        return self.fc2(inner, residual=x), (text, source)
