"""Llama 1 to 3, and the families of its modules that differ from it in a line: Mistral, Qwen 2, 2.5 and 3.

All have rotary positions, RMSNorm, grouped-query attention and a gated MLP.

Sources: transformers 5, models/NAME/modeling_NAME.py, with which the logits agree;
    llama: Touvron et al. 2023 (Llama 2), arXiv 2307.09288; Grattafiori et al. 2024 (Llama 3), arXiv
    2407.21783;
    mistral: Jiang et al. 2023, arXiv 2310.06825;
    qwen2: Yang et al. 2024, arXiv 2407.10671;
    qwen3: Yang et al. 2025, arXiv 2505.09388.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from prejit.compiler.models.layers.layer_config import DecoderConfig, Naming
from prejit.compiler.models.layers.norms import RMSNorm
from prejit.compiler.models.layers.rotary_decoder import (
    NAMING,
    RotaryDecoder,
    build_llama,
    describe_llama,
    window,
    windows,
)


@dataclass(frozen=True)
class LlamaFamily:
    """A family of Llama's modules.

    Attributes:
        options: returns the options of `build_llama` for a configuration, or raises CheckpointError.
        NAMING: as of any family.
    """

    options: Callable[[Any], dict[str, Any]]
    NAMING: Naming = NAMING

    def describe(self, config: Any) -> DecoderConfig:
        """Return the sizes of a model.

        Raises:
            CheckpointError: its configuration asks for something that is not built here.
        """
        self.options(config)
        return describe_llama(config)

    def build(self, config: Any, context: int | None) -> RotaryDecoder:
        """Return a model for contexts up to `context`, or as long as it was made for if None."""
        return build_llama(config, context, **self.options(config))


def _llama(config: Any) -> dict[str, Any]:
    bias = config.attention_bias
    return {"bias": bias, "output_bias": bias, "mlp_bias": config.mlp_bias}


def _mistral(config: Any) -> dict[str, Any]:
    """Every token sees a window of the tokens before it."""
    return {"windows": [window(config)] * config.num_hidden_layers}


def _qwen2(config: Any) -> dict[str, Any]:
    """Queries, keys and values have biases, some layers may have windows."""
    return {"windows": windows(config), "bias": True}


def _qwen3(config: Any) -> dict[str, Any]:
    """Queries and keys are normalized along the head, some layers may have windows."""
    bias, norm = config.attention_bias, partial(RMSNorm, epsilon=config.rms_norm_eps)
    return {"windows": windows(config), "bias": bias, "output_bias": bias, "head_norm": norm}


LLAMA, MISTRAL, QWEN2, QWEN3 = map(LlamaFamily, (_llama, _mistral, _qwen2, _qwen3))
