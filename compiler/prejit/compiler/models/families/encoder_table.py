"""The table of families that embed and score: for each model_type what it reads of config.json, its module.

Hidden states agree with those of transformers 5, models/NAME/modeling_NAME.py, of the same name. Sources:

    bert        Devlin et al. 2018, arXiv 1810.04805
    camembert   Martin et al. 2019, arXiv 1911.03894; it is roberta
    deberta-v2  He et al. 2021, arXiv 2111.09543 (version 3)
    distilbert  Sanh et al. 2019, arXiv 1910.01108
    electra     Clark et al. 2020, arXiv 2003.10555
    modernbert  Warner et al. 2024, arXiv 2412.13663
    mpnet       Song et al. 2020, arXiv 2004.09297
    nomic_bert  Nussbaum et al. 2024, arXiv 2402.01613
    roberta     Liu et al. 2019, arXiv 1907.11692
    xlm-roberta Conneau et al. 2019, arXiv 1911.02116; it is roberta

decoder_table.py has the sources of decoders that embed too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from prejit.compiler.models.families import disentangled
from prejit.compiler.models.families.decoder_family import DecoderFamily, DecoderNames
from prejit.compiler.models.families.encoder_decoders import RelativeBias
from prejit.compiler.models.families.encoders import (
    EncoderFamily,
    EncoderNames,
    ScoringHead,
    TextEncoder,
    pooler,
)
from prejit.compiler.models.families.family import Family
from prejit.compiler.models.families.family_table import DECODERS
from prejit.compiler.models.families.rotary_encoders import (
    NormedTokens,
    RotaryEncoder,
    RotaryFamily,
    SegmentedTokens,
)
from prejit.compiler.models.layers.config_checks import (
    FARTHEST,
    INNER,
    NUMBER_OF_SEGMENTS,
    Checks,
    checks_of,
)
from prejit.compiler.models.layers.layer_config import Naming
from prejit.compiler.models.layers.linear import Embedding, LayerNorm

_MPNET_FARTHEST = 128
"""The distance from which on all share a bucket: a constant of modeling_mpnet.py."""
_BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids", ".rotary_emb.inv_freq")


def _encoder(
    family: EncoderFamily, checks: Checks, prefix: str, *ignored: str, **options: Any
) -> Family:
    return Family(
        lambda config, context: TextEncoder(family, config),
        Naming(prefix, head="", embedding="", buffers=_BUFFERS, ignored=ignored),
        checks,
        activation=family.activation,
        multiples=(("hidden_size", "num_attention_heads"),),
        **options,
    )


_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "layer_norm_eps", "hidden_act"),
)
_BERT_KEYS = checks_of(*_SIZES, "type_vocab_size", max_position_embeddings=INNER)
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
_MPNET = EncoderNames(
    qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
    output="attention.attn.o",
    attention_norm="attention.LayerNorm",
)

_DEBERTA = EncoderFamily(
    EncoderNames(qkv=tuple(f"attention.self.{part}_proj" for part in ("query", "key", "value"))),
    has_positions=False,
    shared=lambda config: {
        "encoder.rel_embeddings": Embedding(2 * config.position_buckets, config.hidden_size),
        "encoder.LayerNorm": LayerNorm(config.hidden_size, config.layer_norm_eps),
    },
    block=disentangled.DisentangledBlock,
)


def _roberta() -> Family:
    return _encoder(
        EncoderFamily(padding="pad_token_id"),
        {**_BERT_KEYS, **checks_of("pad_token_id")},
        *("roberta.", "lm_head.", "pooler.", "roberta.pooler."),
        allowed=_BERT_VALUES,
        # The table of positions has unused rows before the first.
        positions=lambda config: int(config.max_position_embeddings - config.pad_token_id - 1),
    )


def _rotary(
    family: RotaryFamily, checks: Checks, prefix: str, *ignored: str, **options: Any
) -> Family:
    return Family(
        lambda config, context: RotaryEncoder(family, config),
        Naming(prefix, head="", embedding="", buffers=_BUFFERS, ignored=ignored),
        checks,
        activation=family.blocks.activation,
        check=family.blocks.heads,
        **options,
    )


_MODERNBERT = RotaryFamily(
    DecoderFamily(
        DecoderNames(
            embedding="embeddings",
            norm="final_norm",
            attention_norm="attn_norm",
            qkv=("attn.Wqkv",),
            output="attn.Wo",
            mlp_norm="mlp_norm",
            up=("mlp.Wi",),
            down="mlp.Wo",
        ),
        norm=partial(LayerNorm, bias=False),
        epsilon="norm_eps",
        activation="hidden_activation",
        bias="attention_bias",
        mlp_bias="mlp_bias",
        turns="by type",
        windows="by type",
    ),
    embeddings=lambda config: NormedTokens(
        config, LayerNorm(config.hidden_size, config.norm_eps, bias=False)
    ),
    window=lambda window: window,  # half of local_attention, on each side
    starts_bare=True,
)
_NOMIC = RotaryFamily(
    DecoderFamily(
        DecoderNames(
            embedding="embeddings",
            layers="encoder.layers",
            attention_norm="norm1",
            qkv=("attn.Wqkv",),
            output="attn.out_proj",
            mlp_norm="norm2",
            up=("mlp.fc12", "mlp.fc11"),
            down="mlp.fc2",
        ),
        norm=LayerNorm,
        epsilon="layer_norm_eps",
    ),
    embeddings=SegmentedTokens,
    embeddings_norm="emb_ln",
    norms_sums=True,
)


def _is_causal(config: Any) -> bool:
    return not getattr(config, "use_bidirectional_attention", False)


def _decoder(name: str, **allowed: Any) -> Family:
    """Return a decoder's family that gives hidden states: without a cache, and without its head."""
    decoder = DECODERS[name]
    assert isinstance(decoder.build, partial)
    family = RotaryFamily(decoder.build.args[0], is_causal=_is_causal)  # the family of its blocks
    return replace(
        decoder,
        build=lambda config, context: RotaryEncoder(family, config),
        naming=replace(
            decoder.naming, head="", embedding="", ignored=(*decoder.naming.ignored, "lm_head.")
        ),
        allowed={
            **decoder.allowed,
            "is_causal": (True,),
            # A key of one family: the reference does not read it in others.
            "use_bidirectional_attention": (None, False),
            **allowed,
        },
    )


