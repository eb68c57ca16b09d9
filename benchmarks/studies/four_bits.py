"""Accuracy of int8, also with x rounded as encoders do, of int4 and of Q4_0's rounding in int4's matrices.

    python -m benchmarks.studies.four_bits MODEL TEXT

It prints the perplexity of the last 1,000 tokens of a text, and the mean KL divergence from float32.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from prejit.compiler.checkpoint.checkpoint import open_checkpoint
from prejit.compiler.models import config_file, int4_rounding, model_registry, quantizing
from prejit.compiler.models.layers import product_forms
from prejit.compiler.models.parameters import flat_parameters, parametrized
from prejit.compiler.models.quantizing import Rows
from prejit.compiler.pipeline.measure import model_comparison

Values = np.ndarray[Any, Any]
TOKENS, WINDOW = 1000, 128


def q4_0(groups: Values, weights: Values | None = None) -> tuple[Values, Values]:
    """Return groups as Q4_0 rounds them: the value of the largest magnitude becomes -8."""
    largest = np.take_along_axis(groups, np.abs(groups).argmax(-1)[..., None], -1)
    scales = largest / np.float32(-8)
    shifted = np.floor(groups / np.where(scales == 0, 1, scales) + np.float32(8.5))
    return (np.clip(shifted, 0, 15) - 8).astype(np.int8), scales[..., 0].astype(np.float16)


def log_softmax(logits: Values) -> Values:
    """Return the logarithms of probabilities."""
    shifted = logits - logits.max(-1, keepdims=True)
    found: Values = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return found


def main(directory: Path, text: Path) -> None:
    """Print the figures of a model."""
    config = config_file.load_config(directory)
    checkpoint = open_checkpoint(directory, out_in=True)
    make = partial(model_registry.make_decoder, config, out_in=True)
    exact, rounding_x = make(), make()
    quantizing.imitate(rounding_x, make(dtype="int8"))
    tokens, begin = model_comparison.read_text(text, directory / "tokenizer.json")
    tokens, unread = tokens[-TOKENS:], max(0, len(begin) - 1)
    windows = [np.r_[begin, tokens[at : at + WINDOW]] for at in range(0, len(tokens), WINDOW)]

    def logits(weights: dict[str, Rows], *, rounds_rows: bool = False) -> Values:
        module = parametrized(rounding_x if rounds_rows else exact)
        compared = model_comparison.ComparedModel(module, weights)
        with product_forms.rounding_rows():
            found = model_comparison._logits(compared, windows)()
        return np.concatenate([each[unread:-1] for each in found]).astype(np.float64)

    def stored(dtype: str) -> dict[str, Rows]:
        module = make(dtype=dtype)
        reads = quantizing.readers(module, checkpoint.rows)
        names = flat_parameters(nnx.state(module))
        packed = {n: reads[n]() if n in reads else checkpoint.read(n) for n in names}
        return quantizing.widened(module, packed)

    follows = np.concatenate([each[unread + 1 :] for each in windows])
    right = log_softmax(logits({name: checkpoint.rows(name) for name in checkpoint.names}))
    places = np.arange(len(follows))
    print(f"float32  perplexity {np.exp(-right[places, follows].mean()):.4f}")
    searched = int4_rounding.rounded
    for name, dtype, rounding in (
        ("int8", "int8", searched),
        ("int8, x too", "int8", searched),
        ("int4", "int4", searched),
        ("Q4_0", "int4", q4_0),
    ):
        int4_rounding.rounded = rounding
        found = log_softmax(logits(stored(dtype), rounds_rows=name.endswith("x too")))
        divergence = (np.exp(right) * (right - found)).sum(-1).mean()
        perplexity = np.exp(-found[places, follows].mean())
        print(f"{name}     perplexity {perplexity:.4f}  KL {divergence:.5f}", flush=True)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
