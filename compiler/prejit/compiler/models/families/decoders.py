"""The decoder of every family that only writes: one module, and what differs between families as data.

A block is attention and an MLP, or a mixture of experts, each applied to the norm of its input and added to
it. A layer with a state may take the place of attention, or stand beside it. Families differ in the names of
their tensors, in their norms, positions, windows, biases, factors and bounds. Logits agree with those of
transformers 5, models/NAME/modeling_NAME.py; decoder_table.py names the papers.

Shapes: B batch, T new positions, N query heads, K key/value heads, H head size, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from prejit.compiler.models.families import decoder_parts
from prejit.compiler.models.families.decoder_family import (
    NO_HEADS,
    DecoderFamily,
    Heads,
    MixtureSettings,
    StateLayer,
)
from prejit.compiler.models.families.latent_attention import LatentAttention
from prejit.compiler.models.layers import kernel_calls, rope
from prejit.compiler.models.layers.attention import (
    HeadChange,
    KVCache,
    LayerCache,
    NewTokens,
    empty_layer,
)
from prejit.compiler.models.layers.linear import (
    ACTIVATIONS,
    XIELU,
    Embedding,
    Linear,
    RMSNorm,
    gated,
    split,
)
from prejit.compiler.models.parameters import part_of, place

KeysValues = tuple[jax.Array, jax.Array]
"""Keys and values of new tokens, each float32 [B, T, K, H]."""

Turns = Mapping[rope.Rotary, rope.Turns]
"""Angles for each way in which layers of the model turn their heads."""


class PlacedImages(NamedTuple):
    """Embeddings of images that take the place of those of tokens.

    All tokens of an image see each other.

    Attributes:
        embeddings: float32 [B, T, D].
        ends: int32 [B, T], the position of the last token of the token's image; -1: it is text.
    """

    embeddings: jax.Array
    ends: jax.Array


class TextDecoder(nnx.Module):
    """A decoder with its language-model head (see protocol.DecoderModel)."""

    def __init__(self, family: DecoderFamily, config: Any, context: int | None) -> None:
        """Build a decoder for contexts up to `context`; None: as long as the model was made for."""
        self.names = family.names
        others = (family.experts, family.states, family.layer_heads)
        if not any(others):  # those that have one are not split over devices
            self.mesh_split = family.names.split
        self.keeps_latents = family.is_latent
        self.vocab_size: int = config.vocab_size
        self.max_positions: int | None = getattr(config, "max_position_embeddings", None)
        place(self, family.names.model, DecoderStack(family, config, context))
        if not config.tie_word_embeddings:
            head = Linear(
                config.hidden_size, config.vocab_size, bias=family.of(config, family.head_bias)
            )
            place(self, family.names.head, head)
        cap = family.logit_cap
        self.logit_cap: float | None = getattr(config, cap) if cap else None
        scale = family.logit_scale
        self.logit_scale: float | None = None if scale is None else scale(config)

    def make_cache(self, rows: int, positions: int, dtype: str) -> KVCache:
        """See DecoderModel."""
        blocks = part_of(part_of(self, self.names.model), self.names.layers)
        return tuple(block.make_cache(rows, positions, dtype) for block in blocks)

    def __call__(
        self,
        tokens: jax.Array,
        start: jax.Array,
        length: jax.Array,
        cache: KVCache,
        *,
        every: bool = False,
        images: PlacedImages | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """See DecoderModel. `images` are those among the new tokens, of a model that reads images."""
        new = NewTokens(start, length, tokens.shape[1], every)
        model = part_of(self, self.names.model)
        x, cache = model(tokens, new, cache, images)
        tied = part_of(model, self.names.embedding).logits
        logits = getattr(self, self.names.head, tied)(x if every else x[:, 0])
        if self.logit_scale is not None:
            logits = logits * self.logit_scale
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
            rows = family.unused_positions + config.max_position_embeddings
            place(self, names.positions, Embedding(rows, width))
        each = enumerate(family.heads(config, context))
        blocks = [Block(family, config, heads, layer) for layer, heads in each]
        place(self, names.layers, nnx.List(blocks))
        self.layer_embeddings = decoder_parts.place_layer_tables(self, family, config)
        # Layers behind it read keys that are there: they compute what results need, as the last one does.
        self.last_of_all_tokens = max(
            n for n, block in enumerate(blocks) if block.key_source is None
        )
        place(self, names.norm, family.norm(width, family.of(config, family.epsilon)))
        scale = family.embedding_scale
        self.scale: float | None = None if scale is None else scale(config)
        self.unused_positions = family.unused_positions
        self.norms_embeddings = family.norms_embeddings

    def __call__(
        self, tokens: jax.Array, new: NewTokens, cache: KVCache, images: PlacedImages | None = None
    ) -> tuple[jax.Array, KVCache]:
        """Return the hidden states that results need, [B, 1, D] or [B, T, D], and the cache."""
        blocks = part_of(self, self.names.layers)
        x = part_of(self, self.names.embedding)(tokens)
        if self.scale is not None:
            x = x * self.scale
        if images is not None:
            x = jnp.where((images.ends >= 0)[..., None], images.embeddings, x)
            new = replace(new, ends=jnp.maximum(images.ends, new.positions))
        if self.names.positions:
            positions = new.positions + self.unused_positions
            x = x + part_of(self, self.names.positions)(positions)
        if self.norms_embeddings:
            x = part_of(self, self.names.norm)(x)
        x = split(x, "data")
        own = decoder_parts.layer_vectors(self, tokens, x) if self.layer_embeddings else None
        ways = dict.fromkeys(block.heads.rotary for block in blocks if block.heads.rotary)
        turns = {rotary: rope.turns(rotary, new.positions) for rotary in ways}
        layers = [*cache]
        reads_others = any(block.key_source is not None for block in blocks)
        kept: dict[int, KeysValues] | None = {} if reads_others else None
        for number, block in enumerate(blocks):
            last, at = number >= self.last_of_all_tokens, number
            if block.key_source is not None:
                at = block.key_source
                turns = {rotary: rope.turns(rotary, new.wanted(new.positions)) for rotary in ways}
            x, layers[at] = block(x, turns, new, layers[at], kept, last=last)
            if own is not None:
                each = own[:, :, number]
                x = decoder_parts.with_layer_vectors(block, x, new.wanted(each) if last else each)
            if self.names.block_scale:
                x = x * part_of(block, self.names.block_scale)[...]
        return part_of(self, self.names.norm)(x), tuple(layers)


class Block(nnx.Module):
    """Attention over the cache or a layer with a state, and an MLP, each added to its input."""

    def __init__(self, family: DecoderFamily, config: Any, heads: Heads, layer: int) -> None:
        names, width = family.names, config.hidden_size
        self.names, self.heads, self.is_gated = names, heads, family.is_gated
        self.number, self.key_source = layer, family.key_source(config, layer)
        self.norms_values, owned = family.norms_values, 3 if family.has_values(config, layer) else 2
        self.qkv = names.qkv[: 1 if self.key_source is not None else owned]
        self.norms_turned = family.norms_turned(config, layer)
        self.query_norm = names.head_norms[0] if names.head_norms else ""
        self.norms_heads, self.has_qkv_by_head = family.norms_heads, family.has_qkv_by_head
        self.is_parallel: bool = family.of(config, family.is_parallel)
        self.factors = family.factors(config)
        self.activation: str = getattr(config, family.activation) if family.activation else "silu"
        self.has_xielu = self.activation == "xielu"
        self.clip: float | None = getattr(config, family.clip) if family.clip else None
        self.is_latent, self.gates_attention = family.is_latent, family.gates_attention
        self.layer_embeddings = family.layer_embeddings(config)
        self.feeds = family.feeds(config, layer)
        self.has_state = family.has_state(config, layer)
        if self.has_state and family.states is not None:
            state, bias = family.states.make(config), family.of(config, family.states.bias)
            place(self, names.state, state)
            place(self, names.state_output, Linear(state.outputs, width, bias=bias))
        self.attends = heads != NO_HEADS
        if self.attends:
            self._place_attention(family, config)
        self.mixture: MixtureSettings | None = None
        self.has_shared = self.has_latent = False
        if self.layer_embeddings:
            decoder_parts.place_layer_products(self, family, config)
        if names.block_scale:
            place(self, names.block_scale, nnx.Param(jnp.ones(1)))
        self.mixes = self.has_state or self.attends
        norms = [names.attention_norm, names.after_attention] if self.mixes else []
        if self.feeds:
            self._place_feed(family, config, layer)
            norms += [names.mlp_norm, names.after_mlp]
        for name in norms:
            if name:
                place(self, name, family.norm(width, family.of(config, family.epsilon)))

    def make_cache(self, rows: int, positions: int, dtype: str) -> LayerCache:
        """Return what the layer keeps of texts without a token: its state, then its keys and values."""
        state = self._state.make_cache(rows) if self.has_state else ()
        if not self.attends:
            return state
        heads = self.heads
        if self.key_source is not None:
            return ()
        return (*state, *empty_layer(rows, heads.keys, positions, heads.size, dtype))

    @property
    def _state(self) -> StateLayer:
        return part_of(self, self.names.state)

    def _place_feed(self, family: DecoderFamily, config: Any, layer: int) -> None:
        if family.experts is not None and family.experts.layers(config, layer):
            self.mixture = decoder_parts.place_experts(self, family, family.experts, config)
            return
        inner, bias = family.inner_width(config, layer), family.of(config, family.mlp_bias)
        if self.has_xielu:
            place(self, family.names.activation, XIELU())
        self.place_mlp(family.names.up, family.names.down, inner, config.hidden_size, bias)

    def _place_attention(self, family: DecoderFamily, config: Any) -> None:
        names, heads, width = self.names, self.heads, config.hidden_size
        queries, keys = heads.queries * heads.size, heads.keys * heads.size
        bias = family.of(config, family.bias)
        if self.is_latent:
            place(self, names.attention, LatentAttention(config))
            queries = heads.queries * config.v_head_dim
        else:
            asked = 2 * queries if self.gates_attention else queries
            outputs = [asked, keys, keys] if len(names.qkv) > 1 else [queries + 2 * keys]
            for name, size in zip(self.qkv, outputs, strict=False):
                place(self, name, Linear(width, size, bias=bias))
        if family.output_bias is not None:
            bias = family.of(config, family.output_bias)
        place(self, names.output, Linear(queries, width, bias=bias))
        if names.attention_gate:
            gates = heads.queries if family.gates_heads else queries
            place(self, names.attention_gate, Linear(width, gates, bias=False))
        if names.sinks:
            place(self, names.sinks, nnx.Param(jnp.zeros(heads.queries)))
        of_heads: list[Any] = [heads.size] * 2
        if family.norms_heads == "all":
            of_heads = [queries, keys]
        elif family.norms_heads == "own":
            of_heads = [(heads.queries, heads.size), (heads.keys, heads.size)]
        epsilon, has_keys = family.of(config, family.epsilon), self.key_source is None
        for name, size in zip(names.head_norms[: 2 if has_keys else 1], of_heads, strict=False):
            place(self, name, family.norm(size, epsilon))
        if self.norms_turned:
            self.turned_norm = RMSNorm(heads.size, epsilon, scale=False)
        if family.norms_values:
            self.values_norm = RMSNorm(heads.size, epsilon, scale=False)

    def place_mlp(
        self, names: tuple[str, ...], down: str, inner: int, width: int, bias: bool
    ) -> None:
        """Put the products of an MLP there."""
        fused = 2 if self.is_gated and len(names) == 1 else 1
        for name in names:
            place(self, name, Linear(width, fused * inner, bias=bias))
        place(self, down, Linear(inner, width, bias=bias))

    def __call__(
        self,
        x: jax.Array,
        turns: Turns,
        new: NewTokens,
        layer: LayerCache,
        kept: dict[int, KeysValues] | None,
        *,
        last: bool,
    ) -> tuple[jax.Array, LayerCache]:
        """Map x [B, T, D] to [B, T, D], or [B, 1, D] in the last block; return it and the cache.

        `layer` is the cache of the layer whose keys it reads. `kept` has the new keys and values of earlier
        layers, by number, and gets those of this one; None: no layer reads another's.
        """
        names, factors = self.names, self.factors
        whole = new.wanted(x) if last else x
        normed = self.normed(x, names.attention_norm) if self.mixes else x
        x = whole
        state: LayerCache = ()
        if self.has_state:
            arrays = len(layer) - (2 if self.attends else 0)
            mixed, state = self._state(normed, new, layer[:arrays], last=last)
            x = self._add(x, names.state_output, mixed, names.after_attention, factors.state)
            layer = layer[arrays:]
        if self.attends:
            read = normed if factors.attended == 1 else normed * factors.attended
            mixed, layer = self._attend(read, turns, new, layer, kept, last=last)
            x = self._add(x, names.output, mixed, names.after_attention, factors.attention)
        layer = (*state, *layer)
        if not self.feeds:
            return x, layer
        if not self.is_parallel:
            read = self.normed(x, names.mlp_norm)
        elif names.mlp_norm:
            read = self.normed(whole, names.mlp_norm)
        else:
            read = new.wanted(normed) if last else normed
        if self.mixture is not None:
            mixed = decoder_parts.mixed(self, self.mixture, read, x)
            return self._joined(x, mixed, names.after_mlp, factors.mlp), layer
        inner = self.widened(read, names.up)
        return self._add(x, names.down, inner, names.after_mlp, factors.mlp), layer

    def normed(self, x: jax.Array, name: str) -> jax.Array:
        """Return the norm of x; x itself for an empty name."""
        return part_of(self, name)(x) if name else x

    def _add(
        self, x: jax.Array, product: str, inner: jax.Array, norm: str, factor: float = 1.0
    ) -> jax.Array:
        """Return x plus a linear layer of `inner`, or plus the norm of that, times the factor."""
        if not norm and factor == 1:
            return part_of(self, product)(inner, residual=x)
        return self._joined(x, part_of(self, product)(inner), norm, factor)

    def _joined(self, x: jax.Array, y: jax.Array, norm: str, factor: float) -> jax.Array:
        """Return x plus y, or plus the norm of y, times the factor."""
        y = self.normed(y, norm)
        return x + (y if factor == 1 else y * factor)

    def _attend(
        self,
        x: jax.Array,
        turns: Turns,
        new: NewTokens,
        layer: LayerCache,
        kept: dict[int, KeysValues] | None = None,
        *,
        last: bool,
    ) -> tuple[jax.Array, LayerCache]:
        """Map x [B, T, D] to [B, T, N * H], or [B, 1, N * H] if `last`, without the last product."""
        heads, names = self.heads, self.names
        if self.is_latent:
            assert heads.rotary is not None
            attend: LatentAttention = part_of(self, names.attention)
            return attend(x, turns[heads.rotary], new, layer, heads.scale, last=last)
        options: dict[str, Any] = {"last": last, "window": heads.window, "cap": heads.cap}
        if heads.chunk is not None:
            options["chunk"] = heads.chunk
        projected = [part_of(self, name)(x) for name in self.qkv]
        if self.key_source is not None and kept is not None:
            query = self.normed(projected[0].reshape(*x.shape[:2], -1, heads.size), self.query_norm)
            if heads.rotary is not None:
                query = rope.turn(query, turns[heads.rotary])
            return new.attend(query, *kept[self.key_source], layer, heads.scale, **options)
        if self.clip is not None:
            projected = [jnp.clip(part, -self.clip, self.clip) for part in projected]
        if self.has_qkv_by_head:
            by_head = split(projected[0].reshape(*x.shape[:2], heads.keys, -1), *_HEADS)
            queries = heads.queries // heads.keys * heads.size
            projected = jnp.split(by_head, [queries, queries + heads.size], axis=-1)
        elif len(projected) == 1:
            if heads.rotary is None and kernel_calls.has_kernels():
                packed = projected[0].reshape(*x.shape[:2], -1, heads.size)
                return new.attend_packed(packed, heads.queries, layer, heads.scale, **options)
            ends = [heads.queries * heads.size, (heads.queries + heads.keys) * heads.size]
            projected = _parts(projected[0], ends)
        gate: jax.Array | None = None
        if self.gates_attention:
            by_head = projected[0].reshape(*x.shape[:2], heads.queries, -1)
            projected[0], gate = jnp.split(by_head, 2, axis=-1)
        elif names.attention_gate:
            gate = part_of(self, names.attention_gate)(x)
        if self.norms_heads == "all":
            projected[:2] = self._normed_heads(*projected[:2])
        if len(projected) == 2:  # values are keys
            projected.append(projected[1])
        query, keys, values = (part.reshape(*x.shape[:2], -1, heads.size) for part in projected)
        if len(names.qkv) == 1:
            query, keys, values = (split(part, *_HEADS) for part in (query, keys, values))
        keys = keys if self.factors.key == 1 else keys * self.factors.key
        change = self._change(turns, new, kept)
        if self.norms_heads in ("each", "own") and not (change and change.norms):
            query, keys = self._normed_heads(query, keys)
        if heads.rotary is not None and change is None:
            turned = turns[heads.rotary]
            query, keys = (rope.turn(part, turned) for part in (query, keys))
            query = query if turned.growth is None else query * turned.growth
        if self.norms_heads == "turned":
            query, keys = self._normed_heads(query, keys)
        if self.norms_turned:
            query, keys = self.turned_norm(query), self.turned_norm(keys)
        if self.norms_values:
            values = self.values_norm(values)
        if kept is not None:
            kept[self.number] = keys, values
        if names.sinks:
            options["sinks"] = part_of(self, names.sinks)[...]
        if change is not None:
            options["change"] = change
        mixed, layer = new.attend(query, keys, values, layer, heads.scale, **options)
        if gate is None:
            return mixed, layer
        gate = jax.nn.sigmoid(new.wanted(gate) if last else gate)
        of_heads = (*mixed.shape[:2], heads.queries, -1)
        return (mixed.reshape(of_heads) * gate.reshape(of_heads)).reshape(mixed.shape), layer

    def _change(
        self, turns: Turns, new: object, kept: dict[int, KeysValues] | None
    ) -> HeadChange | None:
        """Return what the kernel of attention does with queries and keys itself; None: nothing."""
        rotary = self.heads.rotary
        turns_last = not self.norms_turned and self.norms_heads != "turned"
        if not (
            kernel_calls.has_kernels() and isinstance(new, NewTokens) and rotary and turns_last
        ):
            return None
        if kept is not None or turns[rotary].growth is not None:  # others read them
            return None
        each = self.names.head_norms if self.norms_heads == "each" else ()
        norms = tuple(part_of(self, name) for name in each)
        are_plain = all(isinstance(norm, RMSNorm) for norm in norms)
        return HeadChange(turns[rotary], norms if are_plain else ())

    def _normed_heads(self, query: jax.Array, keys: jax.Array) -> list[jax.Array]:
        """Return the norms of queries and keys; themselves if the family has no such norms."""
        names = self.names.head_norms or ("", "")
        return [self.normed(x, name) for x, name in zip((query, keys), names, strict=True)]

    def widened(self, x: jax.Array, names: tuple[str, ...]) -> jax.Array:
        """Map x [B, T, D] to the inner values of an MLP."""
        first, *second = (part_of(self, name) for name in names)
        if self.has_xielu:
            xielu: XIELU = part_of(self, self.names.activation)
            return xielu(first(x))
        if not self.is_gated:
            return first(x, activation=self.activation)
        if second and self.factors.gate == 1:
            return gated(first, second[0], x, self.activation)
        if second:
            gate = first(x) * self.factors.gate
            return ACTIVATIONS[self.activation](gate) * second[0](x)
        outputs = first(x)
        gate, up = (split(x, *_HEADS) for x in _parts(outputs, [outputs.shape[-1] // 2]))
        return ACTIVATIONS[self.activation](gate) * up


_HEADS = ("data", None, "tensor")
"""The axes of a mesh that split [B, T, N, H], or [B, T, N * H]."""


def _parts(outputs: jax.Array, ends: list[int]) -> list[jax.Array]:
    """Return the outputs of a fused layer, divided at these places; each part is whole on every device.

    A device's share of the outputs is no set of heads, nor a half with its other half. So the outputs are
    gathered once: without these steps XLA sends parts around, in 9 exchanges a layer for 8 devices.
    """
    gathered = split(split(outputs, *_HEADS), "data")
    return [split(part, "data") for part in jnp.split(gathered, ends, axis=-1)]
