"""Small random checkpoints of the decoders that are a row beside those of cases.py. No JAX, no torch.

Each family has three: the first runs in `make test`. torch named their tensors: the record holds names and
shapes beside the logits, so no list here can repeat a mistake of the table.
"""

import json
import zlib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np

from .cases import ACTIVATIONS, Case, common_sizes, pick, rope_keys
from .sibling_families import FAMILIES, KEPT, REMOVED

PROMPT, STEPS = 17, 24
"""Tokens of the prompt, and greedy ones after it."""

EACH = 3
"""Cases of a family."""

REFERENCE = Path(__file__).parent / "sibling_reference.npz"


@dataclass(frozen=True)
class Sibling(Case):
    """A case whose tensors torch named: their names and shapes are as recorded, unless they are given."""

    shapes: dict = field(default_factory=dict)

    @property
    def tensor_shapes(self):
        """Of the tensors that torch publishes for the configuration."""
        shapes = self.shapes or _recorded_shapes()[shapes_key(self)]
        return {name: tuple(shape) for name, shape in shapes.items()}


def shapes_key(case):
    """The key in the reference of the shapes of a case."""
    return f"{case.name}/shapes"


@cache
def _recorded_shapes():
    with np.load(REFERENCE) as recorded:
        return {key: json.loads(str(recorded[key])) for key in recorded if "/" in key}


def cases():
    return tuple(_case(family, number) for family in FAMILIES for number in range(EACH))


def _case(family, number):
    (kind, *changes), crc = FAMILIES[family], zlib.crc32(family.encode())
    name = f"{family}-{number}"
    random = np.random.default_rng([9, crc, number])
    config = {
        "model_type": family,
        "architectures": [f"{kind}ForCausalLM"],
        "pad_token_id": 0,
        **common_sizes(random),
        "num_hidden_layers": 2 + number % 2,
        "hidden_act": pick(random, ACTIVATIONS),
        "tie_word_embeddings": number % 2 == 0,
        **rope_keys(["default", "yarn", "linear"][number], number, random),
    }
    heads = config["num_attention_heads"]
    config["hidden_size"] = heads * pick(random, [4, 6])
    for change in changes:
        if callable(change):
            config |= change(number, random, config)
        else:
            found = {key: _chosen(value, number, random, config) for key, value in change.items()}
            config |= {key: value for key, value in found.items() if value is not KEPT}
    config = {key: value for key, value in config.items() if value is not REMOVED}
    return Sibling(name, config, _SEEDS.get(name, 3000 + crc % 1000 + number))


def _chosen(value, number, random, config):
    """Return a value: of a list the one at the number, of a function what it returns."""
    value = value[number] if isinstance(value, list) else value
    return value(random, config) if callable(value) else value


_SEEDS = {
    **{"cohere2_moe-1": 5001, "gpt_oss-2": 5000, "granitemoehybrid-1": 5000},
    **{"granitemoeshared-1": 5000},
    **{"nemotron-1": 5001, "nemotron-2": 5012, "seed_oss-1": 4001, "vaultgemma-1": 5000},
    **{"qwen3_5-0": 5032, "qwen3_5-1": 5002, "qwen3_5-2": 5004},
    **{"qwen3_5_moe-0": 5079, "qwen3_5_moe-1": 5025, "qwen3_5_moe-2": 5006},
    **{"qwen3_next-0": 5076, "qwen3_next-1": 5038, "qwen3_next-2": 5004},
}
"""Of cases where, with another seed, rounding would decide a token: see record.py."""
