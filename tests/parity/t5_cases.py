"""Small random T5 checkpoints, the same wherever they are made. No JAX, no torch."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from . import cases as decoders
from .cases import noise, write_checkpoint

ROWS, SOURCE = 2, 23
"""Sources of a case, and places of each. The first source is full, the other shorter."""
PROMPT, STEPS = 4, 24
"""Tokens that the text begins with, and greedy ones after it."""

REFERENCE = Path(__file__).parent / "t5_reference.npz"

COUNT = 14


@dataclass(frozen=True)
class Case(decoders.Case):
    """With `old` the file holds the copies of the embedding and the unused table of old checkpoints."""

    old: bool

    @property
    def source(self):
        """Int32 [ROWS, SOURCE]; tokens from a row's length on count for nothing."""
        return self._tokens(0, SOURCE)

    @property
    def lengths(self):
        """Int32 [ROWS]."""
        random = np.random.default_rng([self.seed, 1])
        return np.array([SOURCE, random.integers(1, SOURCE)], np.int32)

    @property
    def prompt(self):
        """Int32 [ROWS, PROMPT]; the first token is the one that every text begins with."""
        tokens = self._tokens(2, PROMPT)
        tokens[:, 0] = self.config["decoder_start_token_id"]
        return tokens

    def _tokens(self, stream, count):
        random = np.random.default_rng([self.seed, stream])
        return random.integers(0, self.config["vocab_size"], (ROWS, count), dtype=np.int32)

    def write(self, directory):
        """Writes the checkpoint as torch's save_pretrained would."""
        shapes = _shapes(self.config)
        tensors = {name: _values(name, shape, self.seed) for name, shape in shapes.items()}
        if self.old:
            unused = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
            tensors[unused] = tensors[unused.replace("1.EncDec", "0.Self")] + 1
            for stack in ("encoder", "decoder"):
                tensors[f"{stack}.embed_tokens.weight"] = tensors["shared.weight"].copy()
        write_checkpoint(directory, self.config, tensors)


def cases():
    return tuple(map(_case, range(COUNT)))


def _case(number):
    random = np.random.default_rng([9, number])

    def pick(*options):
        return options[random.integers(len(options))]

    kinds = ["relu", "gated-gelu", "gated-silu", "gelu"]
    projection = kinds[number % 4 if number > 5 else number % 2]
    # The published buckets; those of a text that is longer than the farthest distance; odd ones.
    count, farthest = [(32, 128), (8, 20), (12, 11), (7, 5), (4, 40)][number % 5]
    config = {
        **{"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]},
        **{"vocab_size": pick(29, 31, 37, 41), "d_model": pick(12, 17, 24), "d_kv": pick(3, 4, 8)},
        **{"d_ff": pick(13, 24, 40), "num_layers": pick(1, 2, 3), "num_heads": pick(1, 2, 3, 5)},
        "relative_attention_num_buckets": count,
        "relative_attention_max_distance": farthest,
        "layer_norm_epsilon": pick(1e-6, 1e-5),
        "feed_forward_proj": projection,
        **{"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1},
    }
    if number % 3 == 1:
        config["num_decoder_layers"] = config["num_layers"] % 3 + 1
    # Files that transformers 5 wrote say of every model that its head is tied.
    config |= [
        {"tie_word_embeddings": False},
        {},
        {"tie_word_embeddings": True},
        {"tie_word_embeddings": True, "scale_decoder_outputs": False},
    ][number % 4]
    return Case(f"t5-{number:02}-{projection}", config, 900 + number, old=number % 3 == 2)


def has_own_head(config):
    """Whether a configuration is of a model with a head of its own."""
    tied = config.get("scale_decoder_outputs", config.get("tie_word_embeddings", True))
    return not tied


def _shapes(config):
    width, inner = config["d_model"], config["num_heads"] * config["d_kv"]
    tables = ("shared", "lm_head") if has_own_head(config) else ("shared",)
    shapes = {f"{name}.weight": (config["vocab_size"], width) for name in tables}
    layers = {"encoder": config["num_layers"]}
    layers["decoder"] = config.get("num_decoder_layers", config["num_layers"])
    for stack, number in layers.items():
        table = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        shapes[table] = (config["relative_attention_num_buckets"], config["num_heads"])
        shapes[f"{stack}.final_layer_norm.weight"] = (width,)
        for layer in range(number):
            parts = ["SelfAttention", *(["EncDecAttention"] if stack == "decoder" else [])]
            for place, part in enumerate(parts):
                at = f"{stack}.block.{layer}.layer.{place}"
                shapes[f"{at}.layer_norm.weight"] = (width,)
                shapes |= {f"{at}.{part}.{name}.weight": (inner, width) for name in "qkv"}
                shapes[f"{at}.{part}.o.weight"] = (width, inner)
            at = f"{stack}.block.{layer}.layer.{len(parts)}"
            shapes[f"{at}.layer_norm.weight"] = (width,)
            gated = config["feed_forward_proj"].startswith("gated-")
            for name in ("wi_0", "wi_1") if gated else ("wi",):
                shapes[f"{at}.DenseReluDense.{name}.weight"] = (config["d_ff"], width)
            shapes[f"{at}.DenseReluDense.wo.weight"] = (width, config["d_ff"])
    return shapes


def _values(name, shape, seed):
    """Values large enough that each part of the model shows in the logits, and no larger: see cases.py."""
    values = noise(seed, name, shape)
    if len(shape) == 1:
        return values * np.float32(0.2) + np.float32(1)
    kind = name.split(".")[-2]
    return values * np.float32(_SCALES.get(kind, 0.25))


_SCALES = {"shared": 1.0, "relative_attention_bias": 1.0, "lm_head": 0.5, "o": 0.7, "wo": 0.7}
"""With outputs smaller than the embeddings a model with a tied head would write its last token for ever."""
