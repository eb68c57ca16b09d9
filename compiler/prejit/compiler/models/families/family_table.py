"""The table of model families: for each model_type what it reads of config.json and what makes its module.

A family that differs from one here in names, norms, biases or the like is a row. Logits agree with those of
transformers 5, models/NAME/modeling_NAME.py, of the same name. Sources:

    bert        Devlin et al. 2018, arXiv 1810.04805
    distilbert  Sanh et al. 2019, arXiv 1910.01108
    roberta     Liu et al. 2019, arXiv 1907.11692

decoder_table.py and mixture_table.py have the decoders, encoder_decoders.py the sources of t5 and whisper.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prejit.compiler.models.families import encoder_decoders
from prejit.compiler.models.families.decoder_table import TEXT_DECODERS
from prejit.compiler.models.families.encoders import EncoderFamily, EncoderNames, TextEncoder
from prejit.compiler.models.families.family import Family
from prejit.compiler.models.families.mixture_table import MIXTURES
from prejit.compiler.models.layers.config_checks import INNER, Checks, checks_of
from prejit.compiler.models.layers.layer_config import Naming

DECODERS: Mapping[str, Family] = {
    **TEXT_DECODERS,
    **MIXTURES,
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
