"""The table of decoders that are Llama or Granite but for little (see decoder_table.py).

Sources:

exaone      LG AI Research 2024, arXiv 2408.03541 and 2412.04862 (EXAONE 3 and 3.5)
granite_swa IBM 2026, Granite with windows and sinks
hyperclovax NAVER Cloud 2025, HyperCLOVA X SEED Think
internlm3   Shanghai AI Laboratory 2025, InternLM3
iquestcoder IQuest 2026, IQuest-Coder-V1
jais2       Inception, MBZUAI and Cerebras 2025, Jais 2
nanochat    Karpathy 2025, nanochat
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from prejit.compiler.models.families.decoder_family import DecoderFamily, DecoderNames
from prejit.compiler.models.families.decoder_table import (
    GRANITE,
    LLAMA,
    MULTIPLIERS,
    NAMING,
    UNGATED,
    rotary,
)
from prejit.compiler.models.families.decoders import TextDecoder
from prejit.compiler.models.families.family import Family
from prejit.compiler.models.layers.linear import LayerNorm, RMSNorm

_EXAONE_NAMING = replace(
    NAMING,
    # the names in which EXAONE 3 and 3.5 were published
    moved=(
        ("transformer.wte.", "model.embed_tokens."),
        ("transformer.h.", "model.layers."),
        ("transformer.ln_f.", "model.norm."),
    ),
    renamed=tuple(
        (f".{published}.{last}", f".{ours}.{last}")
        for published, ours in (
            *((f"attn.attention.{part}_proj", f"self_attn.{part}_proj") for part in "qkv"),
            ("attn.attention.out_proj", "self_attn.o_proj"),
            ("ln_1", "input_layernorm"),
            ("ln_2", "post_attention_layernorm"),
            ("mlp.c_fc_0", "mlp.gate_proj"),
            ("mlp.c_fc_1", "mlp.up_proj"),
            ("mlp.c_proj", "mlp.down_proj"),
        )
        for last in ("weight", "bias")
    ),
)
_HYPERCLOVAX = replace(GRANITE, logit_scale=lambda config: config.logits_scaling)


def with_sinks(family: DecoderFamily) -> DecoderFamily:
    """Return a family with a sink for each head, and windows and rotary positions by layer."""
    names = replace(family.names, sinks="self_attn.sinks")
    return replace(family, names=names, windows="by type", turns="by layer")


def _hyperclovax(config: Any, context: int | None) -> TextDecoder:
    """Return HyperCLOVA X, which may have norms of what is added."""
    names = _HYPERCLOVAX.names
    if config.use_post_norm:
        names = replace(names, after_attention="post_norm1", after_mlp="post_norm2")
    return TextDecoder(replace(_HYPERCLOVAX, names=names), config, context)


_JAIS2 = replace(LLAMA, names=UNGATED, norm=LayerNorm, epsilon="layer_norm_eps", is_gated=False)

_NANOCHAT = DecoderFamily(
    DecoderNames(up=("mlp.fc1",), down="mlp.fc2"),
    norm=partial(RMSNorm, scale=False),
    is_gated=False,
    bias="attention_bias",
    norms_turned=lambda config, layer: True,
    turns_back=True,
    norms_embeddings=True,
    logit_cap="final_logit_softcapping",
)

LLAMA_LIKE: Mapping[str, Family] = {
    "exaone": rotary(LLAMA, naming=_EXAONE_NAMING),
    "granite_swa": rotary(with_sinks(GRANITE), *MULTIPLIERS, "layer_rope_theta"),
    "hyperclovax": rotary(_HYPERCLOVAX, *MULTIPLIERS, "use_post_norm", build=_hyperclovax),
    "internlm3": rotary(LLAMA),
    "iquestcoder": rotary(LLAMA),
    "jais2": rotary(_JAIS2),
    "nanochat": rotary(_NANOCHAT),
}
"""Decoders that differ from Llama in a few settings, by model_type."""
