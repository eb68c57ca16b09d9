"""Encoder-decoders: T5 and Whisper. Both read a source, and write a text with attention to it.

t5: Raffel et al. 2019, arXiv 1910.10683, section 2.1: relative positions, RMSNorm before each part, no
biases; Shazeer 2020, arXiv 2002.05202: the gated MLP of T5 1.1. T5 1.0 has one table for source, text and
head; T5 1.1 and Flan-T5 have a head of their own.

whisper: Radford et al. 2022, arXiv 2212.04356, section 2.2, an encoder of log-mel spectrograms. Like
transformers' code it masks nothing: silence after the speech is a part of the source, and `scale_embedding`
changes nothing.

Logits agree with those of transformers 5, models/NAME/modeling_NAME.py. Both are an EncoderDecoderModel
(protocol.py).

Shapes: B rows, T new tokens, S positions, N places of a source, K heads, H head size, D model width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from prejit.compiler.models.families import sentence
from prejit.compiler.models.layers.attention import (
    LayerCache,
    NewTokens,
    attention,
    attention_to_all,
    empty_layer,
    stored_rows,
)
from prejit.compiler.models.layers.layer_config import require, unsupported
from prejit.compiler.models.layers.linear import (
    ACTIVATIONS,
    Embedding,
    LayerNorm,
    Linear,
    RMSNorm,
    dot,
    gated,
)
from prejit.compiler.models.parameters import part_of, place
from prejit.runtime.errors import ManifestError

BlockCache = tuple[LayerCache, LayerCache]
"""Keys and values of the text, [B, K, S, W], which new tokens extend, and those of the source, which do not
change."""

TextCache = tuple[BlockCache, ...]
"""One BlockCache for each block of a decoder."""

AttendSource = Callable[[jax.Array, LayerCache], tuple[jax.Array, LayerCache]]
"""Returns attention of queries [B, T, K, H] to a source, and its cache."""

_WHISPER_EPSILON = 1e-5
"""Epsilon of all norms of a Whisper; config.json has none."""

_TAPS, _STRIDE = 3, 2
"""Frames that a convolution reads for one result; frames that the second one advances."""


@dataclass(frozen=True)
class BlockParts:
    """The parts of a block by their published names, and its sizes.

    Attributes:
        own: norm, query, keys, values and output of attention among the block's own places.
        cross: the same of attention to the source; empty: an encoder's block has none.
        mlp: norm, the layer that widens, or two if the first one gates the second, and the one back to D.
        has_biases: whether its layers have biases. Keys have none: softmax would cancel them.
    """

    width: int
    heads: int
    head_size: int
    inner: int
    activation: str
    scale: float
    has_biases: bool
    own: tuple[str, ...]
    cross: tuple[str, ...]
    mlp: tuple[str, ...]


class CrossBlock(nnx.Module):
    """Attention, attention to a source and an MLP, each applied to the norm of its input and added to it."""

    def __init__(self, parts: BlockParts, norm: Callable[[int], nnx.Module]) -> None:
        self.parts = parts
        width, heads = parts.width, parts.heads * parts.head_size
        for first, *inputs, output in filter(None, (parts.own, parts.cross)):
            place(self, first, norm(width))
            for at, name in enumerate(inputs):
                place(self, name, Linear(width, heads, bias=parts.has_biases and at != 1))
            place(self, output, Linear(heads, width, bias=parts.has_biases))
        first, *inputs, output = parts.mlp
        place(self, first, norm(width))
        for name in inputs:
            place(self, name, Linear(width, parts.inner, bias=parts.has_biases))
        place(self, output, Linear(parts.inner, width, bias=parts.has_biases))

    def read(self, x: jax.Array, attend: Callable[..., jax.Array]) -> jax.Array:
        """Map the places of a source, [B, N, D], to [B, N, D].

        `attend` maps query, keys and values, each [B, N, K * H], to the same shape.
        """
        norm, *inputs, output = self.parts.own
        normed = part_of(self, norm)(x)
        mixed = attend(*(part_of(self, name)(normed) for name in inputs))
        return self._widen(part_of(self, output)(mixed, residual=x))

    def write(
        self,
        x: jax.Array,
        new: NewTokens,
        cache: BlockCache,
        attend_source: AttendSource,
        *,
        last: bool,
        bias: jax.Array | None,
    ) -> tuple[jax.Array, BlockCache]:
        """Map x [B, T, D] to [B, T, D], or [B, 1, D] in the last block; return it and the cache."""
        text, source = cache
        norm, *inputs, output = self.parts.own
        normed = part_of(self, norm)(x)
        query, keys, values = (self._heads(name, normed) for name in inputs)
        mixed, text = new.attend(query, keys, values, text, self.parts.scale, last=last, bias=bias)
        x = part_of(self, output)(mixed, residual=new.wanted(x) if last else x)
        norm, query_name, _, _, output = self.parts.cross
        mixed, source = attend_source(self._heads(query_name, part_of(self, norm)(x)), source)
        return self._widen(part_of(self, output)(mixed, residual=x)), (text, source)

    def make_cache(self, hidden: jax.Array, positions: int, dtype: str) -> BlockCache:
        """Return an empty cache of the text, and the keys and values of hidden states [B, N, D]."""
        _, _, *names, _ = self.parts.cross
        parts = self.parts
        source = (stored_rows(self._heads(name, hidden).swapaxes(1, 2), dtype) for name in names)
        text = empty_layer(len(hidden), parts.heads, positions, parts.head_size, dtype)
        return text, tuple(source)

    def _heads(self, name: str, x: jax.Array) -> jax.Array:
        """Return a product of x [B, T, D] as heads [B, T, K, H]."""
        return part_of(self, name)(x).reshape(*x.shape[:2], self.parts.heads, -1)

    def _widen(self, x: jax.Array) -> jax.Array:
        """Return x [B, T, D] plus the MLP of it."""
        norm, *inputs, output = self.parts.mlp
        first, *second = (part_of(self, name) for name in inputs)
        normed, activation = part_of(self, norm)(x), self.parts.activation
        inner = (
            gated(first, second[0], normed, activation)
            if second
            else first(normed, activation=activation)
        )
        return part_of(self, output)(inner, residual=x)


def _written(
    blocks: Sequence[CrossBlock],
    x: jax.Array,
    new: NewTokens,
    cache: TextCache,
    attend_source: AttendSource,
    bias: jax.Array | None = None,
) -> tuple[jax.Array, TextCache]:
    """Return what the blocks of a decoder make of x [B, T, D], and the cache."""
    layers: list[BlockCache] = []
    for block, layer in zip(blocks, cache, strict=True):
        last = len(layers) == len(cache) - 1
        x, layer = block.write(x, new, layer, attend_source, last=last, bias=bias)
        layers.append(layer)
    return x, tuple(layers)


# --- T5 --------------------------------------------------------------------------------------------------


def check_t5(config: Any) -> None:
    """Check the activation, and that a configuration gives relative positions.

    Raises:
        CheckpointError: half of the buckets have distances up to the largest one already, for example.
    """
    key = "dense_act_fn, the last part of feed_forward_proj"
    require(config, key, config.dense_act_fn, ACTIVATIONS)
    exact = config.relative_attention_num_buckets // 2
    if config.relative_attention_max_distance <= exact:
        raise unsupported(
            config,
            f"relative_attention_max_distance: expected more than {exact}, half of "
            f"relative_attention_num_buckets, found {config.relative_attention_max_distance}",
        )


def _t5_parts(config: Any, *, cross: bool) -> BlockParts:
    def attention_names(at: int, module: str) -> tuple[str, ...]:
        parts = (f"{module}.{name}" for name in "qkvo")
        return tuple(f"layer.{at}.{name}" for name in ("layer_norm", *parts))

    widening = ("wi_0", "wi_1") if config.is_gated_act else ("wi",)
    mlp = ("layer_norm", *(f"DenseReluDense.{name}" for name in (*widening, "wo")))
    return BlockParts(
        config.d_model,
        config.num_heads,
        config.d_kv,
        config.d_ff,
        config.dense_act_fn,
        scale=1.0,
        has_biases=False,
        own=attention_names(0, "SelfAttention"),
        cross=attention_names(1, "EncDecAttention") if cross else (),
        mlp=tuple(f"layer.{2 if cross else 1}.{name}" for name in mlp),
    )


_T5_BIAS = "layer.0.SelfAttention.relative_attention_bias"
"""The tensor of relative positions in the first block of a stack, which all its blocks use."""


class T5(nnx.Module):
    """A T5 with its language-model head. Its cache holds the lengths of the sources, int32 [B], too."""

    def __init__(self, config: Any) -> None:
        self.vocab_size: int = config.vocab_size
        self.max_positions: int | None = None
        self.shared = Embedding(config.vocab_size, config.d_model)
        norm = partial(RMSNorm, epsilon=config.layer_norm_epsilon)
        table = (config.relative_attention_num_buckets, config.num_heads)
        farthest = config.relative_attention_max_distance
        for stack, count in (
            ("encoder", config.num_layers),
            ("decoder", config.num_decoder_layers),
        ):
            causal = stack == "decoder"
            parts = _t5_parts(config, cross=causal)
            blocks = [CrossBlock(parts, norm) for _ in range(count)]
            place(blocks[0], _T5_BIAS, RelativeBias(*table, farthest, causal=causal))
            place(self, f"{stack}.block", nnx.List(blocks))
            place(self, f"{stack}.final_layer_norm", norm(config.d_model))
        self.tied_scale: float = config.d_model**-0.5
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.d_model, config.vocab_size, bias=False)

    def source(self, rows: int, size: int) -> jax.ShapeDtypeStruct:
        """Return the shape and dtype of B sources of N tokens: int32 [B, N]."""
        return jax.ShapeDtypeStruct((rows, size), jnp.int32)

    def encode(
        self, source: jax.Array, length: jax.Array, positions: int, dtype: str
    ) -> tuple[jax.Array, TextCache]:
        """See EncoderDecoderModel."""
        blocks, (rows, count) = self.encoder.block, source.shape
        bias = part_of(blocks[0], _T5_BIAS)(jnp.arange(count)[None], count)
        heads = (rows, count, blocks[0].parts.heads, -1)

        def attend(*projected: jax.Array) -> jax.Array:
            query, keys, values = (part.reshape(heads) for part in projected)
            layer = keys.swapaxes(1, 2), values.swapaxes(1, 2)
            return attention(query, layer, _last(length), scale=1.0, bias=bias)

        x = self.shared(source)
        for block in blocks:
            x = block.read(x, attend)
        x, decoder = self.encoder.final_layer_norm(x), self.decoder.block
        return length, tuple(block.make_cache(x, positions, dtype) for block in decoder)

    def __call__(
        self,
        tokens: jax.Array,
        start: jax.Array,
        length: jax.Array,
        cache: tuple[jax.Array, TextCache],
        *,
        every: bool = False,
    ) -> tuple[jax.Array, tuple[jax.Array, TextCache]]:
        """See EncoderDecoderModel."""
        new = NewTokens(start, length, tokens.shape[1], every)
        blocks, (source_length, layers) = self.decoder.block, cache
        bias = part_of(blocks[0], _T5_BIAS)(new.positions, layers[0][0][0].shape[2])

        def attend_source(query: jax.Array, source: LayerCache) -> tuple[jax.Array, LayerCache]:
            return attention(query, source, _last(source_length), scale=1.0), source

        x, layers = _written(blocks, self.shared(tokens), new, layers, attend_source, bias)
        x = self.decoder.final_layer_norm(x)
        x, cache = x if every else x[:, 0], (source_length, layers)
        if hasattr(self, "lm_head"):
            return self.lm_head(x), cache
        return self.shared.logits(x * self.tied_scale), cache


class RelativeBias(nnx.Module):
    """A table of each head's bias for each bucket of distances; it is float32 in every stored dtype."""

    def __init__(self, count: int, heads: int, farthest: int, *, causal: bool) -> None:
        self.weight = nnx.Param(jnp.zeros((count, heads)))
        self.farthest = farthest
        self.causal = causal

    def __call__(self, positions: jax.Array, slots: int) -> jax.Array:
        """Return the bias of the scores of queries at int32 [..., T] with all slots: [..., T, K, S]."""
        # no two places are farther apart, or all those share a bucket
        far = min(self.farthest, slots)
        count = self.weight.shape[0]
        index = buckets(np.arange(-far, far + 1), count, self.farthest, causal=self.causal)
        of_distance = self.weight[...][index]
        distance = jnp.arange(slots) - positions[..., None]
        bias: jax.Array = of_distance[jnp.clip(distance, -far, far) + far]
        return bias.swapaxes(-1, -2)


