"""The table of further decoders (see decoder_table.py): relatives of Llama and Granite, and older ones.

Sources:

exaone      LG AI Research 2024, arXiv 2408.03541 and 2412.04862 (EXAONE 3 and 3.5)
falcon      Almazrouei et al. 2023, arXiv 2311.16867 (7B, 11B, 40B, 180B)
gpt_bigcode Li et al. 2023, arXiv 2305.06161 (StarCoder, SantaCoder)
gpt_neo     Black et al. 2021, GPT-Neo; Eldan and Li 2023, arXiv 2305.07759 (TinyStories)
gptj        Wang and Komatsuzaki 2021, GPT-J-6B
granite_swa IBM 2026, Granite with windows and sinks
hyperclovax NAVER Cloud 2025, HyperCLOVA X SEED Think
internlm3   Shanghai AI Laboratory 2025, InternLM3
iquestcoder IQuest 2026, IQuest-Coder-V1
jais2       Inception, MBZUAI and Cerebras 2025, Jais 2
minicpm3    Hu et al. 2024, arXiv 2404.06395, and OpenBMB 2024, MiniCPM3-4B; latent attention
nanochat    Karpathy 2025, nanochat
opt         Zhang et al. 2022, arXiv 2205.01068; all sizes but 350M, which norms after each part
youtu       Tencent 2026, Youtu-LLM 2B; latent attention
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from prejit.compiler.models.families import latent_attention
from prejit.compiler.models.families.decoder_family import DecoderFamily, DecoderNames, Factors
from prejit.compiler.models.families.decoder_table import (
    GPT2,
    GPT2_KEYS,
    GRANITE,
    LLAMA,
    MULTIPLIERS,
    NAMING,
    UNGATED,
    rotary,
)
from prejit.compiler.models.families.decoders import TextDecoder
from prejit.compiler.models.families.family import Family
from prejit.compiler.models.layers import rope
from prejit.compiler.models.layers.config_checks import INNER, INNER_OR_NULL, checks_of
from prejit.compiler.models.layers.layer_config import Naming, require
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


_YOUTU = DecoderFamily(
    output_bias="attention_bias",
    is_interleaved="rope_interleave",
    scale=lambda config, layer: latent_attention.scale(config),
    is_latent=True,
)


def _minicpm3_factors(config: Any) -> Factors:
    added = config.scale_depth / config.num_hidden_layers**0.5
    return Factors(attention=added, mlp=added)


_MINICPM3 = replace(
    _YOUTU,
    mlp_bias="mlp_bias",
    is_interleaved=False,
    factors=_minicpm3_factors,
    embedding_scale=lambda config: config.scale_emb,
    logit_scale=lambda config: config.dim_model_base / config.hidden_size,
)
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

_BUFFERS = (".attn.bias", ".attn.masked_bias")
_GPTJ = replace(
    GPT2,
    names=replace(
        GPT2.names,
        positions="",
        qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        output="attn.out_proj",
        mlp_norm="",
        up=("mlp.fc_in",),
        down="mlp.fc_out",
    ),
    bias=False,
    head_bias=True,
    is_parallel=True,
    turns="whole",
    rotary=lambda config, size: rope.first_components(config, size, config.rotary_dim),
    scale=None,
)


_NEO = replace(
    GPT2,
    names=replace(
        GPT2.names,
        qkv=("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"),
        output="attn.attention.out_proj",
    ),
    inner="intermediate_size",
    bias=False,
    output_bias=True,
    windows=lambda config, layer: (
        config.window_size if config.attention_layers[layer] == "local" else None
    ),
    scale=lambda config, layer: 1.0,
)


def _shares_one(config: Any) -> int:
    return 1 if config.multi_query else int(config.num_attention_heads)


_BIGCODE = replace(
    GPT2,
    has_qkv_by_head=True,
    key_heads=_shares_one,
    scale=lambda config, layer: (
        (config.hidden_size // config.num_attention_heads) ** -0.5
        if config.scale_attn_weights
        else 1.0
    ),
)
_OPT = DecoderFamily(
    DecoderNames(
        model="model.decoder",
        positions="embed_positions",
        norm="final_layer_norm",
        attention_norm="self_attn_layer_norm",
        output="self_attn.out_proj",
        mlp_norm="final_layer_norm",
        up=("fc1",),
        down="fc2",
    ),
    norm=LayerNorm,
    epsilon=1e-5,
    activation="activation_function",
    inner="ffn_dim",
    is_gated=False,
    bias="enable_bias",
    mlp_bias="enable_bias",
    unused_positions=2,
    turns="",
)
_FALCON = DecoderFamily(
    DecoderNames(
        model="transformer",
        embedding="word_embeddings",
        layers="h",
        norm="ln_f",
        qkv=("self_attention.query_key_value",),
        output="self_attention.dense",
        up=("mlp.dense_h_to_4h",),
        down="mlp.dense_4h_to_h",
    ),
    norm=LayerNorm,
    epsilon="layer_norm_epsilon",
    activation="activation",
    inner="ffn_hidden_size",
    is_gated=False,
    bias="bias",
    mlp_bias="bias",
    has_qkv_by_head=True,
    key_heads=lambda config: (
        int(config.num_kv_heads) if config.new_decoder_architecture else _shares_one(config)
    ),
)


def _falcon(config: Any, context: int | None) -> TextDecoder:
    """Return Falcon, whose blocks have two norms, or one that attention and the MLP share."""
    names, is_parallel = _FALCON.names, config.parallel_attn
    if config.new_decoder_architecture and config.num_ln_in_parallel_attn in (None, 2):
        names = replace(names, attention_norm="ln_attn", mlp_norm="ln_mlp")
    elif is_parallel:
        names = replace(names, mlp_norm="")
    return TextDecoder(replace(_FALCON, names=names, is_parallel=is_parallel), config, context)


def _check_neo(config: Any) -> None:
    for kind in config.attention_layers:
        require(config, "attention_types", kind, ["global", "local"])
    _NEO.heads(config)


def _check_falcon(config: Any) -> None:
    norms: list[int | None] = [None, 1]
    if config.new_decoder_architecture:
        require(config, "parallel_attn", config.parallel_attn, [True])
        norms.append(2)
        heads, groups = config.num_attention_heads, config.num_kv_heads
        divisors = [count for count in range(1, heads + 1) if heads % count == 0]
        require(config, "num_kv_heads", groups, divisors)
    require(config, "num_ln_in_parallel_attn", config.num_ln_in_parallel_attn, norms)
    _FALCON.heads(config)


FURTHER_DECODERS: Mapping[str, Family] = {
    "exaone": rotary(LLAMA, naming=_EXAONE_NAMING),
    "granite_swa": rotary(with_sinks(GRANITE), *MULTIPLIERS, "layer_rope_theta"),
    "hyperclovax": rotary(_HYPERCLOVAX, *MULTIPLIERS, "use_post_norm", build=_hyperclovax),
    "internlm3": rotary(LLAMA),
    "iquestcoder": rotary(LLAMA),
    "jais2": rotary(_JAIS2),
    "minicpm3": rotary(
        _MINICPM3,
        *(*latent_attention.KEYS, "scale_emb", "scale_depth", "dim_model_base"),
    ),
    "nanochat": rotary(_NANOCHAT),
    "falcon": replace(
        rotary(
            _FALCON,
            *("num_kv_heads", "multi_query", "parallel_attn", "new_decoder_architecture"),
            naming=Naming("transformer.", "lm_head.weight", "transformer.word_embeddings.weight"),
            grouped=False,
            alibi=(False,),
            build=_falcon,
            check=_check_falcon,
        ),
        multiples=(("hidden_size", "num_attention_heads"),),
    ),
    "gpt_bigcode": Family(
        partial(TextDecoder, _BIGCODE),
        Naming("transformer.", "lm_head.weight", "transformer.wte.weight", buffers=_BUFFERS),
        checks_of(*GPT2_KEYS, "multi_query", "scale_attn_weights"),
        activation=_BIGCODE.activation,
        allowed={"add_cross_attention": (False,)},
        multiples=(("n_embd", "n_head"),),
    ),
    "gpt_neo": Family(
        partial(TextDecoder, _NEO),
        Naming(
            "transformer.",
            "lm_head.weight",
            "transformer.wte.weight",
            buffers=(".attn.attention.bias", ".attn.attention.masked_bias"),
        ),
        checks_of(
            *("vocab_size", "hidden_size", "num_layers", "num_heads", "max_position_embeddings"),
            *("layer_norm_epsilon", "activation_function", "tie_word_embeddings"),
            window_size=INNER,
            intermediate_size=INNER_OR_NULL,
        ),
        activation=_NEO.activation,
        multiples=(("hidden_size", "num_heads"),),
        check=_check_neo,
    ),
    "gptj": Family(
        partial(TextDecoder, _GPTJ),
        Naming("transformer.", "lm_head.weight", "transformer.wte.weight", buffers=_BUFFERS),
        checks_of(*GPT2_KEYS, rotary_dim=INNER),
        activation=_GPTJ.activation,
        allowed={"tie_word_embeddings": (False,)},
        multiples=(("n_embd", "n_head"),),
        check=_GPTJ.heads,
    ),
    "opt": Family(
        partial(TextDecoder, _OPT),
        Naming("model.", "lm_head.weight", "model.decoder.embed_tokens.weight"),
        checks_of(
            *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "ffn_dim"),
            *("max_position_embeddings", "activation_function", "enable_bias"),
            *("word_embed_proj_dim", "tie_word_embeddings"),
        ),
        activation=_OPT.activation,
        allowed={
            "do_layer_norm_before": (True,),
            "_remove_final_layer_norm": (False,),
            "layer_norm_elementwise_affine": (True,),
        },
        multiples=(("hidden_size", "num_attention_heads"),),
        check=lambda config: require(
            config, "word_embed_proj_dim", config.word_embed_proj_dim, [config.hidden_size]
        ),
    ),
    "youtu": rotary(_YOUTU, *latent_attention.KEYS),
}
"""The further decoders, by model_type."""
