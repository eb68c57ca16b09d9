"""What decoder families share: linear layers, attention over a KV cache, writing into the cache.

The forms were chosen by measuring XLA:CPU on two threads, with jax 0.10.2 and 0.12.0 alike; figures in
comments come from there. Nothing here depends on the platform for its values.

Shapes: B batch, T new positions, S cache positions, L layers, N query heads, K key/value heads,
H head size, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax

from prejit.compiler.base.wording import did_you_mean, shown
from prejit.runtime.errors import CheckpointError

LayerCache = tuple[jax.Array, jax.Array]
"""Keys and values of one layer, each [B, K, S, H] of the cache's dtype."""

KVCache = tuple[LayerCache, ...]
"""One LayerCache for each of the L layers."""

BRING_YOUR_OWN = (
    'bring the model as a flax module of your own: [[program]] with function = "my_package.model:model", '
    'args = its inputs, params = "model.safetensors"; a plain JAX function does as well'
)
"""The hint of errors about a model that is not built here."""


@dataclass(frozen=True)
class DecoderConfig:
    """What lowering and generation need to know of any decoder.

    Attributes:
        family: model_type of config.json: `gpt2`, `llama`, `gemma3_text`.
        vocab_size: V, logits of a token.
        num_layers, num_kv_heads, head_size: L, K, H; the cache is L x (keys, values) of [B, K, S, H].
        cache_dtype: NumPy's name.
        max_positions: the longest context that the model was made for.
    """

    family: str
    vocab_size: int
    num_layers: int
    num_kv_heads: int
    head_size: int
    cache_dtype: str
    max_positions: int


@dataclass(frozen=True)
class Naming:
    """How the published checkpoints of a family name what its module calls otherwise or has not.

    Attributes:
        prefix: that checkpoints of the model without a head leave out: `transformer.`.
        head, embedding: a checkpoint of a tied model may hold either, or both with equal values.
        in_out: ends of the names of matrices that torch publishes (in, out).
        buffers: ends of the names of tensors that are no parameters.
        ignored: starts of the names of tensors that the model has no use for: an image encoder.
        moved: starts of published names, each with ours.
    """

    prefix: str
    head: str
    embedding: str
    in_out: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    moved: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Split:
    """Which parameters of a family the `tensor` axis of a mesh splits, by the last names of their modules.

    As in Shoeybi et al. 2019 (Megatron-LM), arXiv 1909.08053, section 3: a block sums over the devices
    twice, after attention and after the MLP. Every parameter that is not named is on every device.

    Attributes:
        outputs: linear layers split by their outputs, with their biases: a device has some of the heads,
            or a part of the MLP.
        inputs: linear layers split by their inputs: what devices give adds up, and the bias is added to
            that.
        vocabulary: tables and heads split by tokens, where the vocabulary divides.
    """

    outputs: tuple[str, ...]
    inputs: tuple[str, ...]
    vocabulary: tuple[str, ...]


class Decoder(Protocol):
    """What every family's module is called as."""

    def __call__(
        self,
        tokens: jax.Array,
        start: jax.Array,
        length: jax.Array,
        cache: KVCache,
        *,
        every: bool = False,
    ) -> tuple[jax.Array, KVCache]:
        """Logits after the new tokens, and the cache with them in it.

        Prefill, chunked prefill, decode and the verification of drafts are this one function. Only valid
        tokens enter the cache, and none beyond its end.

        Args:
            tokens: int32 [B, T], T <= S; in row b the first length[b] are valid, the rest is padding.
            start: int32 [B]; the position of tokens[b, 0].
            length: int32 [B]; 0 for a row that rests, whose logits then mean nothing.
            cache: holds the positions before start. What lies behind them counts for nothing, if finite.
            every: whether logits are wanted after every token, not after the last one alone.

        Returns:
            float32 [B, V], for the last valid token of each row, and the cache; with `every`
            float32 [B, T, V], where those of padding mean nothing.
        """
        ...


def require(config: Any, key: str, value: Any, allowed: Iterable[Any]) -> None:
    """Checks a value of config.json.

    Args:
        config: of transformers.
        key: as config.json says it; a dot leads into a table.
        value: of the key.
        allowed: what it may be.

    Raises:
        CheckpointError: it is none of those.
    """
    allowed = list(allowed)
    if value not in allowed:
        guess = did_you_mean(value, allowed) if isinstance(value, str) else ""
        raise unsupported(
            config,
            f"{key}: expected {' or '.join(map(shown, allowed))}, found {shown(value)}{guess}",
        )


def unsupported(config: Any, message: str) -> CheckpointError:
    """The error for a model that is not built here, with the name of its file."""
    return CheckpointError(
        f"{Path(config.name_or_path, 'config.json')}: {message}",
        hint=BRING_YOUR_OWN,
    )