def buckets(
    distance: np.ndarray[Any, Any], count: int, farthest: int, *, causal: bool
) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return the bucket of each distance: Raffel et al. 2019, section 2.1, as modeling_t5.py computes it.

    Half of the buckets of a direction have one distance each, the others are logarithmic. Powers of 2 can lie
    exactly at a border, where rounding decides. So the steps are torch's, in float32, with a logarithm that
    is the same on every machine: the one of float64, rounded.

    Args:
        distance: integers, the position that is seen minus the one that sees it.
        count: the number of buckets.
        farthest: the distance from which on all share a bucket.
        causal: whether all buckets are for positions before; otherwise half of them are for those after.

    Returns:
        int32, 0 to count - 1, in the shape of distance.
    """
    first = np.zeros_like(distance)
    if causal:
        distance = np.maximum(-distance, 0)
    else:
        count //= 2
        first, distance = np.where(distance > 0, count, 0), np.abs(distance)
    exact = count // 2
    ratio = np.maximum(distance, exact).astype(np.float32) / np.float32(exact)
    logarithm = np.log(ratio.astype(np.float64)).astype(np.float32)
    scaled = logarithm / np.float32(math.log(farthest / exact)) * np.float32(count - exact)
    large = np.minimum(exact + scaled.astype(np.int32), count - 1)
    return np.asarray(first + np.where(distance < exact, distance, large), np.int32)


def _last(length: jax.Array) -> jax.Array:
    """Return the last valid place of each source, [B, 1]. An idle row of length 0 has one, not NaN."""
    return jnp.maximum(length - 1, 0)[:, None]


# --- Whisper ---------------------------------------------------------------------------------------------


def _whisper_parts(config: Any, stack: str) -> BlockParts:
    def attention_names(module: str) -> tuple[str, ...]:
        parts = (f"{module}.{name}_proj" for name in ("q", "k", "v", "out"))
        return (f"{module}_layer_norm", *parts)

    heads = getattr(config, f"{stack}_attention_heads")
    size = config.d_model // heads
    return BlockParts(
        config.d_model,
        heads,
        size,
        getattr(config, f"{stack}_ffn_dim"),
        config.activation_function,
        scale=size**-0.5,
        has_biases=True,
        own=attention_names("self_attn"),
        cross=attention_names("encoder_attn") if stack == "decoder" else (),
        mlp=("final_layer_norm", "fc1", "fc2"),
    )


class Whisper(nnx.Module):
    """A Whisper, whose head is the embedding."""

    def __init__(self, config: Any) -> None:
        width, norm = config.d_model, partial(LayerNorm, epsilon=_WHISPER_EPSILON)
        self.vocab_size: int = config.vocab_size
        self.max_positions: int | None = config.max_target_positions
        self.mel_bins: int = config.num_mel_bins
        self.frames: int = _STRIDE * config.max_source_positions
        for stack, positions, count in (
            ("encoder", config.max_source_positions, config.encoder_layers),
            ("decoder", config.max_target_positions, config.decoder_layers),
        ):
            parts = _whisper_parts(config, stack)
            place(self, f"model.{stack}.embed_positions", Embedding(positions, width))
            blocks = nnx.List([CrossBlock(parts, norm) for _ in range(count)])
            place(self, f"model.{stack}.layers", blocks)
            place(self, f"model.{stack}.layer_norm", norm(width))
        place(self, "model.encoder.conv1", Convolution(config.num_mel_bins, width, 1))
        place(self, "model.encoder.conv2", Convolution(width, width, _STRIDE))
        place(self, "model.decoder.embed_tokens", Embedding(config.vocab_size, width))

    def source(self, rows: int, size: int) -> jax.ShapeDtypeStruct:
        """Return the shape of B log-mel spectrograms: float32 [B, mel bins, N].

        Raises:
            ManifestError: the model was made for another number of frames.
        """
        if size != self.frames:
            raise ManifestError(
                f"generate.source: expected {self.frames} frames of a spectrogram, which is {_STRIDE} * "
                f"max_source_positions of the model's config.json; found {size}",
                hint=f"give source = [{self.frames}], and pad the sound with silence to that length",
            )
        return jax.ShapeDtypeStruct((rows, self.mel_bins, size), jnp.float32)

    def encode(self, source: jax.Array, length: jax.Array, positions: int, dtype: str) -> TextCache:
        """See EncoderDecoderModel. `length` changes nothing, because a Whisper masks no part of its source.

        Raises:
            ManifestError: as `source`.
        """
        self.source(len(source), source.shape[2])
        blocks = self.model.decoder.layers
        x = self.hidden(source)
        return tuple(block.make_cache(x, positions, dtype) for block in blocks)

    def hidden(self, source: jax.Array) -> jax.Array:
        """Return what the encoder says of spectrograms [B, mel bins, N]: [B, N / 2, width]."""
        encoder = self.model.encoder
        x = jax.nn.gelu(encoder.conv1(source.swapaxes(1, 2)), approximate=False)
        x = jax.nn.gelu(encoder.conv2(x), approximate=False)
        x = x + encoder.embed_positions(jnp.arange(x.shape[1]))
        everything = jnp.full(len(x), x.shape[1], jnp.int32)
        for block in encoder.layers:
            rounds = part_of(block, block.parts.own[1]).is_narrow
            heads = block.parts.heads
            attend = partial(sentence.attention, length=everything, heads=heads, rounds=rounds)
            x = block.read(x, attend)
        return encoder.layer_norm(x)

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
        new, decoder = NewTokens(start, length, tokens.shape[1], every), self.model.decoder
        x = decoder.embed_tokens(tokens) + decoder.embed_positions(new.positions)
        scale = decoder.layers[0].parts.scale
        x, cache = _written(
            decoder.layers,
            x,
            new,
            cache,
            lambda query, source: attention_to_all(query, source, length, scale),
        )
        x = decoder.layer_norm(x)
        return decoder.embed_tokens.logits(x if every else x[:, 0]), cache


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
