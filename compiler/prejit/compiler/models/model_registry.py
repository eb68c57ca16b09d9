"""Find a model's family by its model_type, and make the model as an abstract flax nnx module.

families/family_table.py lists the families. Parameters have the names of the published tensors, one array
each; nothing is stacked.
"""

from __future__ import annotations

from typing import Any

from flax import nnx

from prejit.compiler.base.suggestions import shown
from prejit.compiler.models import quantizing
from prejit.compiler.models.families.family import Family
from prejit.compiler.models.families.family_table import DECODERS, ENCODERS
from prejit.compiler.models.families.sentence import EncoderConfig, EncoderSource, PooledEncoder
from prejit.compiler.models.layers import product_forms
from prejit.compiler.models.layers.layer_config import DecoderConfig, Naming, unsupported
from prejit.runtime.errors import CheckpointError


def describe(config: Any, cache_dtype: str = "float32") -> DecoderConfig:
    """Return the sizes of a decoder, which lowering and generation need.

    Args:
        config: from `config_file.load_config`.
        cache_dtype: dtype of the KV cache: `float32` or `bfloat16`.

    Raises:
        CheckpointError: a setting is not supported; the error names file, key, value and what is allowed.
    """
    family = _decoder_family(config)
    family.require_supported(config)
    positions = family.positions(config)
    return DecoderConfig(config.model_type, config.vocab_size, cache_dtype, positions)


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
    quantizing.store(module, dtype)
    return module


def describe_encoder(source: EncoderSource) -> EncoderConfig:
    """Return the sizes of an encoder, which lowering and encoding need.

    Raises:
        CheckpointError: a setting is not supported; the error names file, key, value and what is allowed.
    """
    config, layout = source.config, source.layout
    family = ENCODERS[config.model_type]
    family.require_supported(config)
    width: int = config.hidden_size
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
    positions = family.positions(config)
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
) -> PooledEncoder:
    """Return an encoder as an abstract module: its parameters are shapes without values.

    `source` is from `config_file.load_encoder`, `dtype` a name in STORED_DTYPES, and `out_in` as in
    `make_decoder`.

    Raises:
        CheckpointError: as `describe_encoder`.
    """
    describe_encoder(source)
    family = ENCODERS[source.config.model_type]
    with product_forms.storing(out_in=out_in):
        module: PooledEncoder = nnx.eval_shape(
            lambda: PooledEncoder(source, family.naming.prefix, family.build(source.config, None))
        )
    quantizing.store(module, dtype)
    return module


def naming_of(family: str) -> Naming:
    """Return how published checkpoints of a family name their tensors."""
    return {**DECODERS, **ENCODERS}[family].naming


def _decoder_family(config: Any) -> Family:
    if config.model_type not in DECODERS:
        raise unsupported(config, f"model_type: found {shown(config.model_type)}")
    return DECODERS[config.model_type]
