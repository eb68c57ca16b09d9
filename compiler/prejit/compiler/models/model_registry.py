"""Find a model's family by its model_type, and make the model as an abstract flax nnx module.

A decoder family is a module or a `LlamaFamily` with `describe`, `build` and `NAMING`, listed in `DECODERS`.
An encoder family is a module with `check`, `max_tokens`, `build` and `NAMING`, listed in `ENCODERS`.
Parameters have the names of the published tensors, one array each; nothing is stacked.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

from flax import nnx

from prejit.compiler.base.suggestions import shown
from prejit.compiler.models import precision
from prejit.compiler.models.encoders import bert, distilbert, roberta
from prejit.compiler.models.encoders.sentence import EncoderConfig, EncoderSource, SentenceEncoder
from prejit.compiler.models.families import (
    gemma2,
    gemma3,
    gpt2,
    phi3,
    t5,
    whisper,
)
from prejit.compiler.models.families.llama import LLAMA, MISTRAL, QWEN2, QWEN3, LlamaFamily
from prejit.compiler.models.layers import product_forms
from prejit.compiler.models.layers.layer_config import DecoderConfig, Naming, unsupported
from prejit.runtime.errors import CheckpointError

DECODERS: dict[str, ModuleType | LlamaFamily] = {
    "gemma2": gemma2,
    "gemma3_text": gemma3,
    "gpt2": gpt2,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "phi3": phi3,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "t5": t5,
    "whisper": whisper,
}
"""The families that generate, by model_type: decoders and encoder-decoders."""

ENCODERS: dict[str, ModuleType] = {"bert": bert, "distilbert": distilbert, "roberta": roberta}
"""The module of each encoder family, by model_type."""


def describe(config: Any, cache_dtype: str = "float32") -> DecoderConfig:
    """Return the sizes of a decoder, which lowering and generation need.

    Args:
        config: from `config_file.load_config`.
        cache_dtype: dtype of the KV cache: `float32` or `bfloat16`.

    Raises:
        CheckpointError: a setting is not supported; the error names file, key, value and what is allowed.
    """
    described: DecoderConfig = _decoder_family(config).describe(config)
    return replace(described, cache_dtype=cache_dtype)


def make_decoder(
    config: Any, context: int | None = None, dtype: str = "float32", *, out_in: bool = False
) -> nnx.Module:
    """Return a decoder as an abstract module: its parameters are shapes without values.

    It implements `protocol.DecoderModel`, or `protocol.EncoderDecoderModel`.

    Args:
        config: from `config_file.load_config`.
        context: the longest context of the bundle's programs. It decides LongRoPE's factors for all of them
            (rope.py explains why). None means the longest context that the model was made for.
        dtype: the stored dtype of the matrices (base/stored_dtypes.py).
        out_in: whether all matrices are stored (out, in), as kernels read them. Otherwise each is stored as
            XLA:CPU computes it fastest.

    Raises:
        CheckpointError: as `describe`.
    """
    describe(config)
    family = _decoder_family(config)
    with product_forms.storing(out_in=out_in):
        module: nnx.Module = nnx.eval_shape(lambda: family.build(config, context))
    precision.store(module, dtype)
    return module


def decoder_naming(config: Any) -> Naming:
    """Return how published checkpoints of a decoder's family name their tensors."""
    names: Naming = _decoder_family(config).NAMING
    return names


def describe_encoder(source: EncoderSource) -> EncoderConfig:
    """Return the sizes of an encoder, which lowering and encoding need.

    Raises:
        CheckpointError: a setting is not supported; the error names file, key, value and what is allowed.
    """
    config, layout = source.config, source.layout
    family = ENCODERS[config.model_type]
    family.check(config)
    width: int = config.hidden_size
    if width % config.num_attention_heads:
        heads = config.num_attention_heads
        raise unsupported(
            config,
            f"hidden_size: expected a multiple of the {heads} attention heads, found {width}",
        )
    if layout.width not in (None, width):
        raise CheckpointError(
            f"{layout.files[-1]}: word_embedding_dimension: expected {width}, the width that "
            f"{layout.transformer / 'config.json'} gives the model; found {layout.width}"
        )
    width *= len(layout.pooling)
    for part in layout.dense:
        if part.inputs != width:
            raise CheckpointError(
                f"{part.directory / 'config.json'}: in_features: expected {width}, the width of the layer "
                f"before it; found {part.inputs}"
            )
        width = part.outputs
    positions: int = family.max_tokens(config)
    if positions < 1:
        raise unsupported(
            config,
            f"max_position_embeddings: expected more than pad_token_id + 1 = {config.pad_token_id + 1}, "
            f"found {config.max_position_embeddings}",
        )
    return EncoderConfig(
        config.model_type,
        config.vocab_size,
        width,
        min(positions, layout.max_tokens or positions),
        "+".join(layout.pooling),
        layout.normalized,
    )


def make_encoder(
    source: EncoderSource, dtype: str = "float32", *, out_in: bool = False
) -> SentenceEncoder:
    """Return an encoder as an abstract module: its parameters are shapes without values.

    Args:
        source: from `config_file.load_encoder`.
        dtype: the stored dtype of the matrices (base/stored_dtypes.py).
        out_in: as in `make_decoder`.

    Raises:
        CheckpointError: as `describe_encoder`.
    """
    describe_encoder(source)
    family = ENCODERS[source.config.model_type]
    prefix = family.NAMING.prefix
    with product_forms.storing(out_in=out_in):
        module: SentenceEncoder = nnx.eval_shape(
            lambda: SentenceEncoder(source, prefix, family.build(source.config))
        )
    precision.store(module, dtype)
    return module


def encoder_naming(source: EncoderSource) -> Naming:
    """Return how published checkpoints of an encoder's transformer name their tensors."""
    names: Naming = ENCODERS[source.config.model_type].NAMING
    return names


def _decoder_family(config: Any) -> ModuleType | LlamaFamily:
    if config.model_type not in DECODERS:
        raise unsupported(config, f"model_type: found {shown(config.model_type)}")
    return DECODERS[config.model_type]
