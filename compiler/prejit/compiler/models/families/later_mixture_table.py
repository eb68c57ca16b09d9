"""The table of more decoders with mixtures of experts (see mixture_table.py).

Sources:

granitemoe_swa    IBM 2026, Granite with windows and sinks
phimoe      Li et al. 2025, arXiv 2506.18349 (Phi-mini-MoE and Phi-tiny-MoE); Phi-3.5-MoE turns by LongRoPE,
            which transformers scales in a way of its own, and is refused
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from prejit.compiler.models.families.decoder_family import Experts
from prejit.compiler.models.families.decoder_table import MULTIPLIERS, NAMING, rotary
from prejit.compiler.models.families.family import Family
from prejit.compiler.models.families.llama_like_table import with_sinks
from prejit.compiler.models.families.mixture_table import (
    GRANITE_SHARED,
    MIXTRAL,
    stacked_experts,
    without_weight,
)
from prejit.compiler.models.layers.experts import Routing
from prejit.compiler.models.layers.layer_config import require
from prejit.compiler.models.layers.linear import LayerNorm

_GRANITE_SWA = with_sinks(
    replace(
        GRANITE_SHARED,
        names=replace(
            GRANITE_SHARED.names,
            router="block_sparse_moe.router",
            experts_up=MIXTRAL.names.experts_up,
            experts_down=MIXTRAL.names.experts_down,
        ),
    )
)
_PHIMOE = replace(
    MIXTRAL,
    norm=LayerNorm,
    bias="attention_bias",
    head_bias="lm_head_bias",
    experts=Experts(routing=lambda config: Routing(2, margin=2 * config.router_jitter_noise)),
)


def _check_phimoe(config: Any) -> None:
    """Check what transformers reads otherwise than for other families."""
    kind = config.rope_parameters.get("rope_type")
    require(config, "rope_parameters.rope_type", kind, ["default"])
    if config.lm_head_bias:  # a table of embeddings that is the head, too, has no bias
        require(config, "tie_word_embeddings", config.tie_word_embeddings, [False])
    _PHIMOE.heads(config)


LATER_MIXTURES: Mapping[str, Family] = {
    "granitemoe_swa": rotary(
        _GRANITE_SWA,
        *(*MULTIPLIERS, "shared_intermediate_size", "layer_rope_theta"),
        naming=replace(NAMING, renamed=without_weight(_GRANITE_SWA.names)),
    ),
    "phimoe": rotary(
        _PHIMOE,
        "router_jitter_noise",
        naming=stacked_experts(_PHIMOE.names, "w1", "w3", "w2"),
        num_experts_per_tok=(2,),
        check=_check_phimoe,
    ),
}
"""More mixtures of experts, by model_type."""
