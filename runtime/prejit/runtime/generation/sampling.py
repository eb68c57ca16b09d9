"""How a request wants its tokens chosen, and the arrays that say so to the compiled programs. No JAX.

The choosing itself is on the device, in the programs: prejit.compiler.sampling has the order and the sources.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from prejit.runtime.base import arguments
from prejit.runtime.errors import UsageError

_NUMBERS: tuple[tuple[str, str, Callable[[float], bool]], ...] = (
    ("temperature", "0 or more", lambda value: value >= 0),
    ("top_p", "more than 0 and at most 1", lambda value: 0 < value <= 1),
    ("min_p", "0 to 1", lambda value: 0 <= value <= 1),
    ("repetition_penalty", "more than 0", lambda value: value > 0),
    ("presence_penalty", "-2 to 2", lambda value: -2 <= value <= 2),
    ("frequency_penalty", "-2 to 2", lambda value: -2 <= value <= 2),
)
"""Options that are numbers, and their ranges."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen from the logits.

    Attributes:
        temperature: 0 takes the most likely token; otherwise logits are divided by it.
        top_k: only the k most likely tokens; 0: all.
        top_p: only the smallest set of tokens that has this much probability; 1: all.
        seed: 0 to 2**64 - 1. A request's tokens depend on its seed, not on what shares its batch.
        min_p: only tokens of at least this part of the most likely one's probability; 0: all.
        repetition_penalty: divides positive and multiplies negative logits of tokens that stand in the prompt
            or were generated; 1: none (transformers, RepetitionPenaltyLogitsProcessor).
        presence_penalty: -2 to 2, taken from the logits of tokens that were generated; 0: none (OpenAI).
        frequency_penalty: -2 to 2, taken once for each time that the token was generated; 0: none (OpenAI).
        logit_bias: by token id what is added to its logit; -inf forbids it. Kept as pairs in order of the id.

    Raises:
        UsageError: a value is out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            "top_k": arguments.integer("top_k", self.top_k, 0, 2**31 - 1),
            "seed": arguments.integer("seed", self.seed, 0, 2**64 - 1),
            "logit_bias": arguments.pairs("logit_bias", self.logit_bias),
        }
        for name, expected, holds in _NUMBERS:
            checked[name] = arguments.number(name, getattr(self, name), expected, holds)
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def needs_history(self) -> bool:
        """Whether the tokens so far matter, beyond what the model makes of them."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1, 0, 0)


def arrays(
    sampling: Sequence[Sampling], vocab_size: int, logprobs: Sequence[int]
) -> dict[str, NDArray[Any] | None]:
    """The sampling arguments of a decoder's programs, in their order.

    Args:
        sampling: of each row, B.
        vocab_size: V.
        logprobs: of each row; 0: log-probabilities are not wanted.

    Returns:
        temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty float32 [B]; top_k,
        logprobs int32 [B]; seed uint32 [B, 2]; bias float32 [B, V], or None where it would be all 0: a caller
        keeps one such array on the device.

    Raises:
        UsageError: a logit_bias names a token that the vocabulary has not.
    """

    def floats(name: str) -> NDArray[np.float32]:
        return np.array([getattr(row, name) for row in sampling], np.float32)

    # What is below the normal float32 values is 0 to some devices and not to others.
    temperature, tiny = floats("temperature"), np.finfo(np.float32).tiny
    temperature[temperature < tiny] = 0
    biased = any(row.logit_bias for row in sampling)
    return {
        "temperature": temperature,
        "top_k": np.array([row.top_k for row in sampling], np.int32),
        "top_p": floats("top_p"),
        "min_p": floats("min_p"),
        "repetition_penalty": np.maximum(floats("repetition_penalty"), tiny),
        "presence_penalty": floats("presence_penalty"),
        "frequency_penalty": floats("frequency_penalty"),
        "seed": np.array([[row.seed >> 32, row.seed & 0xFFFFFFFF] for row in sampling], np.uint32),
        "bias": np.stack([bias_row(row, vocab_size) for row in sampling]) if biased else None,
        "logprobs": np.array(logprobs, np.int32),
    }


def bias_row(sampling: Sampling, vocab_size: int) -> NDArray[np.float32]:
    """The logit bias of a row: float32 [V]. A token mask adds -inf to it.

    Raises:
        UsageError: it names a token that the vocabulary has not.
    """
    row = np.zeros(vocab_size, np.float32)
    for token, value in cast("tuple[tuple[int, float], ...]", sampling.logit_bias):
        if token >= vocab_size:
            raise UsageError(
                f"logit_bias: expected token ids of 0 to {vocab_size - 1}, found {token}"
            )
        row[token] = value
    return row


def history_row(
    prompt_ids: Iterable[int], generated_ids: Iterable[int], vocab_size: int
) -> NDArray[np.int32]:
    """What penalties know of a row's text: int32 [V].

    Args:
        prompt_ids: token ids, 0 to V - 1.
        generated_ids: likewise.
        vocab_size: V.

    Returns:
        Twice the times that each token was generated, plus 1 if it stands in the prompt.
    """
    generated = np.fromiter(generated_ids, np.int64)
    row = 2 * np.bincount(generated, minlength=vocab_size).astype(np.int32)
    row[np.fromiter(prompt_ids, np.int64)] += 1
    return row
