"""Small random encoders of the families of encoder_table.py, and heads that score. No JAX, no torch.

A case is a configuration. Each tensor's values follow from its published name and its shape, so torch's
module and ours have the same values if they have the same tensors.
"""

import json
from pathlib import Path

import numpy as np

from .encoder_cases import ROWS, Case

TOKENS = 29
"""Of the longest text of a case's batch."""

REFERENCE = Path(__file__).parent / "encoder_family_reference.npz"
WIDE_REFERENCE = Path(__file__).parent / "wide_encoder_reference.npz"


class FamilyCase(Case):
    """An encoder of any family, or a model that scores; tensors have no prefix of the transformer."""

    longest = TOKENS

    @property
    def scores(self):
        """Whether the model scores texts."""
        return bool(self.config["architectures"][0].endswith("ForSequenceClassification"))

    @property
    def given(self):
        """Tokens as our models are given them: with the size of the vocabulary added in a second text."""
        if self.segments is None:
            return self.tokens
        added = self.segments * self.config["vocab_size"]
        return self.tokens + added.astype(np.int32)

    @property
    def segments(self):
        """Int32 [ROWS, TOKENS] of a pair of texts; None: the family is not given them."""
        if not self.scores or self.config["model_type"] not in ("bert", "electra", "nomic_bert"):
            return None
        return np.broadcast_to((np.arange(TOKENS) >= 5).astype(np.int32), (ROWS, TOKENS))

    def in_file(self, name, shape):
        """Values of a tensor of a file, which has other names than torch's module if it is nomic-bert's."""
        if self.config["model_type"] == "nomic_bert":
            for old, new in _NOMIC_NAMES:
                name = name.replace(old, new)
        if "self_attn.qkv" not in name:
            return self.values(name, shape)
        part = (shape[0] // 3, *shape[1:])
        names = (name.replace("qkv", f"{each}_proj") for each in "qkv")
        return np.concatenate([self.values(each, part) for each in names])

    @property
    def norms_begin_at(self):
        """The mean of the scales of norms as they are published: Gemma's are minus 1."""
        return 0.0 if self.config["model_type"].startswith("gemma") else 1.0


def family_cases():
    made = []
    for number, (name, (architecture, changes)) in enumerate(_FAMILIES.items()):
        for at, sizes in enumerate(_SIZES):
            config = _config(name, **{**sizes, **changes})
            if "embedding_size" in changes and at:
                config["embedding_size"] = sizes["hidden_size"]
            made.append(FamilyCase(f"{name}-{at}", config, 100 * number + at + 1))
            if architecture != "Camembert":
                made.append(_scoring(made[-1], architecture, at))
    return tuple(made)


def _config(name, **more):
    architecture = _FAMILIES[name][0]
    kind = {"nomic-bert": "nomic_bert", "gemma3": "gemma3_text"}.get(name, name)
    return _COMMON | {"model_type": kind, "architectures": [f"{architecture}Model"]} | more


def _scoring(case, architecture, at):
    scoring = {
        "architectures": [f"{architecture}ForSequenceClassification"],
        "id2label": {str(label): f"l{label}" for label in range(1 + 2 * at)},
    }
    return FamilyCase(f"scores-{case.name}", case.config | scoring, case.seed + 10)


def wide_cases():
    """An encoder and a decoder that embeds, whose matrices are large enough for int4."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4}
    changes = {"bert": {}, "qwen3": {"num_key_value_heads": 2, "head_dim": 32}}
    return tuple(
        FamilyCase(name, _config(name, **sizes, **more), 7) for name, more in changes.items()
    )


def add_pooling(directory):
    """Add the modules of mean pooling to a model, which is returned."""
    modules = [
        {"idx": place, "path": path, "type": f"sentence_transformers.models.{kind}"}
        for place, (path, kind) in enumerate((("", "Transformer"), ("1_Pooling", "Pooling")))
    ]
    width = json.loads((directory / "config.json").read_text())["hidden_size"]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": width, "pooling_mode_mean_tokens": True}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return directory


_SIZES = (
    {"hidden_size": 12, "num_attention_heads": 3, "intermediate_size": 20, "num_hidden_layers": 3},
    {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 11, "num_hidden_layers": 2},
    {"hidden_size": 20, "num_attention_heads": 5, "intermediate_size": 24, "num_hidden_layers": 2},
)
_COMMON = {"vocab_size": 61, "max_position_embeddings": 48, "pad_token_id": 1}
_OF_HEADS = {"num_key_value_heads": 1, "head_dim": 6}
_FAMILIES = {
    "xlm-roberta": ("XLMRoberta", {}),
    "camembert": ("Camembert", {}),
    "mpnet": ("MPNet", {}),
    "electra": ("Electra", {"embedding_size": 7}),
    "modernbert": (
        "ModernBert",
        {
            **{"local_attention": 8, "global_attn_every_n_layers": 2},
            **{"global_rope_theta": 160000.0, "local_rope_theta": 10000.0},
        },
    ),
    "bert": ("Bert", {}),
    "distilbert": ("DistilBert", {"n_layers": 2}),
    "deberta-v2": (
        "DebertaV2",
        {
            **{"relative_attention": True, "share_att_key": True, "norm_rel_ebd": "layer_norm"},
            **{"position_buckets": 8, "max_relative_positions": -1, "pos_att_type": "p2c|c2p"},
            "position_biased_input": False,
        },
    ),
    "qwen3": ("Qwen3", _OF_HEADS),
    "gemma3": (
        "Gemma3Text",
        {
            **{**_OF_HEADS, "query_pre_attn_scalar": 5, "use_bidirectional_attention": True},
            **{"sliding_window": 8, "sliding_window_pattern": 2},
        },
    ),
    "nomic-bert": ("NomicBert", {}),
    "gemma": ("Gemma", _OF_HEADS),
}
"""The beginning of the name of transformers' class, and what a configuration has, for each family."""
_NOMIC_NAMES = (
    *(("encoder.layers", "layers"), ("emb_ln", "embeddings.LayerNorm")),
    *(("attn.Wqkv", "self_attn.qkv"), ("attn.out_proj", "self_attn.o_proj")),
    *(("fc11", "up_proj"), ("fc12", "gate_proj"), ("fc2", "down_proj")),
    *(("norm1", "post_attention_layernorm"), ("norm2", "post_mlp_layernorm")),
)
"""Parts of the names of tensors in files, and in torch's module (transformers/conversion_mapping.py)."""
