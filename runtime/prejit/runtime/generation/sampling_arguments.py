"""Sampling options as arrays for the compiled programs, and log-probabilities from their results.

The device chooses the tokens: prejit.compiler.lowering.sampling_programs has the order of the steps and
their sources.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from prejit.runtime.device.transfer import DeviceArray, aligned_zeros, to_numpy
from prejit.runtime.errors import UsageError
from prejit.runtime.generation.decoder_programs import DecoderPrograms
from prejit.runtime.generation.options import Sampling
from prejit.runtime.records import dataclass

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Logprob:
    """How likely a token was by the model's own logits, before penalties, bias and temperature.

    Attributes:
        token_id: the chosen token.
        logprob: its log-probability.
        top: the most likely tokens and their log-probabilities, best first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def arrays(
    sampling: Sequence[Sampling], vocab_size: int, logprobs: Sequence[int]
) -> dict[str, NDArray[Any] | None]:
    """Return the sampling arguments of a decoder's programs, in their order.

    Args:
        sampling: one for each of the B rows.
        vocab_size: V.
        logprobs: for each row, 1 to compute log-probabilities, 0 not to.

    Returns:
        temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty float32 [B]; top_k,
        logprobs int32 [B]; seed uint32 [B, 2]; bias float32 [B, V], or None if it is all zeros: the caller
        keeps one such array on the device.

    Raises:
        UsageError: a logit_bias has a token id that is not in the vocabulary.
    """

    def floats(name: str) -> NDArray[np.float32]:
        return np.array([getattr(row, name) for row in sampling], np.float32)

    # Some devices flush subnormal float32 values to 0 and others do not, so we do it here for all.
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


def place_sampling(
    decoder: DecoderPrograms,
    sampling: Sequence[Sampling],
    logprobs: Sequence[int],
    bias: NDArray[np.float32] | None = None,
) -> dict[str, DeviceArray]:
    """Put the sampling arguments of a batch on the device. Arguments as `arrays`.

    A bias, float32 [B, V], takes the place of the rows' own logit_bias.
    """
    values = arrays(sampling, decoder.decoder.vocab_size, logprobs)
    if bias is not None:
        values["bias"] = bias
    return {
        name: decoder.zeros(len(sampling), np.float32)
        if value is None
        else decoder.device.put(value)
        for name, value in values.items()
    }


def bias_row(sampling: Sampling, vocab_size: int) -> NDArray[np.float32]:
    """Return the logit bias of a row, float32 [V].

    Raises:
        UsageError: it has a token id that is not in the vocabulary.
    """
    check_bias(sampling, vocab_size)
    row = np.zeros(vocab_size, np.float32)
    for token, value in cast("tuple[tuple[int, float], ...]", sampling.logit_bias):
        row[token] = value
    return row


def check_bias(sampling: Sampling, vocab_size: int) -> None:
    """Check that a logit bias is of tokens of the vocabulary.

    Raises:
        UsageError: it has a token id that is not in the vocabulary.
    """
    pairs = cast("tuple[tuple[int, float], ...]", sampling.logit_bias)
    if pairs and (largest := pairs[-1][0]) >= vocab_size:
        raise UsageError(
            f"logit_bias: expected token ids of 0 to {vocab_size - 1}, found {largest}"
        )


def masked_bias(
    sampling: Sequence[Sampling], masks: Mapping[int, NDArray[np.bool_]], vocab_size: int
) -> NDArray[np.float32] | None:
    """Return the rows' logit biases with -inf for each token that a mask forbids, float32 [B, V].

    Returns:
        The biases, or None if there are no masks.
    """
    if not masks:
        return None
    bias = aligned_zeros((len(sampling), vocab_size), np.dtype(np.float32))
    for place, one in enumerate(sampling):
        bias[place] = bias_row(one, vocab_size)
    for place, mask in masks.items():
        bias[place, ~mask] = -np.inf
    return bias


def history_row(
    prompt_ids: Iterable[int], generated_ids: Iterable[int], vocab_size: int
) -> NDArray[np.int32]:
    """Return the token counts of a row for its penalties, int32 [V].

    Returns:
        For each token, twice the number of times it was generated, plus 1 if it is in the prompt.
    """
    generated = np.fromiter(generated_ids, np.int64)
    row = 2 * np.bincount(generated, minlength=vocab_size).astype(np.int32)
    row[np.fromiter(prompt_ids, np.int64)] += 1
    return row


def read_logprob(
    results: Mapping[str, DeviceArray], name: str, at: int | tuple[int, int], token: int, count: int
) -> Logprob:
    """Return the log-probabilities of one token from a program's results.

    Args:
        results: arrays by name.
        name: which of them has the log-probabilities of the chosen tokens.
        at: the row, or (step, row).
        token: the chosen token.
        count: how many of the most likely tokens to return.
    """
    tokens = to_numpy(results["top_tokens"])[at][:count].tolist()
    logprobs = to_numpy(results["top_logprobs"])[at][:count].tolist()
    top = tuple(zip(tokens, logprobs, strict=True))
    return Logprob(token, float(to_numpy(results[name])[at]), top)
