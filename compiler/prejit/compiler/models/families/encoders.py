"""The transformer of BERT and its relatives, and its heads that score: what differs between families is data.

Only the transformer of a checkpoint is read: heads of pretraining, and poolers, which no embedding of
sentence-transformers uses, are ignored. Every token belongs to the first segment, as when one sentence is
tokenized; a model that scores pairs of texts is given the segments. encoder_table.py names the papers.

Scores of texts are logits, as transformers' XForSequenceClassification returns them; the runtime applies the
activation. models/NAME/modeling_NAME.py of transformers 5 has the head of each family.

Shapes: B batch, T tokens, N heads, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
from flax import nnx

from prejit.compiler.models.families.sentence import (
    POOLING,
    Parts,
    WholeEncoder,
    attention,
    biased_attention,
    places,
    product,
)
from prejit.compiler.models.layers.layer_config import require
from prejit.compiler.models.layers.linear import ACTIVATIONS, Embedding, LayerNorm
from prejit.compiler.models.parameters import part_of, place

_ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {**ACTIVATIONS, "tanh": jnp.tanh}
"""Activations of heads that score, by name."""


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
        has_positions: whether embeddings have a table of positions.
        padding: key of the id of the padding token, or the id. Positions begin behind that id, and the token
            takes none itself. None: positions begin at 0.
        narrow: key of the width of embeddings, which a linear layer widens if it is not the model's; empty:
            it is.
        shared: makes the modules that all layers use, by their names; None: there are none.
        block: the class of layers; None: EncoderBlock.
    """

    names: EncoderNames = EncoderNames()
    activation: str = "hidden_act"
    inner: str = "intermediate_size"
    epsilon: str | float = "layer_norm_eps"
    has_segments: bool = True
    has_positions: bool = True
    padding: str | int | None = None
    narrow: str = ""
    shared: Callable[[Any], dict[str, nnx.Module]] | None = None
    block: type[EncoderBlock] | None = None

    def norm(self, config: Any, width: int) -> LayerNorm:
        """Return a norm of a width."""
        epsilon = getattr(config, self.epsilon) if isinstance(self.epsilon, str) else self.epsilon
        return LayerNorm(width, epsilon)


class TextEncoder(nnx.Module):
    """The transformer (see sentence.Transformer). Parameters have the names of the published tensors."""

    final: tuple[nnx.Module, ...] = ()

    def __init__(self, family: EncoderFamily, config: Any) -> None:
        self.embeddings = Embeddings(family, config)
        self.name = family.names.layers
        self.is_narrow = self.embeddings.width != config.hidden_size
        if self.is_narrow:
            self.embeddings_project = product(self.embeddings.width, config.hidden_size)
        block = family.block or EncoderBlock
        blocks = [block(family, config) for _ in range(config.num_hidden_layers)]
        place(self, self.name, nnx.List(blocks))
        shared = family.shared(config) if family.shared else {}
        self.names_of_shared = tuple(shared)
        for name, part in shared.items():
            place(self, name, part)

    @property
    def packs(self) -> bool:
        """See Transformer: biases of distances have no form that reads sentences apart."""
        return not self.names_of_shared

    @property
    def embedding(self) -> tuple[nnx.Module, ...]:
        """See Transformer."""
        return (self.embeddings, *([self.embeddings_project] if self.is_narrow else ()))

    @property
    def blocks(self) -> nnx.List[EncoderBlock]:
        """See Transformer."""
        return part_of(self, self.name)

    @property
    def shared(self) -> tuple[nnx.Module, ...]:
        """See Transformer."""
        return tuple(part_of(self, name) for name in self.names_of_shared)


class Embeddings(nnx.Module):
    """Tokens, positions and segments, summed and normalized."""

    def __init__(self, family: EncoderFamily, config: Any) -> None:
        width = getattr(config, family.narrow or "hidden_size")
        self.width: int = width
        self.word_embeddings = Embedding(config.vocab_size, width)
        if family.has_positions:
            self.position_embeddings = Embedding(config.max_position_embeddings, width)
        if family.has_segments and config.type_vocab_size:
            self.token_type_embeddings = Embedding(config.type_vocab_size, width)
        self.LayerNorm = family.norm(config, width)
        padding = family.padding
        self.padding: int | None = getattr(config, padding) if isinstance(padding, str) else padding

    def __call__(
        self, tokens: jax.Array, segments: jax.Array | None = None, length: jax.Array | None = None
    ) -> jax.Array:
        """Map tokens [B, T] to [B, T, D]; segments [B, T] are of a pair of texts, None: all are the first.

        Lengths are those of a packed batch.
        """
        added = []
        if hasattr(self, "position_embeddings"):
            added.append(self.position_embeddings(self._positions(tokens, length)))
        if hasattr(self, "token_type_embeddings"):
            first = jnp.zeros((), jnp.int32)
            added.append(self.token_type_embeddings(first if segments is None else segments))
        x = self.word_embeddings(tokens)
        return self.LayerNorm(x + sum(added[1:], added[0]) if added else x)

    def _positions(self, tokens: jax.Array, length: jax.Array | None) -> jax.Array:
        """Return the positions of tokens: int32 [T] or [B, T]."""
        token = position = jnp.arange(tokens.shape[1])
        if length is not None:
            _, position = places(len(token), length)
        if self.padding is None:
            return position
        # modeling_roberta.py, create_position_ids_from_input_ids
        counted = (tokens != self.padding).astype(jnp.int32)
        number = jnp.cumsum(counted, axis=1)
        if length is not None:  # counted from the first token of its sentence
            number -= (number - counted)[:, token - position]
        return number * counted + self.padding


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
            place(self, name, family.norm(config, width))

    def __call__(self, x: jax.Array, length: jax.Array, *shared: Any) -> jax.Array:
        """Map x [B, T, D] to [B, T, D]; in row b the first length[b] tokens are valid."""
        names = self.names
        mixed = self.mix(x, length, *shared)
        x = part_of(self, names.attention_norm)(part_of(self, names.output)(mixed, residual=x))
        inner = part_of(self, names.up)(x, activation=self.activation)
        return part_of(self, names.mlp_norm)(part_of(self, names.down)(inner, residual=x))

    def mix(self, x: jax.Array, length: jax.Array, *shared: Any) -> jax.Array:
        """Map x [B, T, D] to [B, T, D] by attention, without the last product; `shared` may have a bias."""
        query, keys, values = (part_of(self, name)(x) for name in self.names.qkv)
        if not shared:
            rounds = part_of(self, self.names.qkv[0]).is_narrow
            return attention(query, keys, values, length, self.heads, rounds=rounds)
        split = (*x.shape[:2], self.heads, -1)
        query, keys, values = (part.reshape(split) for part in (query, keys, values))
        (bias,) = shared
        query = query * query.shape[-1] ** -0.5
        count = x.shape[1]
        of_pairs = bias(jnp.arange(count), count).swapaxes(0, 1)
        return biased_attention(query, keys, values, length, bias=of_pairs)


