"""The parts that encoder families share: attention without a cache, and the embedding of a sentence.

Pooling, dense layers and normalisation are those of sentence-transformers (Reimers and Gurevych 2019, arXiv
1908.10084, section 3; the definitions are sentence_transformers/models/Pooling.py, Dense.py, Normalize.py).

Shapes: B batch, T tokens, N heads, H head size, D model width.

In a packed batch B is 1, and S sentences lie one after the other in the row: length is int32 [S]. What
follows the last one is padding. So lengths of another number than rows say that a batch is packed; with one
row and one length both forms mean the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from prejit.compiler.models.families.sentence_layout import DenseModule, SentenceLayout
from prejit.compiler.models.layers import kernel_calls
from prejit.compiler.models.layers.linear import Linear

_LOWEST = float(jnp.finfo(jnp.float32).min)
"""The score of a hidden token. With minus infinity a row without a token would become NaN."""


@dataclass(frozen=True)
class EncoderConfig:
    """The sizes of an encoder, which lowering and encoding need.

    Attributes:
        family: `bert`, `modernbert`, `qwen3`.
        vocab_size: number of tokens in its vocabulary.
        width: width of an embedding, or the number of scores.
        max_tokens: maximum tokens of a sentence, special tokens included.
        pooling: modes joined by `+`, as sentence-transformers names them: `mean`, `cls+max`.
        normalized: whether embeddings have length 1.
        scores, segments, prompts, default_prompt, padding, template, instruction, unread: as of
            `bundle_schema.Encoder`; heads and unweighted too.
    """

    family: str
    vocab_size: int
    width: int
    max_tokens: int
    pooling: str
    normalized: bool
    scores: str | None = None
    segments: bool | None = None
    prompts: Mapping[str, str] | None = None
    default_prompt: str | None = None
    padding: int | None = None
    template: tuple[str, ...] | None = None
    instruction: str | None = None
    unread: int | None = None
    heads: tuple[str, ...] | None = None
    unweighted: tuple[int, ...] | None = None


@dataclass(frozen=True)
class EncoderSource:
    """A published encoder.

    Attributes:
        config: transformers' configuration of its transformer.
        layout: its modules.
        labels: how many scores of a text it gives; 0: it embeds.
    """

    config: Any
    layout: SentenceLayout
    labels: int = 0


class Transformer(Protocol):
    """The interface of every encoder family's module.

    Attributes:
        packs: whether embeddings and layers take packed batches. Another module need not have it.
        embedding: modules that map tokens, int32 [B, T], to float32 [B, T, D], one after the other. The first
            is given also segments, int32 [B, T], by a model that scores pairs of texts, and the lengths of a
            packed batch.
        blocks: the layers in order. Each maps float32 [B, T, D] and the number of valid tokens, int32 [B],
            to [B, T, D]; modules of `shared` are further arguments. Results for padding are meaningless, but
            finite. Layers have the same parameters in the same shapes: one program runs with each.
        shared: modules that all layers use.
        final: modules that map the last layer's [B, T, D] to the hidden states, one after the other.
    """

    embedding: Sequence[nnx.Module]
    blocks: Sequence[nnx.Module]
    shared: Sequence[nnx.Module]
    final: Sequence[nnx.Module]


Parts = Sequence[Any]
"""The modules that a program of an encoder uses."""


class WholeEncoder(nnx.Module):
    """A transformer and what follows it. Abstract: subclasses say what."""

    def __init__(self, prefix: str, transformer: nnx.Module) -> None:
        """Build an encoder.

        Args:
            prefix: prefix of the transformer's tensors in a checkpoint with a head: `bert.`.
            transformer: the transformer of the family.
        """
        self.name = prefix.removesuffix(".")
        setattr(self, self.name, transformer)

    @property
    def transformer(self) -> Any:
        """The transformer (see Transformer)."""
        return getattr(self, self.name)

    @property
    def packs(self) -> bool:
        """True if its programs take packed batches."""
        return False

    @property
    def ending(self) -> Parts:
        """The modules that follow the transformer."""
        raise NotImplementedError

    def finish(self, ending: Parts, hidden: jax.Array, length: jax.Array) -> Any:
        """Map hidden states [B, T, D] to the result [B, D'], with the modules of `ending`.

        With heads of tokens it is a dict: that result as `embedding`, and of each head [B, T] or [B, T, D'].
        """
        raise NotImplementedError

    def parts(self, kind: str) -> list[Parts]:
        """Return the modules of a kind of program, `embed`, `layer` or `pool`: for each of its runs."""
        model = self.transformer
        parts: dict[str, list[Parts]] = {
            "embed": [tuple(model.embedding)],
            "layer": [(layer, *model.shared) for layer in model.blocks],
            "pool": [(*model.final, *self.ending)],
        }
        return parts[kind]

    def run(self, kind: str, parts: Parts, *inputs: Any) -> Any:
        """Return the result of a program: of `embed` from tokens, of the others from length and hidden.

        For `embed` of a packed batch, segments (None) and lengths follow the tokens.
        """
        if kind == "embed":
            return _chain(parts[0](*inputs), parts[1:])
        length, x = inputs
        if kind == "layer":
            return parts[0](x, length, *parts[1:])
        count = len(parts) - len(self.ending)
        return self.finish(parts[count:], _chain(x, parts[:count]), length)

    def __call__(self, tokens: jax.Array, length: jax.Array) -> jax.Array:
        """Return the embeddings, or the scores, float32 [B, D'], without what heads give of tokens.

        Args:
            tokens: int32 [B, T]; in row b the first length[b] are valid, the rest is padding. Or packed.
            length: int32 [B], or [S].
        """
        found = self.run("pool", self.parts("pool")[0], length, self._layers(tokens, length))
        return found["embedding"] if isinstance(found, dict) else found

    def hidden(self, tokens: jax.Array, length: jax.Array) -> jax.Array:
        """Return the hidden states, float32 [B, T, D]; those of padding are meaningless."""
        return _chain(self._layers(tokens, length), self.transformer.final)

    def _layers(self, tokens: jax.Array, length: jax.Array) -> jax.Array:
        packed = (None, length) if is_packed(tokens, length) else ()
        x = self.run("embed", self.parts("embed")[0], tokens, *packed)
        for parts in self.parts("layer"):
            x = self.run("layer", parts, length, x)
        return x


@final
class PooledEncoder(WholeEncoder):
    """A transformer, and the modules that make an embedding from its hidden states."""

    def __init__(
        self, layout: SentenceLayout, prefix: str, transformer: nnx.Module, width: int
    ) -> None:
        """Build an encoder with the modules of a layout, of a transformer of a width D.

        Arguments else as `WholeEncoder`.
        """
        super().__init__(prefix, transformer)
        self.sentence = Sentence(layout)
        self.heads = tuple((head.kind, head.name) for head in layout.heads)
        for head in layout.heads:
            setattr(self, head.name, product(width, head.outputs))

    @property
    def packs(self) -> bool:
        """See WholeEncoder."""
        return not self.heads and getattr(self.transformer, "packs", False)

    @property
    def ending(self) -> Parts:
        """See WholeEncoder."""
        return (self.sentence, *(getattr(self, name) for _, name in self.heads))

    def finish(self, ending: Parts, hidden: jax.Array, length: jax.Array) -> Any:
        """See WholeEncoder."""
        sentence, *heads = ending
        embedding = sentence(hidden, length)
        if not heads:
            return embedding
        found = {"embedding": embedding}
        for (kind, _), head in zip(self.heads, heads, strict=True):
            x = head(hidden)
            found[kind] = jax.nn.relu(x[..., 0]) if kind == "sparse" else normalized(x)
        return found


def _chain(x: jax.Array, parts: Parts) -> jax.Array:
    for part in parts:
        x = part(x)
    return x


class Sentence(nnx.Module):
    """Pooling, dense layers and normalization. Dense layers have the names of their directories."""

    def __init__(self, layout: SentenceLayout) -> None:
        self.pooling = layout.pooling
        self.dense = tuple(part.name for part in layout.dense)
        self.normalized = layout.normalized
        for part in layout.dense:
            setattr(self, part.name, Dense(part))

    def __call__(self, hidden: jax.Array, length: jax.Array) -> jax.Array:
        """Map hidden states [B, T, D] to embeddings [B, D']."""
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
        """Map x [B, in] to [B, out]."""
        return DENSE_ACTIVATIONS[self.activation](self.linear(x))


def product(inputs: int, outputs: int, *, bias: bool = True) -> Linear:
    """Return a linear layer whose matrix is stored (in, out), the fastest order for XLA:CPU with many tokens.

    XLA transposes a matrix stored (out, in) on every call: in MiniLM's shapes 1 x 16 tokens cost 2 x as much,
    1 x 128 tokens 1.5 x. A bundle with kernels stores it (out, in), as they read it.
    """
    return Linear(inputs, outputs, bias=bias, in_out=not kernel_calls.are_stored_out_in())


def attention(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    length: jax.Array,
    heads: int,
    *,
    rounds: bool,
) -> jax.Array:
    """Return attention of every token to all valid tokens of its row, or of its sentence in a packed row.

    Args:
        query: float32 [B, T, D], D = N * H.
        keys: float32 [B, T, D].
        values: float32 [B, T, D].
        length: int32 [B], or [S].
        heads: N.
        rounds: whether the kernel rounds all factors to bfloat16, because weights are rounded.

    Returns:
        float32 [B, T, D].
    """
    batch, count, width = query.shape
    size = width // heads
    query, keys, values = (x.reshape(batch, count, heads, size) for x in (query, keys, values))
    if kernel_calls.has_kernels():
        given = (query, keys, values, length, size**-0.5)
        mixed = kernel_calls.encoder_attention(*given, rounds=rounds)
        return mixed.reshape(batch, count, width)
    if not is_packed(query, length):
        return biased_attention(query * size**-0.5, keys, values, length)
    place, _ = places(count, length)
    # What is not finite would survive a weight of 0: it spreads in its own sentence alone.
    broken = ~jnp.isfinite(values).all((0, 2, 3))
    same = place[:, None] == place
    values = jnp.where(broken[None, :, None, None], 0, values)
    whole = jnp.full(1, count, jnp.int32)
    mixed = biased_attention(query * size**-0.5, keys, values, whole, visible=same)
    return jnp.where((same & broken).any(1)[:, None], jnp.nan, mixed)


def biased_attention(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    length: jax.Array,
    *,
    bias: jax.Array | None = None,
    visible: jax.Array | None = None,
) -> jax.Array:
    """Return attention of every token to valid tokens of its row, as XLA computes it.

    Args:
        query: float32 [B, T, N, H], multiplied by the factor of the scores.
        keys: float32 [B, T, K, H]; K divides N.
        values: float32 [B, T, K, H].
        length: int32 [B].
        bias: added to the scores, float32, of a shape that broadcasts to [B, N, T, T]; None: none.
        visible: bool [T, T], which of all tokens (the last axis) each one sees; None: all.

    Returns:
        float32 [B, T, N * H].
    """
    batch, count, heads, size = query.shape
    groups = heads // keys.shape[2]
    if groups > 1:
        keys, values = (jnp.repeat(x, groups, axis=2) for x in (keys, values))
    scores = jnp.einsum("bqnh,bknh->bnqk", query, keys)
    scores = scores if bias is None else scores + bias
    seen = is_valid(count, length)[:, None, None]
    seen = seen if visible is None else seen & visible
    weights = jax.nn.softmax(jnp.where(seen, scores, _LOWEST))
    return jnp.einsum("bnqk,bknh->bqnh", weights, values).reshape(batch, count, heads * size)


def is_packed(x: jax.Array, length: jax.Array) -> bool:
    """Return whether lengths are those of sentences that lie in the one row of x [1, T, ...]."""
    return x.shape[0] != length.shape[0]


def places(count: int, length: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return of each of T packed tokens its sentence, and its position in that: int32 [T].

    The sentence of padding is S; its positions are 0, because a table may not have as many as there are.
    """
    token, end = jnp.arange(count), jnp.cumsum(length)
    place = jnp.searchsorted(end, token, side="right").astype(jnp.int32)
    position = token - jnp.append(end - length, 0)[place]
    return place, jnp.where(place < length.shape[0], position, 0)


def is_valid(count: int, length: jax.Array) -> jax.Array:
    """Return bool [B, T]: which of T tokens of each row are not padding."""
    return jnp.arange(count) < length[:, None]


def normalized(x: jax.Array) -> jax.Array:
    """Return x [B, D] with length 1 along D, as torch.nn.functional.normalize does."""
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


def _max(x: jax.Array, length: jax.Array) -> jax.Array:
    if is_packed(x, length):
        place, _ = places(x.shape[1], length)
        return jnp.full((len(length), x.shape[2]), -1e9).at[place].max(x[0])
    return jnp.where(_valid(x, length), x, -1e9).max(1)


def _sum(x: jax.Array, length: jax.Array) -> jax.Array:
    count, rows = x.shape[1], len(length)

    def in_order(x: jax.Array, length: jax.Array) -> jax.Array:
        """Sum token after token, so that packing changes no bit."""
        if is_packed(x, length):
            place, _ = places(count, length)
        else:
            row = jnp.where(is_valid(count, length), jnp.arange(rows)[:, None], rows)
            place = row.reshape(-1)
        return jnp.zeros((rows, x.shape[2])).at[place].add(x.reshape(-1, x.shape[2]))

    def at_once(x: jax.Array, length: jax.Array) -> jax.Array:
        return jnp.where(_valid(x, length), x, 0).sum(1)

    if is_packed(x, length):
        return in_order(x, length)
    return lax.platform_dependent(x, length, cpu=in_order, default=at_once)


def _mean(x: jax.Array, length: jax.Array) -> jax.Array:
    return _sum(x, length) / jnp.maximum(length, 1)[:, None]


def _mean_sqrt_len(x: jax.Array, length: jax.Array) -> jax.Array:
    return _sum(x, length) / jnp.sqrt(jnp.maximum(length, 1))[:, None]


def _weighted_mean(x: jax.Array, length: jax.Array) -> jax.Array:
    count = x.shape[1]
    position = places(count, length)[1] if is_packed(x, length) else jnp.arange(count)
    weights = jnp.maximum(length * (length + 1) // 2, 1)[:, None]
    return _sum(x * (position + 1)[:, None], length) / weights


def _at(x: jax.Array, length: jax.Array, place: jax.Array | int) -> jax.Array:
    """Return the token at a place of each sentence."""
    if is_packed(x, length):
        return jnp.take(x[0], jnp.cumsum(length) - length + place, axis=0, mode="clip")
    if isinstance(place, int):
        return x[:, place]
    return jnp.take_along_axis(x, place[:, None, None], axis=1, mode="clip")[:, 0]


def _valid(x: jax.Array, length: jax.Array) -> jax.Array:
    return is_valid(x.shape[1], length)[..., None]


POOLING: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "cls": lambda x, length: _at(x, length, 0),
    "max": _max,
    "mean": _mean,
    "mean_sqrt_len_tokens": _mean_sqrt_len,
    "weightedmean": _weighted_mean,
    "lasttoken": lambda x, length: _at(x, length, jnp.maximum(length - 1, 0)),
}
"""Functions that map hidden states [B, T, D] and lengths to [B, D], packed ones to [S, D], by their names in
SentenceLayout."""

DENSE_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "torch.nn.modules.linear.Identity": lambda x: x,
    "torch.nn.modules.activation.Tanh": jnp.tanh,
    "torch.nn.modules.activation.ReLU": jax.nn.relu,
    "torch.nn.modules.activation.GELU": lambda x: jax.nn.gelu(x, approximate=False),
    "torch.nn.modules.activation.SiLU": jax.nn.silu,
    "torch.nn.modules.activation.Sigmoid": jax.nn.sigmoid,
}
