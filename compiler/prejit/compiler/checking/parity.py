"""Compare a model with a reference of the same model, in any framework."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from prejit.compiler.checking.check_finding import Finding, difference
from prejit.compiler.checking.subject import Subject


def against(subject: Subject, reference: Callable[..., Any]) -> Finding:
    """Compare the logits after each token with those of a reference."""
    texts = subject.texts[:, : 3 * subject.piece]
    logits, _ = subject.feed(texts, subject.cache())
    given: tuple[Any, ...] = (texts,)
    if subject.encodes:
        lengths = np.full(len(texts), subject.source_size, np.int32)
        given = (subject.sources(), lengths, texts)
    right = _as_numpy(reference(*given))
    if right.shape != logits.shape:
        return Finding(
            "against",
            False,
            None,
            f"expected logits {list(logits.shape)} of the reference, found {list(right.shape)}",
            "return [B, T, V] from the reference: the logits after each token",
        )
    apart = [difference(logits[:, at], right[:, at]) for at in range(texts.shape[1])]
    first = next((at for at, one in enumerate(apart) if one > subject.tolerance), None)
    if first is None:
        return Finding("against", True, max(apart))
    return Finding(
        "against",
        False,
        max(apart),
        f"expected the logits of the reference, found a difference of {apart[first]:.1e} of their spread "
        f"after token {first}, the first that differs",
        "compare the layers one by one: weights, scales, norms and positions"
        if first == 0
        else "compare what later tokens read: positions, masks and the cache",
    )


def _as_numpy(logits: Any) -> np.ndarray[Any, Any]:
    """Return logits of NumPy, jax or torch as NumPy array."""
    if hasattr(logits, "detach"):  # torch: it may need gradients, be on a GPU, or be bfloat16
        logits = logits.detach().float().cpu().numpy()
    return np.asarray(logits, np.float32)