@dataclass(frozen=True)
class ScoringHead:
    """The head of a family. Names are those of published tensors.

    Attributes:
        dense: a layer of the model's width on the pooled hidden state; empty: there is none.
        activation: what follows it, or the key of config.json that says it.
        norm: a norm without a bias after that; empty: there is none.
        out: the layer that gives the scores.
        pooling: the token that is pooled, a name in sentence.POOLING, or the key of config.json that says it.
        dense_bias: whether `dense` has a bias, or the key of config.json that says it.
        out_bias: whether `out` has a bias.
    """

    dense: str = "classifier.dense"
    activation: str = "tanh"
    norm: str = ""
    out: str = "classifier.out_proj"
    pooling: str = "cls"
    dense_bias: bool | str = True
    out_bias: bool = True

    @property
    def is_causal(self) -> bool:
        """True if it is a decoder, which scores at its last token."""
        return not self.dense and self.pooling == "lasttoken"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its modules, in the order in which they compute."""
        return tuple(filter(None, (self.dense, self.norm, self.out)))

    def chosen(self, config: Any) -> tuple[str, str]:
        """Return the pooling and the activation.

        Raises:
            CheckpointError: a configuration says one that is not supported.
        """
        found = []
        for value, known in ((self.pooling, POOLING), (self.activation, _ACTIVATIONS)):
            if value not in known:
                key, value = value, getattr(config, value)
                require(config, key, value, known)
            found.append(value)
        return found[0], found[1]


def pooler(prefix: str, activation: str = "tanh") -> ScoringHead:
    """Return the head of a family that scores what its pooler returns."""
    return ScoringHead(dense=f"{prefix}pooler.dense", activation=activation, out="classifier")


@final
class ScoringEncoder(WholeEncoder):
    """A transformer, and the head that scores its hidden states."""

    def __init__(
        self,
        head: ScoringHead,
        config: Any,
        prefix: str,
        transformer: nnx.Module,
        *,
        labels: int,
        segments: bool,
    ) -> None:
        """Build a model.

        Args:
            head: its head.
            config: transformers' configuration.
            prefix: as of `WholeEncoder`.
            transformer: as of `WholeEncoder`.
            labels: the number of scores of each text.
            segments: whether it is given segments: a token of the second text of a pair is its id plus the
                size of the vocabulary.
        """
        super().__init__(prefix, transformer)
        self.form, self.segments, self.vocab_size = head, segments, config.vocab_size
        self.pooling, self.activation = head.chosen(config)
        width: int = config.hidden_size
        if head.dense:
            bias = head.dense_bias
            bias = getattr(config, bias) if isinstance(bias, str) else bias
            place(self, head.dense, product(width, width, bias=bias))
        if head.norm:
            place(self, head.norm, LayerNorm(width, config.norm_eps, bias=False))
        place(self, head.out, product(width, labels, bias=head.out_bias))

    @property
    def ending(self) -> Parts:
        """See WholeEncoder."""
        return [part_of(self, name) for name in self.form.names]

    def run(self, kind: str, parts: Parts, *inputs: jax.Array) -> jax.Array:
        """See WholeEncoder."""
        if kind == "embed" and self.segments:
            (tokens,) = inputs
            segments = (tokens >= self.vocab_size).astype(jnp.int32)
            inputs = (tokens - self.vocab_size * segments, segments)
        return super().run(kind, parts, *inputs)

    def finish(self, ending: Parts, hidden: jax.Array, length: jax.Array) -> jax.Array:
        """See WholeEncoder."""
        x = POOLING[self.pooling](hidden, length)
        *inner, out = ending
        for place_of, part in enumerate(inner):
            x = part(x)
            if self.form.dense and place_of == 0:
                x = _ACTIVATIONS[self.activation](x)
        return out(x)