_NORMED_HEAD = ScoringHead(
    dense="head.dense",
    activation="classifier_activation",
    norm="head.norm",
    out="classifier",
    pooling="classifier_pooling",
    dense_bias="classifier_bias",
)

HEADS: Mapping[str, ScoringHead] = {
    "bert": pooler("bert."),
    "camembert": ScoringHead(),
    "deberta-v2": pooler("", "pooler_hidden_act"),
    "distilbert": ScoringHead(dense="pre_classifier", activation="relu", out="classifier"),
    "electra": ScoringHead(activation="gelu"),
    "modernbert": _NORMED_HEAD,
    "mpnet": ScoringHead(),
    "nomic_bert": pooler("nomic_bert."),
    "roberta": ScoringHead(),
    "xlm-roberta": ScoringHead(),
    **dict.fromkeys(
        ("gemma", "gemma3_text", "llama", "mistral", "qwen2", "qwen3"),
        ScoringHead(dense="", out="score", pooling="lasttoken", out_bias=False),
    ),
}
"""The heads that score, by model_type; without one a family only embeds."""

WITH_SEGMENTS = ("bert", "deberta-v2", "electra", "nomic_bert")
"""The families whose tokenizers say which tokens are of the second text of a pair."""

ENCODERS: Mapping[str, Family] = {
    "bert": _encoder(
        EncoderFamily(),
        _BERT_KEYS,
        *("bert.", "cls.", "pooler.", "bert.pooler."),
        allowed=_BERT_VALUES,
    ),
    "camembert": _roberta(),
    "deberta-v2": _encoder(
        _DEBERTA,
        checks_of(
            *_SIZES,
            type_vocab_size=NUMBER_OF_SEGMENTS,
            max_position_embeddings=INNER,
            max_relative_positions=FARTHEST,
        ),
        *("deberta.", "cls.", "lm_predictions.", "mask_predictions.", "pooler."),
        # A table that the reference ignores too, because position_biased_input is false.
        *("embeddings.position_embeddings.", "deberta.embeddings.position_embeddings."),
        check=disentangled.check,
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
    "electra": _encoder(
        EncoderFamily(narrow="embedding_size"),
        {**_BERT_KEYS, **checks_of("embedding_size")},
        *("electra.", "generator_predictions.", "generator_lm_head.", "discriminator_predictions."),
        allowed=_BERT_VALUES,
    ),
    "modernbert": _rotary(
        _MODERNBERT,
        checks_of(
            *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
            *("num_attention_heads", "hidden_activation", "attention_bias", "mlp_bias"),
            *("norm_eps", "local_attention", "layer_types", "rope_parameters"),
            "max_position_embeddings",
        ),
        *("model.", "head.", "decoder."),
        multiples=(("hidden_size", "num_attention_heads"),),
        allowed={"norm_bias": (False,)},
    ),
    "mpnet": _encoder(
        EncoderFamily(
            _MPNET,
            has_segments=False,
            padding=1,
            shared=lambda config: {
                "encoder.relative_attention_bias": RelativeBias(
                    config.relative_attention_num_buckets,
                    config.num_attention_heads,
                    _MPNET_FARTHEST,
                    causal=False,
                )
            },
        ),
        checks_of(*_SIZES, max_position_embeddings=INNER),
        *("mpnet.", "lm_head.", "pooler.", "mpnet.pooler."),
        # constants in the code of the reference
        allowed={"relative_attention_num_buckets": (32,)},
        positions=lambda config: int(config.max_position_embeddings - 2),
    ),
    "nomic_bert": _rotary(
        _NOMIC,
        checks_of(
            *_SIZES, "type_vocab_size", "head_dim", "rope_parameters", "max_position_embeddings"
        ),
        *("nomic_bert.", "cls.", "pooler.", "nomic_bert.pooler."),
    ),
    "gemma": _decoder("gemma"),
    "gemma3_text": _decoder("gemma3_text", use_bidirectional_attention=(None, False, True)),
    "llama": _decoder("llama"),
    "mistral": _decoder("mistral"),
    "qwen2": _decoder("qwen2"),
    "qwen3": _decoder("qwen3"),
    "roberta": _roberta(),
    "xlm-roberta": _roberta(),
}
"""The families that embed, by model_type."""
