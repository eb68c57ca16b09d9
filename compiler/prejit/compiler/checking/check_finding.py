"""The finding of a check, and the comparison of logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

TOLERANCE = 1e-4
"""Largest difference of equal logits, relative to their spread. XLA adds float32 numbers in another order for
another shape, which changes logits of large models by up to 1e-5 of their spread."""


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        name: the check: `chunks`.
        passed: whether the model keeps the rule.
        difference: the worst difference of logits, relative to their spread; None: the check compares none.
        found: what was expected and what was found; empty if the model keeps the rule.
        change: what to change in the model; empty if it keeps the rule.
    """

    name: str
    passed: bool
    difference: float | None = None
    found: str = ""
    change: str = ""


def difference(one: Any, other: Any) -> float:
    """Return the largest difference of logits relative to their spread: the largest minus the smallest.

    Args:
        one: float32, any shape.
        other: the logits to compare with, of the same shape; they define the spread.

    Returns:
        0 for equal logits, infinity if some are not finite.
    """
    one, other = (np.asarray(each, np.float64) for each in (one, other))
    if not (np.isfinite(one).all() and np.isfinite(other).all()):
        return float("inf")
    apart = float(np.max(np.abs(one - other), initial=0.0))
    spread = float(np.ptp(other)) if other.size else 0.0
    return apart / spread if spread else (0.0 if apart == 0 else float("inf"))
