"""The table of decoders: for each model_type how it differs from Llama, and what it reads of config.json.

further_decoder_table.py and lfm_table.py have more, mixture_table.py those with experts.

A family that differs from one here in names, norms, biases or the like is a row. Logits agree with those of
transformers 5, models/NAME/modeling_NAME.py, of the same name. Sources:

    apertus     Swiss AI 2025, arXiv 2509.14233
    arcee       Arcee AI 2025, AFM-4.5B
    cohere      Cohere 2024, Command R and R+
    cohere2     Cohere 2025, arXiv 2504.00698 (Command A, Command R7B)
    cwm         FAIR CodeGen 2025, arXiv 2510.02387
    ernie4_5    Baidu 2025, ERNIE 4.5 Technical Report; the dense models
    exaone4     LG AI Research 2025, arXiv 2507.11407
    gemma       Gemma Team 2024, arXiv 2403.08295
    gemma2      Gemma Team 2024, arXiv 2408.00118
    gemma3      Gemma Team 2025, arXiv 2503.19786; of a model that also reads images, the text model
    glm, glm4   GLM Team 2024, arXiv 2406.12793 (GLM 4; GLM 4 of 0414 is glm4)
    gpt2        Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"
    gpt_neox    Black et al. 2022, arXiv 2204.06745; Biderman et al. 2023 (Pythia), 2304.01373
    granite     IBM 2024, Granite 3.0 Language Models
    helium      Kyutai 2025, Helium 1
    hunyuan_v1_dense    Tencent 2025, Hunyuan 0.5B to 7B
    llama       Touvron et al. 2023 (Llama 2), arXiv 2307.09288; Grattafiori et al. 2024 (Llama 3), 2407.21783
                (also Falcon 3, Yi, SmolLM 2)
    ministral, ministral3   Mistral AI 2024 and 2025; of a model that also reads images, the text model
    mistral     Jiang et al. 2023, arXiv 2310.06825
    nemotron    Parmar et al. 2024, arXiv 2402.16819 (Nemotron 4, Minitron)
    olmo        Groeneveld et al. 2024, arXiv 2402.00838
    olmo2, olmo3    OLMo Team 2024, arXiv 2501.00656; 2025, 2512.13961
    phi         Li et al. 2023, arXiv 2309.05463 (Phi 1, 1.5 and 2)
    phi3        Abdin et al. 2024, arXiv 2404.14219 (Phi-3, 3.5 and 4)
    qwen2       Yang et al. 2024, arXiv 2407.10671 (Qwen 2 and 2.5)
    qwen3       Yang et al. 2025, arXiv 2505.09388
    seed_oss    ByteDance Seed 2025, Seed-OSS
    smollm3     Hugging Face 2025, SmolLM3
    stablelm    Bellagente et al. 2024, arXiv 2402.17834 (StableLM 2 of 1.6 billion, StableLM 3B)
    starcoder2  Lozhkov et al. 2024, arXiv 2402.19173
    vaultgemma  Sinha et al. 2025, arXiv 2510.15001
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from prejit.compiler.models.families.decoder_family import DecoderFamily, DecoderNames, Factors
from prejit.compiler.models.families.decoders import TextDecoder
from prejit.compiler.models.families.family import Family
from prejit.compiler.models.families.seeing_decoder import SeeingDecoder
from prejit.compiler.models.layers.config_checks import checks_of
from prejit.compiler.models.layers.layer_config import Naming
from prejit.compiler.models.layers.linear import LayerNorm, RMSNorm

_SIZES = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("max_position_embeddings", "tie_word_embeddings", "rope_parameters", "head_dim"),
)
NAMING = Naming(
    prefix="model.",
    head="lm_head.weight",
    embedding="model.embed_tokens.weight",
    buffers=(".rotary_emb.inv_freq",),
)
TEXT_PART = replace(
    NAMING,
    ignored=("model.vision_tower.", "model.multi_modal_projector."),
    # the names in which transformers 5, 4.52 and older saved models that read images
    moved=(
        ("model.language_model.", "model."),
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
    ),
)
"""The names of a text model that is a part of one that reads images."""
_TOWER = "vision_tower."
SEEING = replace(
    NAMING,
    # The decoder reads what the tower finds in each patch, and not what its head makes of all.
    ignored=(f"model.{_TOWER}head.",),
    moved=(
        *TEXT_PART.moved,
        *((f"{start}{_TOWER}vision_model.", f"model.{_TOWER}") for start in ("", "model.")),
    ),
    buffers=(*NAMING.buffers, ".embeddings.position_ids"),
    renamed=(("mm_input_projection_weight", "mm_input_projection.weight"),),
    in_out=("mm_input_projection_weight",),
)
"""The names of that model with the parts that read images."""


def rotary(
    family: DecoderFamily,
    *keys: str,
    naming: Naming = NAMING,
    grouped: bool = True,
    build: Callable[[Any, int | None], TextDecoder] | None = None,
    check: Callable[[Any], None] | None = None,
    multiples: tuple[tuple[str, str], ...] = (),
    **allowed: Any,
) -> Family:
    """Return a family whose heads turn.

    `keys` are those that it reads beside the ones that its fields name, and `allowed` gives the supported
    values of keys. `grouped`: whether query heads may share a key/value head. `build` and `check` take
    the place of the family's; `multiples` are others than that of heads.
    """
    groups = ("num_key_value_heads",) if grouped else ()
    windows = {"": (), "each": ("sliding_window",), "by type": ("sliding_window", "layer_types")}
    of_windows = windows[family.windows] if isinstance(family.windows, str) else ()
    return Family(
        build or partial(TextDecoder, family),
        naming,
        checks_of(*_SIZES, *groups, *family.keys, *of_windows, *keys),
        activation=family.activation,
        allowed=allowed,
        multiples=(*(("num_attention_heads", key) for key in groups), *multiples),
        check=check or family.heads,
    )


def in_sliding_layers(config: Any, layer: int) -> bool:
    """Return whether a layer has a window, by its type."""
    return bool(config.layer_types[layer] == "sliding_attention")


def _gpt2_scale(config: Any, layer: int) -> float:
    heads: int = config.num_attention_heads
    scale = (config.hidden_size // heads) ** -0.5 if config.scale_attn_weights else 1.0
    return scale / (layer + 1) if config.scale_attn_by_inverse_layer_idx else scale


def _root_of_width(config: Any) -> float:
    return float(config.hidden_size**0.5)


HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
GPT2 = DecoderFamily(
    DecoderNames(
        model="transformer",
        embedding="wte",
        positions="wpe",
        layers="h",
        norm="ln_f",
        attention_norm="ln_1",
        qkv=("attn.c_attn",),
        output="attn.c_proj",
        mlp_norm="ln_2",
        up=("mlp.c_fc",),
        down="mlp.c_proj",
    ),
    norm=LayerNorm,
    epsilon="layer_norm_epsilon",
    activation="activation_function",
    inner="n_inner",
    is_gated=False,
    bias=True,
    mlp_bias=True,
    turns="",
    scale=_gpt2_scale,
)
_GEMMA2 = DecoderFamily(
    DecoderNames(
        after_attention="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        after_mlp="post_feedforward_layernorm",
    ),
    norm=partial(RMSNorm, offset=1.0),  # scales are published minus 1
    activation="hidden_activation",
    bias="attention_bias",
    windows="by type",
    scale=lambda config, layer: config.query_pre_attn_scalar**-0.5,
    score_cap="attn_logit_softcapping",
    logit_cap="final_logit_softcapping",
    embedding_scale=_root_of_width,
)
GEMMA3 = replace(
    _GEMMA2,
    names=replace(_GEMMA2.names, head_norms=HEAD_NORMS),
    turns="by type",
    score_cap="",  # transformers' text model has no bound of the scores, whatever the configuration holds
)
_PHI3 = DecoderNames(qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",))
LLAMA = DecoderFamily(bias="attention_bias", mlp_bias="mlp_bias")
QWEN2 = DecoderFamily(bias=True, output_bias=False, windows="by type")
QWEN3 = DecoderFamily(DecoderNames(head_norms=HEAD_NORMS), bias="attention_bias", windows="by type")
NORMED_AFTER = DecoderNames(
    attention_norm="",
    head_norms=HEAD_NORMS,
    after_attention="post_attention_layernorm",
    mlp_norm="",
    after_mlp="post_feedforward_layernorm",
)
_OLMO2 = DecoderFamily(NORMED_AFTER, bias="attention_bias", norms_heads="all")
EXAONE4 = DecoderFamily(
    NORMED_AFTER,
    windows="by type",
    turns_layer=lambda config, layer: (
        config.sliding_window is None or in_sliding_layers(config, layer)
    ),
)


def _granite_factors(config: Any) -> Factors:
    scale = float(config.residual_multiplier)
    return Factors(attention=scale, state=scale, mlp=scale)


GRANITE = replace(
    LLAMA,
    scale=lambda config, layer: config.attention_multiplier,
    embedding_scale=lambda config: config.embedding_multiplier,
    logit_scale=lambda config: 1 / config.logits_scaling,
    factors=_granite_factors,
)
MULTIPLIERS = (
    *("attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier"),
)
_SMOLLM3 = replace(
    LLAMA, windows="by type", turns_layer=lambda config, layer: bool(config.no_rope_layers[layer])
)
HUNYUAN = DecoderFamily(
    DecoderNames(head_norms=("self_attn.query_layernorm", "self_attn.key_layernorm")),
    bias="attention_bias",
    norms_heads="turned",
    rope_extra="alpha",
)
_GLM = DecoderFamily(
    DecoderNames(up=("mlp.gate_up_proj",)),
    bias="attention_bias",
    output_bias=False,
    turns="part",
    is_interleaved=True,
)
_GLM4 = replace(
    _GLM,
    names=replace(
        _GLM.names, after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm"
    ),
)
UNGATED = DecoderNames(up=("mlp.up_proj",))
_NEMOTRON = replace(
    LLAMA,
    names=UNGATED,
    norm=partial(LayerNorm, offset=1.0),  # scales are published minus 1
    epsilon="norm_eps",
    is_gated=False,
    turns="part",
)
_STARCODER2 = DecoderFamily(
    DecoderNames(up=("mlp.c_fc",), down="mlp.c_proj"),
    norm=LayerNorm,
    epsilon="norm_epsilon",
    is_gated=False,
    bias="use_bias",
    mlp_bias="use_bias",
    windows="each",
)
_GPT_NEOX = DecoderFamily(
    DecoderNames(
        model="gpt_neox",
        embedding="embed_in",
        norm="final_layer_norm",
        qkv=("attention.query_key_value",),
        output="attention.dense",
        up=("mlp.dense_h_to_4h",),
        down="mlp.dense_4h_to_h",
    ),
    norm=LayerNorm,
    epsilon="layer_norm_eps",
    is_gated=False,
    bias="attention_bias",
    mlp_bias=True,
    is_parallel="use_parallel_residual",
    has_qkv_by_head=True,
    turns="part",
)
_PHI = DecoderFamily(
    DecoderNames(
        norm="final_layernorm",
        output="self_attn.dense",
        mlp_norm="",
        up=("mlp.fc1",),
        down="mlp.fc2",
    ),
    norm=LayerNorm,
    epsilon="layer_norm_eps",
    is_gated=False,
    bias=True,
    mlp_bias=True,
    head_bias=True,
    is_parallel=True,
    turns="part",
)
_STABLELM = DecoderFamily(
    norm=LayerNorm, epsilon="layer_norm_eps", bias="use_qkv_bias", output_bias=False, turns="part"
)
COHERE2 = DecoderFamily(
    DecoderNames(mlp_norm=""),
    norm=partial(LayerNorm, bias=False),
    epsilon="layer_norm_eps",
    bias="attention_bias",
    is_parallel=True,
    turns_layer=in_sliding_layers,
    is_interleaved=True,
    windows="by type",
    logit_scale=lambda config: config.logit_scale,
)
_COHERE = replace(COHERE2, turns_layer=LLAMA.turns_layer, windows="", norms_heads="own")


def normed_if_large(family: DecoderFamily, config: Any, context: int | None) -> TextDecoder:
    """Return a decoder of a family whose larger models alone have norms of heads."""
    names = replace(family.names, head_norms=HEAD_NORMS if config.use_qk_norm else ())
    return TextDecoder(replace(family, names=names), config, context)


_OLMO = DecoderFamily(
    norm=partial(LayerNorm, scale=False, bias=False),
    epsilon=1e-5,
    bias="attention_bias",
    clip="clip_qkv",
)
_VAULT_GEMMA = replace(_GEMMA2, names=replace(_GEMMA2.names, after_attention="", after_mlp=""))
_GEMMA = DecoderFamily(norm=_GEMMA2.norm, bias="attention_bias", embedding_scale=_root_of_width)
_SEED = replace(LLAMA, output_bias="attention_out_bias")
ERNIE = DecoderFamily(bias="use_bias", mlp_bias="use_bias", is_interleaved=True)


_APERTUS = DecoderFamily(
    replace(
        UNGATED,
        attention_norm="attention_layernorm",
        head_norms=HEAD_NORMS,
        mlp_norm="feedforward_layernorm",
        activation="mlp.act_fn",
    ),
    bias="attention_bias",
    is_gated=False,
)
GPT2_KEYS = (
    *("vocab_size", "n_positions", "n_embd", "n_head", "n_layer", "n_inner"),
    *("layer_norm_epsilon", "activation_function", "tie_word_embeddings"),
)
_NOT_BOTH_WAYS: dict[str, Any] = {"use_bidirectional_attention": (None, False)}
QWEN_KEYS = ("use_sliding_window", "max_window_layers")

TEXT_DECODERS: Mapping[str, Family] = {
    "apertus": replace(
        rotary(
            _APERTUS,
            # a name that ends like that of a norm in files from TensorFlow
            naming=replace(NAMING, renamed=((".act_fn.bias", ".act_fn.beta"),)),
            hidden_act=("xielu",),
        ),
        activation="",
    ),
    "arcee": rotary(replace(LLAMA, names=UNGATED, is_gated=False)),
    "cohere": rotary(
        _COHERE, "logit_scale", use_qk_norm=(False, True), build=partial(normed_if_large, _COHERE)
    ),
    "cohere2": rotary(COHERE2, "logit_scale"),
    "cwm": rotary(DecoderFamily(mlp_bias="mlp_bias", windows="by type")),
    "ernie4_5": rotary(ERNIE),
    "exaone4": rotary(EXAONE4),
    "gemma": rotary(_GEMMA, **_NOT_BOTH_WAYS),
    "gemma2": rotary(_GEMMA2, "query_pre_attn_scalar", **_NOT_BOTH_WAYS),
    "gemma3_text": replace(
        rotary(
            GEMMA3,
            *("query_pre_attn_scalar", "attn_logit_softcapping"),
            naming=TEXT_PART,
            attn_logit_softcapping=(None,),
            **_NOT_BOTH_WAYS,
        ),
        seeing=partial(SeeingDecoder, GEMMA3),
    ),
    "glm": rotary(_GLM),
    "glm4": rotary(_GLM4),
    "gpt2": Family(
        partial(TextDecoder, GPT2),
        Naming(
            prefix="transformer.",
            head="lm_head.weight",
            embedding="transformer.wte.weight",
            # transformers' Conv1D stores (in, out)
            in_out=(".c_attn.weight", ".c_proj.weight", ".c_fc.weight"),
            buffers=(".attn.bias", ".attn.masked_bias"),
        ),
        checks_of(*GPT2_KEYS, "scale_attn_weights", "scale_attn_by_inverse_layer_idx"),
        activation=GPT2.activation,
        allowed={"add_cross_attention": (False,)},
        multiples=(("n_embd", "n_head"),),
    ),
    "gpt_neox": rotary(
        _GPT_NEOX,
        naming=Naming(
            prefix="gpt_neox.",
            head="lm_head.weight",
            embedding="gpt_neox.embed_in.weight",
            buffers=(".attention.bias", ".attention.masked_bias", *NAMING.buffers),
            moved=(("embed_out.", "lm_head."),),
        ),
        grouped=False,
    ),
    "granite": rotary(GRANITE, *MULTIPLIERS),
    "helium": rotary(replace(LLAMA, output_bias=False, is_interleaved=True)),
    "hunyuan_v1_dense": rotary(HUNYUAN),
    "llama": rotary(LLAMA),
    "ministral": rotary(DecoderFamily(windows="by type")),
    "ministral3": rotary(DecoderFamily(rope_extra="growth", windows="each"), naming=TEXT_PART),
    "mistral": rotary(DecoderFamily(windows="each"), naming=TEXT_PART),
    "nemotron": rotary(_NEMOTRON),
    "olmo": rotary(_OLMO),
    "olmo2": rotary(_OLMO2),
    "olmo3": rotary(replace(_OLMO2, turns="by type", windows="by type")),
    "phi": rotary(_PHI, qk_layernorm=(False,), tie_word_embeddings=(False,)),
    "phi3": rotary(DecoderFamily(_PHI3, turns="part", windows="each")),
    "qwen2": rotary(QWEN2, *QWEN_KEYS),
    "qwen3": rotary(QWEN3, *QWEN_KEYS),
    "seed_oss": rotary(_SEED),
    "smollm3": rotary(_SMOLLM3, "no_rope_layers", "use_sliding_window"),
    "stablelm": rotary(_STABLELM, use_parallel_residual=(False,), qk_layernorm=(False,)),
    "starcoder2": rotary(_STARCODER2),
    "vaultgemma": rotary(_VAULT_GEMMA, "query_pre_attn_scalar"),
}
"""The decoders, by model_type."""
