"""RoBERTa (Liu et al. 2019, arXiv 1907.11692) as published by Hugging Face.

Its code is models/roberta/modeling_roberta.py. It is BERT, but positions are counted from behind the
padding token's id. Of a checkpoint with a head only the transformer is taken: `lm_head`, `pooler`,
`classifier` and `qa_outputs` are left out.
"""

from __future__ import annotations

from typing import Any

from prejit.compiler.models.encoders import bert
from prejit.compiler.models.layers.config import Naming

NAMING = Naming(
    prefix="roberta.",
    head="",
    embedding="",
    buffers=bert.NAMING.buffers,
    ignored=("lm_head.", "pooler.", "roberta.pooler.", "classifier.", "qa_outputs."),
)

check = bert.check


def max_tokens(config: Any) -> int:
    """Of one sequence: the table of positions has unused rows before the first."""
    return int(config.max_position_embeddings - config.pad_token_id - 1)


def build(config: Any) -> bert.Bert:
    """The transformer."""
    return bert.Bert(config, padding=config.pad_token_id)
