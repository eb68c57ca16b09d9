"""What encoder families share: attention without a cache, norms, and what makes a sentence of its tokens.

Pooling, dense layers and normalisation are those of sentence-transformers (Reimers and Gurevych 2019, arXiv
1908.10084, section 3; the definitions are sentence_transformers/models/Pooling.py, Dense.py, Normalize.py).

Shapes: B batch, T tokens, N heads, H head size, D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from prejit.compiler.models.encoders.sentence_layout import DenseModule, SentenceLayout
from prejit.compiler.models.layers import forms, kernel_calls
from prejit.compiler.models.layers.config import require
from prejit.compiler.models.layers.linear import ACTIVATIONS, Linear

_LOWEST = float(jnp.finfo(jnp.float32).min)
"""Instead of minus infinity: a row without a token has then some value, not NaN."""


@dataclass(frozen=True)
class EncoderConfig:
    """What lowering and encoding need to know of any encoder.

    Attributes:
        family: `bert`, `roberta`, `distilbert`.
        vocab_size: tokens that it knows.
        width: of an embedding.
        max_tokens: of a sentence, special tokens included.
        pooling: modes joined by `+`, as sentence-transformers names them: `mean`, `cls+max`.
        normalized: whether embeddings have length 1.
    """

    family: str
    vocab_size: int
    width: int
    max_tokens: int
    pooling: str
    normalized: bool


@dataclass(frozen=True)
class EncoderSource:
    """A published encoder.

    Attributes:
        config: of its transformer, by transformers.
        layout: its modules.
    """

    config: Any
    layout: SentenceLayout


class Transformer(Protocol):
    """What every encoder family's module has.

    Attributes:
        embeddings: int32 [B, T] to float32 [B, T, D].
    """

    embeddings: nnx.Module

    @property
    def layers(self) -> nnx.List[Any]:
        """In order; each takes float32 [B, T, D] and how many tokens of each row are valid, int32 [B].

        It gives [B, T, D]. What it gives for padding means nothing, but is finite.
        """
        ...


class SentenceEncoder(nnx.Module):
    """A transformer, and what makes an embedding of its hidden states."""

    def __init__(self, source: EncoderSource, prefix: str, transformer: nnx.Module) -> None:
        """Puts it together.

        Args:
            source: says what follows the transformer.
            prefix: what tensors of a checkpoint with a head have before their names: `bert.`.
            transformer: of the family.
        """
        self.name = prefix.removesuffix(".")
        setattr(self, self.name, transformer)
        self.sentence = Sentence(source.layout)

    @property
    def transformer(self) -> Any:
        """The Transformer."""
        return getattr(self, self.name)

    def __call__(self, tokens: jax.Array, length: jax.Array) -> jax.Array:
        """Embeddings float32 [B, D'].

        Args:
            tokens: int32 [B, T]; in row b the first length[b] are valid, the rest is padding.
            length: int32 [B].
        """
        return self.sentence(self.hidden(tokens, length), length)

    def hidden(self, tokens: jax.Array, length: jax.Array) -> jax.Array:
        """Hidden states of the last layer, float32 [B, T, D]; those of padding mean nothing."""
        x: jax.Array = self.transformer.embeddings(tokens)
        for layer in self.transformer.layers:
            x = layer(x, length)
        return x


class Sentence(nnx.Module):
    """Pooling, dense layers and normalisation. Dense layers are called by their directories."""

    def __init__(self, layout: SentenceLayout) -> None:
        self.pooling = layout.pooling
        self.dense = tuple(part.name for part in layout.dense)
        self.normalized = layout.normalized
        for part in layout.dense:
            setattr(self, part.name, Dense(part))

    def __call__(self, hidden: jax.Array, length: jax.Array) -> jax.Array:
        """Hidden states [B, T, D] to embeddings [B, D']."""
        x = jnp.concatenate([POOLING[mode](hidden, length) for mode in self.pooling], axis=-1)
        for name in self.dense:
            x = getattr(self, name)(x)
        return normalized(x) if self.normalized else x


class Dense(nnx.Module):
    """A linear layer and an activation."""

    def __init__(self, part: DenseModule) -> None:
        self.linear = product(part.inputs, part.outputs, bias=part.bias)
        self.activation = part.activation

    def __call__(self, x: jax.Array) -> jax.Array:
        """X [B, in] to [B, out]."""
        return DENSE_ACTIVATIONS[self.activation](self.linear(x))


def product(inputs: int, outputs: int, *, bias: bool = True) -> Linear:
    """A linear layer whose matrix is stored (in, out), as XLA:CPU wants it for several tokens at once.

    What is stored (out, in) it transposes on every call: MiniLM's shapes, 1 x 16 tokens, cost 2 x as much,
    1 x 128 1.5 x. Where a bundle has kernels it is stored (out, in), as they read it.
    """
    return Linear(inputs, outputs, bias=bias, in_out=not forms.are_stored_out_in())


def attention(
    query: jax.Array, keys: jax.Array, values: jax.Array, length: jax.Array, heads: int
) -> jax.Array:
    """Attention of every token to all valid tokens of its row.

    Args:
        query: float32 [B, T, D], D = N * H.
        keys: likewise.
        values: likewise.
        length: int32 [B].
        heads: N.

    Returns:
        float32 [B, T, D].
    """
    batch, count, width = query.shape
    size = width // heads
    split = (batch, count, heads, size)
    if forms.has_kernels():
        query, keys, values = (x.reshape(split) for x in (query, keys, values))
        mixed = kernel_calls.encoder_attention(query, keys, values, length, size**-0.5)
        return mixed.reshape(batch, count, width)
    query, keys, values = (x.reshape(split) for x in (query * size**-0.5, keys, values))
    scores = jnp.einsum("bqnh,bknh->bnqk", query, keys)
    visible = is_valid(count, length)[:, None, None]
    weights = jax.nn.softmax(jnp.where(visible, scores, _LOWEST))
    return jnp.einsum("bnqk,bknh->bqnh", weights, values).reshape(batch, count, width)


def is_valid(count: int, length: jax.Array) -> jax.Array:
    """Bool [B, T]: which of T tokens of each row are no padding."""
    return jnp.arange(count) < length[:, None]


def normalized(x: jax.Array) -> jax.Array:
    """X [B, D] with length 1 along D, as torch.nn.functional.normalize."""
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


def _cls(x: jax.Array, length: jax.Array) -> jax.Array:
    return x[:, 0]


def _max(x: jax.Array, length: jax.Array) -> jax.Array:
    return jnp.where(_valid(x, length), x, -1e9).max(1)


def _sum(x: jax.Array, length: jax.Array) -> jax.Array:
    return jnp.where(_valid(x, length), x, 0).sum(1)


def _mean(x: jax.Array, length: jax.Array) -> jax.Array:
    return _sum(x, length) / jnp.maximum(length, 1)[:, None]


def _mean_sqrt_len(x: jax.Array, length: jax.Array) -> jax.Array:
    return _sum(x, length) / jnp.sqrt(jnp.maximum(length, 1))[:, None]


def _weighted_mean(x: jax.Array, length: jax.Array) -> jax.Array:
    weights = jnp.where(_valid(x, length), jnp.arange(1, x.shape[1] + 1)[:, None], 0)
    return (x * weights).sum(1) / jnp.maximum(weights.sum(1), 1)


def _last_token(x: jax.Array, length: jax.Array) -> jax.Array:
    index = jnp.maximum(length - 1, 0)[:, None, None]
    return jnp.take_along_axis(x, index, axis=1, mode="clip")[:, 0]


def _valid(x: jax.Array, length: jax.Array) -> jax.Array:
    return is_valid(x.shape[1], length)[..., None]


POOLING: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "cls": _cls,
    "max": _max,
    "mean": _mean,
    "mean_sqrt_len_tokens": _mean_sqrt_len,
    "weightedmean": _weighted_mean,
    "lasttoken": _last_token,
}
"""By their names in SentenceLayout: hidden states [B, T, D] and lengths to [B, D]."""

DENSE_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "torch.nn.modules.linear.Identity": lambda x: x,
    "torch.nn.modules.activation.Tanh": jnp.tanh,
    "torch.nn.modules.activation.ReLU": jax.nn.relu,
    "torch.nn.modules.activation.GELU": lambda x: jax.nn.gelu(x, approximate=False),
    "torch.nn.modules.activation.SiLU": jax.nn.silu,
    "torch.nn.modules.activation.Sigmoid": jax.nn.sigmoid,
}


def check_activation(config: Any, key: str) -> None:
    """Checks the activation that a config names.

    Raises:
        CheckpointError: it is none of ACTIVATIONS.
    """
    require(config, key, getattr(config, key), ACTIVATIONS)
