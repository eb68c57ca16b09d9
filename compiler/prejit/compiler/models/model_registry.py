"""Find a model's family by its model_type, and make the model as an abstract flax nnx module.

families/family_table.py and families/encoder_table.py list the families. Parameters have the names of the
published tensors, one array each; nothing is stacked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from flax import nnx

from prejit.compiler.base.stored_dtypes import GROUPS_OF_32, Groups
from prejit.compiler.base.suggestions import shown
from prejit.compiler.models import quantizing
from prejit.compiler.models.families.decoder_table import SEEING
from prejit.compiler.models.families.encoder_table import ENCODERS, HEADS, WITH_SEGMENTS
from prejit.compiler.models.families.encoders import ScoringEncoder
from prejit.compiler.models.families.family import Family
from prejit.compiler.models.families.family_table import DECODERS
from prejit.compiler.models.families.score_layout import IDENTITY, SIGMOID
from prejit.compiler.models.families.sentence import (
    EncoderConfig,
    EncoderSource,
    PooledEncoder,
    WholeEncoder,
)
from prejit.compiler.models.layers import kernel_calls
from prejit.compiler.models.layers.layer_config import DecoderConfig, Naming, unsupported
from prejit.runtime.errors import CheckpointError


def describe(config: Any, cache_dtype: str = "float32") -> DecoderConfig:
    """Return the sizes of a decoder, which lowering and generation need.

    Raises:
        CheckpointError: a setting is not supported; the error names file, key, value and what is allowed.
    """
    family = _decoder_family(config)
    family.require_supported(config)
    family.require_causal(config)
    positions = family.positions(config)
    return DecoderConfig(config.model_type, config.vocab_size, cache_dtype, positions)


def make_decoder(
    config: Any,
    context: int | None = None,
    dtype: str = "float32",
    *,
    out_in: bool = False,
    groups: Groups = GROUPS_OF_32,
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
        groups: those of int4.
    """
    describe(config)
    family = _decoder_family(config)
    build = family.build
    if getattr(config, "sight", None) is not None:
        assert family.seeing is not None
        build = family.seeing
    with kernel_calls.storing(out_in=out_in):
        module: nnx.Module = nnx.eval_shape(lambda: build(config, context))
    quantizing.store(module, dtype, groups)
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
    limit = min(positions, layout.max_tokens or positions)
    sizes = (config.model_type, config.vocab_size)
    if source.labels:
        pooling, _ = HEADS[config.model_type].chosen(config)
        default = SIGMOID if source.labels == 1 else IDENTITY
        scores = layout.score_activation or default
        segments = _has_segments(source) or None
        # transformers scores at the last token that is not padding, an answer stands behind the last one.
        at_end = layout.answers is not None or pooling != "lasttoken"
        template = layout.template
        return EncoderConfig(
            *(*sizes, source.labels, limit, pooling, False, scores, segments),
            template=None if template is None else template.pieces,
            instruction=None if template is None else template.instruction,
            unread=None if at_end else config.pad_token_id,
        )
    return EncoderConfig(
        *(*sizes, width, limit, "+".join(layout.pooling), layout.normalized),
        prompts=layout.prompts or None,
        default_prompt=layout.default_prompt,
        heads=tuple(head.kind for head in layout.heads) or None,
        unweighted=layout.unweighted,
    )


def _has_segments(source: EncoderSource) -> bool:
    """Return whether a model that scores is given the segments of a pair of texts."""
    config = source.config
    count = config.type_vocab_size if "type_vocab_size" in ENCODERS[config.model_type].keys else 0
    if config.model_type in WITH_SEGMENTS:
        return count > 1 and source.layout.has_segments is not False
    if count > 1 and source.layout.has_segments:
        raise unsupported(
            config,
            f"type_vocab_size: expected 1 for {config.model_type} with a tokenizer that gives segments "
            f"(tokenizer_config.json: tokenizer_class, model_input_names), found {count}",
        )
    return False


def make_encoder(
    source: EncoderSource,
    dtype: str = "float32",
    *,
    out_in: bool = False,
    groups: Groups = GROUPS_OF_32,
    chosen: Mapping[str, str] = MappingProxyType({}),
) -> WholeEncoder:
    """Return an encoder as an abstract module: its parameters are shapes without values.

    `source` is from `config_file.load_encoder`, `dtype` a name in STORED_DTYPES, `out_in` and `groups` as in
    `make_decoder`, `chosen` as in `quantizing.store`.
    """
    describe_encoder(source)
    family = ENCODERS[source.config.model_type]
    with kernel_calls.storing(out_in=out_in):
        module: WholeEncoder = nnx.eval_shape(lambda: _encoder(source, family))
    quantizing.store(module, dtype, groups, chosen)
    return module


def _encoder(source: EncoderSource, family: Family) -> WholeEncoder:
    config, prefix = source.config, family.naming.prefix
    transformer = family.build(config, None)
    if not source.labels:
        return PooledEncoder(source.layout, prefix, transformer, config.hidden_size)
    head, segments = HEADS[config.model_type], _has_segments(source)
    return ScoringEncoder(
        head, config, prefix, transformer, labels=source.labels, segments=segments
    )


def naming_of(config: Any) -> Naming:
    """Return how published checkpoints of a model that generates name their tensors."""
    return SEEING if getattr(config, "sight", None) else DECODERS[config.model_type].naming


def encoder_naming(source: EncoderSource) -> Naming:
    """Return how published checkpoints of an encoder name their tensors."""
    kind = source.config.model_type
    naming = ENCODERS[kind].naming
    if not source.labels:
        return naming
    own = HEADS[kind].names
    # What is a head of pretraining for an encoder that embeds, may be a part of this one.
    ignored = [start for start in naming.ignored if not any(n.startswith(start) for n in own)]
    return replace(naming, ignored=tuple(ignored), beside=own)


def _decoder_family(config: Any) -> Family:
    if config.model_type not in DECODERS:
        raise unsupported(config, f"model_type: found {shown(config.model_type)}")
    return DECODERS[config.model_type]
