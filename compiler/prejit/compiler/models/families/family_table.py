"""The table of model families: for each model_type what it reads of config.json and what makes its module.

A family that differs from one here in names, norms, biases or the like is a row. Logits agree with those of
transformers 5, models/NAME/modeling_NAME.py, of the same name. Sources:

    bert        Devlin et al. 2018, arXiv 1810.04805
    distilbert  Sanh et al. 2019, arXiv 1910.01108
    gemma2      Gemma Team 2024, arXiv 2408.00118
    gemma3      Gemma Team 2025, arXiv 2503.19786; of a model that also reads images, the text model
    gpt2        Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"
    llama       Touvron et al. 2023 (Llama 2), arXiv 2307.09288; Grattafiori et al. 2024 (Llama 3), 2407.21783
    mistral     Jiang et al. 2023, arXiv 2310.06825
    phi3        Abdin et al. 2024, arXiv 2404.14219 (Phi-3, 3.5 and 4)
    qwen2       Yang et al. 2024, arXiv 2407.10671 (Qwen 2 and 2.5)
    qwen3       Yang et al. 2025, arXiv 2505.09388
    roberta     Liu et al. 2019, arXiv 1907.11692
    t5, whisper encoder_decoders.py has theirs
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from flax import nnx

from prejit.compiler.models.families import encoder_decoders
from prejit.compiler.models.families.decoders import DecoderFamily, DecoderNames, TextDecoder
from prejit.compiler.models.families.encoders import EncoderFamily, EncoderNames, TextEncoder
from prejit.compiler.models.layers.config_checks import INNER, Checks, checks_of
from prejit.compiler.models.layers.layer_config import Naming, require, unsupported
from prejit.compiler.models.layers.linear import ACTIVATIONS, LayerNorm, RMSNorm


def _positions(config: Any) -> int:
    return int(config.max_position_embeddings)


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        build: returns the module for a configuration, and for programs up to a context; None: the longest.
        naming: how published checkpoints name its tensors.
        keys: the keys of config.json that it reads, with the check of each value.
        activation: key of the activation; empty: `check` looks at it.
        allowed: other keys, with the values that are supported; the first is that of a missing key.
        multiples: pairs of keys; the value of the first must be a multiple of that of the second.
        check: raises CheckpointError where a configuration is not supported for another reason.
        positions: returns the maximum number of tokens.
    """

    build: Callable[[Any, int | None], nnx.Module]
    naming: Naming
    keys: Checks
    activation: str = "hidden_act"
    allowed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    multiples: tuple[tuple[str, str], ...] = ()
    check: Callable[[Any], object] = lambda config: None
    positions: Callable[[Any], int] = _positions

    def require_supported(self, config: Any) -> None:
        """Check a configuration.

        Raises:
            CheckpointError: a setting is not supported; the error names file, key, value and what is allowed.
        """
        if self.activation:
            require(config, self.activation, getattr(config, self.activation), ACTIVATIONS)
        for key, values in self.allowed.items():
            require(config, key, getattr(config, key, values[0]), values)
        for key, divisor in self.multiples:
            number, by = getattr(config, key), getattr(config, divisor)
            if number % by:
                raise unsupported(
                    config, f"{key}: expected a multiple of {divisor} = {by}, found {number}"
                )
        self.check(config)


_ROTARY_KEYS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
    *("rms_norm_eps", "tie_word_embeddings", "rope_parameters", "head_dim"),
)
_WINDOW_KEYS = ("sliding_window", "layer_types")
_QWEN_KEYS = ("hidden_act", *_WINDOW_KEYS, "use_sliding_window", "max_window_layers")
_GEMMA_KEYS = (
    *(*_WINDOW_KEYS, "attention_bias", "hidden_activation", "query_pre_attn_scalar"),
    *("final_logit_softcapping", "attn_logit_softcapping"),
)
_NAMING = Naming(
    prefix="model.",
    head="lm_head.weight",
    embedding="model.embed_tokens.weight",
    buffers=(".rotary_emb.inv_freq",),
)
_HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")


