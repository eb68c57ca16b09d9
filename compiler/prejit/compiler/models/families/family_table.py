"""The table of families that generate: for each model_type what it reads of config.json, and its module.

decoder_table.py, further_decoder_table.py, gemma4_table.py, mixture_table.py, later_mixture_table.py,
hybrid_table.py and lfm_table.py have the decoders, encoder_decoders.py the sources of t5 and whisper, and
encoder_table.py the families that embed and score.
"""

from __future__ import annotations

from collections.abc import Mapping

from prejit.compiler.models.families import encoder_decoders
from prejit.compiler.models.families.decoder_table import TEXT_DECODERS
from prejit.compiler.models.families.family import Family
from prejit.compiler.models.families.further_decoder_table import FURTHER_DECODERS
from prejit.compiler.models.families.gemma4_table import GEMMA4
from prejit.compiler.models.families.hybrid_table import HYBRIDS
from prejit.compiler.models.families.later_mixture_table import LATER_MIXTURES
from prejit.compiler.models.families.lfm_table import LFMS
from prejit.compiler.models.families.mixture_table import MIXTURES
from prejit.compiler.models.layers.config_checks import checks_of
from prejit.compiler.models.layers.layer_config import Naming

DECODERS: Mapping[str, Family] = {
    **TEXT_DECODERS,
    **GEMMA4,
    **MIXTURES,
    **LATER_MIXTURES,
    **HYBRIDS,
    **LFMS,
    **FURTHER_DECODERS,
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
