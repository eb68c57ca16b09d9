"""Heads that score texts: sequence classification, with which cross-encoders rerank.

Scores are logits, as transformers' XForSequenceClassification returns them; the runtime applies the
activation. models/NAME/modeling_NAME.py of transformers 5 has the head of each family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
from flax import nnx

from prejit.compiler.models.families.sentence import POOLING, Parts, WholeEncoder, product
from prejit.compiler.models.layers.layer_config import require
from prejit.compiler.models.layers.linear import ACTIVATIONS, LayerNorm
from prejit.compiler.models.parameters import part_of, place

_ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {**ACTIVATIONS, "tanh": jnp.tanh}


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