def _rotary(family: DecoderFamily, *keys: str, naming: Naming = _NAMING, **allowed: Any) -> Family:
    """Return a family of Llama's kind, with the keys that it reads beside Llama's and its allowed values."""
    return Family(
        partial(TextDecoder, family),
        naming,
        checks_of(*_ROTARY_KEYS, *keys),
        activation=family.activation,
        allowed=allowed,
        multiples=(("num_attention_heads", "num_key_value_heads"),),
        check=family.heads,
    )


def _gpt2_scale(config: Any, layer: int) -> float:
    heads: int = config.num_attention_heads
    scale = (config.hidden_size // heads) ** -0.5 if config.scale_attn_weights else 1.0
    return scale / (layer + 1) if config.scale_attn_by_inverse_layer_idx else scale


_GPT2 = DecoderFamily(
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
    output_bias=True,
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
    output_bias="attention_bias",
    windows="by type",
    scale=lambda config, layer: config.query_pre_attn_scalar**-0.5,
    score_cap="attn_logit_softcapping",
    logit_cap="final_logit_softcapping",
    scales_embedding=True,
)
_GEMMA3 = replace(
    _GEMMA2,
    names=replace(_GEMMA2.names, head_norms=_HEAD_NORMS),
    turns="by type",
    score_cap="",  # transformers' text model has no bound of the scores, whatever the configuration holds
)
_IMAGES = ("vision_tower.", "multi_modal_projector.")
_PHI3 = DecoderNames(qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",))
_LLAMA = DecoderFamily(bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias")
_QWEN2 = DecoderFamily(bias=True, windows="by type")
_QWEN3 = replace(
    _QWEN2,
    names=DecoderNames(head_norms=_HEAD_NORMS),
    bias="attention_bias",
    output_bias="attention_bias",
)

DECODERS: Mapping[str, Family] = {
    "gemma2": _rotary(_GEMMA2, *_GEMMA_KEYS, use_bidirectional_attention=(None, False)),
    "gemma3_text": _rotary(
        _GEMMA3,
        *_GEMMA_KEYS,
        naming=replace(
            _NAMING,
            ignored=(*_IMAGES, *(f"model.{part}" for part in _IMAGES)),
            # the names in which transformers 5, 4.52 and older saved models that read images
            moved=(
                ("model.language_model.", "model."),
                ("language_model.model.", "model."),
                ("language_model.lm_head.", "lm_head."),
            ),
        ),
        use_bidirectional_attention=(None, False),
        attn_logit_softcapping=(None,),
    ),
    "gpt2": Family(
        partial(TextDecoder, _GPT2),
        Naming(
            prefix="transformer.",
            head="lm_head.weight",
            embedding="transformer.wte.weight",
            # transformers' Conv1D stores (in, out)
            in_out=(".c_attn.weight", ".c_proj.weight", ".c_fc.weight"),
            buffers=(".attn.bias", ".attn.masked_bias"),
        ),
        checks_of(
            *("vocab_size", "n_positions", "n_embd", "n_head", "n_layer", "n_inner"),
            *("layer_norm_epsilon", "activation_function", "tie_word_embeddings"),
            *("scale_attn_weights", "scale_attn_by_inverse_layer_idx"),
        ),
        activation=_GPT2.activation,
        allowed={"add_cross_attention": (False,)},
        multiples=(("n_embd", "n_head"),),
    ),
    "llama": _rotary(_LLAMA, "hidden_act", "attention_bias", "mlp_bias"),
    "mistral": _rotary(DecoderFamily(windows="each"), "hidden_act", "sliding_window"),
    "phi3": _rotary(
        DecoderFamily(_PHI3, turns="part", windows="each"), "hidden_act", "sliding_window"
    ),
    "qwen2": _rotary(_QWEN2, *_QWEN_KEYS),
    "qwen3": _rotary(_QWEN3, *_QWEN_KEYS, "attention_bias"),
    "t5": Family(
        lambda config, context: encoder_decoders.T5(config),
        Naming(
            prefix="",
            head="lm_head.weight",
            embedding="shared.weight",
            # a table that old checkpoints have and no version of the model reads
            buffers=(".EncDecAttention.relative_attention_bias.weight",),
            copies=("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
        ),
        checks_of(
            *("vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_decoder_layers"),
            *("num_heads", "relative_attention_num_buckets", "relative_attention_max_distance"),
            *("layer_norm_epsilon", "feed_forward_proj", "dense_act_fn", "is_gated_act"),
            *("is_encoder_decoder", "tie_word_embeddings", "scale_decoder_outputs"),
        ),
        activation="",
        allowed={"is_encoder_decoder": (True,)},
        check=encoder_decoders.check_t5,
        positions=lambda config: 2**31 - 1,  # relative positions have no end
    ),
    "whisper": Family(
        lambda config, context: encoder_decoders.Whisper(config),
        Naming("model.", "proj_out.weight", "model.decoder.embed_tokens.weight"),
        checks_of(
            *("vocab_size", "num_mel_bins", "d_model", "encoder_layers", "decoder_layers"),
            *("encoder_attention_heads", "encoder_ffn_dim", "max_source_positions"),
            *("decoder_attention_heads", "decoder_ffn_dim", "max_target_positions"),
            *("activation_function", "tie_word_embeddings"),
        ),
        activation="activation_function",
        allowed={"tie_word_embeddings": (True,)},
        multiples=(("d_model", "encoder_attention_heads"), ("d_model", "decoder_attention_heads")),
        positions=lambda config: int(config.max_target_positions),
    ),
}
"""The families that generate, by model_type: decoders and encoder-decoders."""


def _encoder(
    family: EncoderFamily, checks: Checks, prefix: str, *ignored: str, **options: Any
) -> Family:
    buffers = ("embeddings.position_ids", "embeddings.token_type_ids")
    return Family(
        lambda config, context: TextEncoder(family, config),
        Naming(prefix, head="", embedding="", buffers=buffers, ignored=ignored),
        checks,
        activation=family.activation,
        multiples=(("hidden_size", "num_attention_heads"),),
        **options,
    )


_BERT_KEYS = checks_of(
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "type_vocab_size", "layer_norm_eps", "hidden_act"),
    max_position_embeddings=INNER,
)
_BERT_VALUES = {
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "position_embedding_type": ("absolute", None),
}
_DISTILBERT = EncoderNames(
    layers="transformer.layer",
    qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    output="attention.out_lin",
    attention_norm="sa_layer_norm",
    up="ffn.lin1",
    down="ffn.lin2",
    mlp_norm="output_layer_norm",
)

ENCODERS: Mapping[str, Family] = {
    "bert": _encoder(
        EncoderFamily(),
        _BERT_KEYS,
        *("bert.", "cls.", "pooler.", "bert.pooler."),
        allowed=_BERT_VALUES,
    ),
    "distilbert": _encoder(
        # The epsilon is a constant in the code of the reference, not a setting.
        EncoderFamily(_DISTILBERT, "activation", "hidden_dim", 1e-12, has_segments=False),
        checks_of(
            *("vocab_size", "dim", "hidden_dim", "n_layers", "n_heads", "activation"),
            max_position_embeddings=INNER,
        ),
        *("distilbert.", "vocab_transform.", "vocab_layer_norm.", "vocab_projector."),
    ),
    "roberta": _encoder(
        EncoderFamily(counts_padding=True),
        {**_BERT_KEYS, **checks_of("pad_token_id")},
        *("roberta.", "lm_head.", "pooler.", "roberta.pooler."),
        allowed=_BERT_VALUES,
        # The table of positions has unused rows before the first.
        positions=lambda config: int(config.max_position_embeddings - config.pad_token_id - 1),
    ),
}
"""The families that embed, by model_type."""
