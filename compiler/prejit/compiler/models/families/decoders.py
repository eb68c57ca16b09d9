"""The decoder of every family that only writes: one module, and what differs between families as data.

A block is attention and an MLP, each applied to the norm of its input and added to it. Families differ in the
names of their tensors, in their norms, positions, windows, biases and bounds. Logits agree with those of
transformers 5, models/NAME/modeling_NAME.py; family_table.py names the papers.

Shapes: B batch, T new positions, N query heads, K key/value heads, H head size, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from prejit.compiler.models.layers import product_forms, rope
from prejit.compiler.models.layers.attention import NewTokens
from prejit.compiler.models.layers.layer_config import (
    KVCache,
    LayerCache,
    Split,
    empty_cache,
    require,
    unsupported,
)
from prejit.compiler.models.layers.linear import (
    ACTIVATIONS,
    Embedding,
    Linear,
    RMSNorm,
    gated,
    split,
)
from prejit.compiler.models.parameters import part_of, place

Turns = Mapping[rope.Rotary, rope.Turns]
"""Cosines and sines for each way in which layers of the model turn their heads."""


@dataclass(frozen=True)
class DecoderNames:
    """How a family publishes its parts, Llama by default. Names from `attention_norm` on begin at the block.

    Attributes:
        positions: table of learned positions; empty: the family has none.
        qkv: query, keys and values; one name if one matrix holds all.
        head_norms: norms of queries and keys along the head; empty: none.
        after_attention, after_mlp: norms of what is added; empty: none.
        up: gate and up; one name if one matrix holds both, or if the MLP has no gate.
    """

    model: str = "model"
    embedding: str = "embed_tokens"
    positions: str = ""
    layers: str = "layers"
    norm: str = "norm"
    head: str = "lm_head"
    attention_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    head_norms: tuple[str, ...] = ()
    output: str = "self_attn.o_proj"
    after_attention: str = ""
    mlp_norm: str = "post_attention_layernorm"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    after_mlp: str = ""

    @property
    def split(self) -> Split:
        """The layers that a mesh splits."""

        def last(*names: str) -> tuple[str, ...]:
            return tuple(name.rpartition(".")[2] for name in names)

        return Split(
            outputs=last(*self.qkv, *self.up),
            inputs=last(self.output, self.down),
            vocabulary=(self.embedding, self.head),
        )


@dataclass(frozen=True)
class DecoderFamily:
    """Differences between families. The defaults are Llama's. A text is a key of config.json.

    Attributes:
        names: names of the tensors.
        norm: makes a norm from its width and epsilon.
        epsilon: key of the epsilon of norms.
        activation: key of the MLP's activation.
        inner: key of the width inside the MLP; where it is null, the width is four times the model's.
        is_gated: whether the MLP has a gate.
        bias, output_bias, mlp_bias: of query, keys and values, of attention's output, and of the MLP.
        turns: whether heads turn with the position: each as a whole, a part of each, or by the layer's type.
        windows: the layers with a `sliding_window`: none, each, or by the layer's type.
        scale: returns the factor of scores of a layer; None: 1 / sqrt(H).
        score_cap, logit_cap: keys of soft bounds of scores and logits; empty: there is none.
        scales_embedding: whether embeddings are multiplied by sqrt(D).
    """

    names: DecoderNames = DecoderNames()
    norm: Callable[[int, float], nnx.Module] = RMSNorm
    epsilon: str = "rms_norm_eps"
    activation: str = "hidden_act"
    inner: str = "intermediate_size"
    is_gated: bool = True
    bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    turns: Literal["", "whole", "part", "by type"] = "whole"
    windows: Literal["", "each", "by type"] = ""
    scale: Callable[[Any, int], float] | None = None
    score_cap: str = ""
    logit_cap: str = ""
    scales_embedding: bool = False

    def of(self, config: Any, value: bool | str) -> Any:
        """Return a value of this family: that of its key in a configuration, or itself."""
        return getattr(config, value) if isinstance(value, str) else value

    def heads(self, config: Any, context: int | None = None) -> list[Heads]:
        """Return the heads of each layer, in programs for contexts up to `context`.

        Raises:
            CheckpointError: a window or a kind of rotary positions is not supported.
        """
        count, queries = config.num_hidden_layers, config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // queries
        windows: list[int | None] = [None] * count
        if self.windows == "each":
            windows = [_window(config)] * count
        elif self.windows:
            windows = _windows_by_type(config)
        kinds = config.layer_types if self.turns == "by type" else [None] * count
        partial = self.turns == "part"
        rotary: dict[str | None, rope.Rotary | None] = {
            kind: rope.frequencies(config, size, context=context, layer_type=kind, partial=partial)
            if self.turns
            else None
            for kind in dict.fromkeys(kinds)
        }
        return [
            Heads(
                queries,
                getattr(config, "num_key_value_heads", queries),
                size,
                rotary[kind],
                size**-0.5 if self.scale is None else self.scale(config, layer),
                window,
                getattr(config, self.score_cap) if self.score_cap else None,
            )
            for layer, (kind, window) in enumerate(zip(kinds, windows, strict=True))
        ]


@dataclass(frozen=True)
class Heads:
    """The heads of a layer.

    Attributes:
        queries: N.
        keys: K, which divides N.
        size: H.
        rotary: how they turn with the position; None: they do not.
        scale: factor of the scores.
        window: number of tokens that each one sees, itself included; None for all up to its own.
        cap: soft bound of the scores; None for no bound.
    """

    queries: int
    keys: int
    size: int
    rotary: rope.Rotary | None
    scale: float
    window: int | None = None
    cap: float | None = None


class TextDecoder(nnx.Module):
    """A decoder with its language-model head (see protocol.DecoderModel)."""

    def __init__(self, family: DecoderFamily, config: Any, context: int | None) -> None:
        """Build a decoder for contexts up to `context`; None: as long as the model was made for."""
        self.names = family.names
        self.vocab_size: int = config.vocab_size
        self.max_positions: int | None = config.max_position_embeddings
        place(self, family.names.model, DecoderStack(family, config, context))
        if not config.tie_word_embeddings:
            head = Linear(config.hidden_size, config.vocab_size, bias=False)
            place(self, family.names.head, head)
        cap = family.logit_cap
        self.logit_cap: float | None = getattr(config, cap) if cap else None

    @property
    def mesh_split(self) -> Split:
        """The layers that a mesh splits."""
        return self.names.split

    def make_cache(self, rows: int, positions: int, dtype: str) -> KVCache:
        """See DecoderModel."""
        blocks = part_of(part_of(self, self.names.model), self.names.layers)
        heads = blocks[0].heads
        return empty_cache(len(blocks), rows, heads.keys, positions, heads.size, dtype)

    def __call__(
        self,
        tokens: jax.Array,
        start: jax.Array,
        length: jax.Array,
        cache: KVCache,
        *,
        every: bool = False,
    ) -> tuple[jax.Array, KVCache]:
        """See DecoderModel."""
        new = NewTokens(start, length, tokens.shape[1], every)
        model = part_of(self, self.names.model)
        x, cache = model(tokens, new, cache)
        tied = part_of(model, self.names.embedding).logits
        logits = getattr(self, self.names.head, tied)(x if every else x[:, 0])
        if self.logit_cap is not None:
            logits = self.logit_cap * jnp.tanh(logits / self.logit_cap)
        return logits, cache


class DecoderStack(nnx.Module):
    """The decoder without its head: embeddings, blocks and a norm."""

    def __init__(self, family: DecoderFamily, config: Any, context: int | None) -> None:
        names, width = family.names, config.hidden_size
        self.names = names
        place(self, names.embedding, Embedding(config.vocab_size, width))
        if names.positions:
            place(self, names.positions, Embedding(config.max_position_embeddings, width))
        blocks = [Block(family, config, heads) for heads in family.heads(config, context)]
        place(self, names.layers, nnx.List(blocks))
        place(self, names.norm, family.norm(width, getattr(config, family.epsilon)))
        self.scale: float | None = width**0.5 if family.scales_embedding else None

    def __call__(
        self, tokens: jax.Array, new: NewTokens, cache: KVCache
    ) -> tuple[jax.Array, KVCache]:
        """Return the hidden states that results need, [B, 1, D] or [B, T, D], and the cache."""
        blocks = part_of(self, self.names.layers)
        x = part_of(self, self.names.embedding)(tokens)
        if self.scale is not None:
            x = x * self.scale
        if self.names.positions:
            x = x + part_of(self, self.names.positions)(new.positions)
        x = split(x, "data")
        ways = dict.fromkeys(block.heads.rotary for block in blocks if block.heads.rotary)
        turns = {rotary: rope.turns(rotary, new.positions) for rotary in ways}
        layers: list[LayerCache] = []
        for block, layer in zip(blocks, cache, strict=True):
            x, layer = block(x, turns, new, layer, last=len(layers) == len(cache) - 1)
            layers.append(layer)
        return part_of(self, self.names.norm)(x), tuple(layers)


class Block(nnx.Module):
    """Attention over the cache and an MLP, each added to its input."""

    def __init__(self, family: DecoderFamily, config: Any, heads: Heads) -> None:
        names, width = family.names, config.hidden_size
        self.names, self.heads, self.is_gated = names, heads, family.is_gated
        self.activation: str = getattr(config, family.activation)
        inner = getattr(config, family.inner) or 4 * width
        queries, keys = heads.queries * heads.size, heads.keys * heads.size
        bias, output_bias, mlp_bias = (
            family.of(config, value) for value in (family.bias, family.output_bias, family.mlp_bias)
        )
        outputs = [queries, keys, keys] if len(names.qkv) > 1 else [queries + 2 * keys]
        for name, size in zip(names.qkv, outputs, strict=True):
            place(self, name, Linear(width, size, bias=bias))
        place(self, names.output, Linear(queries, width, bias=output_bias))
        fused = 2 if family.is_gated and len(names.up) == 1 else 1
        for name in names.up:
            place(self, name, Linear(width, fused * inner, bias=mlp_bias))
        place(self, names.down, Linear(inner, width, bias=mlp_bias))
        of_width = (names.attention_norm, names.after_attention, names.mlp_norm, names.after_mlp)
        norms = [(name, width) for name in of_width if name]
        for name, size in (*norms, *((name, heads.size) for name in names.head_norms)):
            place(self, name, family.norm(size, getattr(config, family.epsilon)))

    def __call__(
        self, x: jax.Array, turns: Turns, new: NewTokens, layer: LayerCache, *, last: bool
    ) -> tuple[jax.Array, LayerCache]:
        """Map x [B, T, D] to [B, T, D], or [B, 1, D] in the last block; return it and the cache."""
        names, kept = self.names, new.wanted(x) if last else x
        normed = part_of(self, names.attention_norm)(x)
        mixed, layer = self._attend(normed, turns, new, layer, last=last)
        x = self._add(kept, names.output, mixed, names.after_attention)
        inner = self._widen(part_of(self, names.mlp_norm)(x))
        return self._add(x, names.down, inner, names.after_mlp), layer

    def _add(self, x: jax.Array, product: str, inner: jax.Array, norm: str) -> jax.Array:
        """Return x plus a linear layer of `inner`, or plus the norm of that."""
        if norm:
            return x + part_of(self, norm)(part_of(self, product)(inner))
        return part_of(self, product)(inner, residual=x)

    def _attend(
        self, x: jax.Array, turns: Turns, new: NewTokens, layer: LayerCache, *, last: bool
    ) -> tuple[jax.Array, LayerCache]:
        """Map x [B, T, D] to [B, T, N * H], or [B, 1, N * H] if `last`, without the last product."""
        heads, names = self.heads, self.names
        options: dict[str, Any] = {"last": last, "window": heads.window, "cap": heads.cap}
        projected = [part_of(self, name)(x) for name in names.qkv]
        if len(projected) == 1:
            if heads.rotary is None and product_forms.has_kernels():
                packed = projected[0].reshape(*x.shape[:2], -1, heads.size)
                return new.attend_packed(packed, heads.queries, layer, heads.scale, **options)
            ends = [heads.queries * heads.size, (heads.queries + heads.keys) * heads.size]
            projected = _parts(projected[0], ends)
        query, keys, values = (part.reshape(*x.shape[:2], -1, heads.size) for part in projected)
        if len(names.qkv) == 1:
            query, keys, values = (_split_heads(part) for part in (query, keys, values))
        if names.head_norms:
            of_queries, of_keys = (part_of(self, name) for name in names.head_norms)
            query, keys = of_queries(query), of_keys(keys)
        if heads.rotary is not None:
            query, keys = (rope.turn(part, turns[heads.rotary]) for part in (query, keys))
        return new.attend(query, keys, values, layer, heads.scale, **options)

    def _widen(self, x: jax.Array) -> jax.Array:
        """Map x [B, T, D] to the inner values of the MLP."""
        first, *second = (part_of(self, name) for name in self.names.up)
        if not self.is_gated:
            return first(x, activation=self.activation)
        if second:
            return gated(first, second[0], x, self.activation)
        outputs = first(x)
        gate, up = map(_split_heads, _parts(outputs, [outputs.shape[-1] // 2]))
        return ACTIVATIONS[self.activation](gate) * up


def _parts(outputs: jax.Array, ends: list[int]) -> list[jax.Array]:
    """Return the outputs of a fused layer, divided at these places; each part is whole on every device.

    A device's share of the outputs is no set of heads, nor a half with its other half. So the outputs are
    gathered once: without these steps XLA sends parts around, in 9 exchanges a layer for 8 devices.
    """
    gathered = split(_split_heads(outputs), "data")
    return [split(part, "data") for part in jnp.split(gathered, ends, axis=-1)]


def _split_heads(x: jax.Array) -> jax.Array:
    return split(x, "data", None, "tensor")


def _window(config: Any) -> int | None:
    size: int | None = config.sliding_window
    if size is not None and size < 1:
        raise unsupported(config, f"sliding_window: expected null or at least 1, found {size}")
    return size


def _windows_by_type(config: Any) -> list[int | None]:
    """Return the window of each layer, by `layer_types`."""
    kinds = config.layer_types
    for kind in kinds:
        require(config, "layer_types", kind, ["full_attention", "sliding_attention"])
    size = _window(config)
    if size is None and "sliding_attention" in kinds:
        raise unsupported(
            config,
            'sliding_window: expected a number, as layer_types has "sliding_attention", found null',
        )
    return [size if kind == "sliding_attention" else None for kind in kinds]
