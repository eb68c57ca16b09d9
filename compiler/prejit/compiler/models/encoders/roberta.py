"""RoBERTa (Liu et al. 2019, arXiv 1907.11692) as published by Hugging Face.

Its code is models/roberta/modeling_roberta.py. It is BERT with positions that start after the padding
token's id. Only the transformer of a checkpoint is read: `lm_head` and `pooler` are ignored.
"""

from __future__ import annotations

from typing import Any

from prejit.compiler.models.encoders import bert
from prejit.compiler.models.layers.layer_config import Naming

NAMING = Naming(
    prefix="roberta.",
    head="",
    embedding="",
    buffers=bert.NAMING.buffers,
    ignored=("lm_head.", "pooler.", "roberta.pooler."),
)

check = bert.check


def max_tokens(config: Any) -> int:
    """Return the maximum tokens of a sequence: the table of positions has unused rows before the first."""
    return int(config.max_position_embeddings - config.pad_token_id - 1)


def build(config: Any) -> bert.Bert:
    """Return the transformer."""
    return bert.Bert(config, padding=config.pad_token_id)
