"""The options that every generating method of a bundle takes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TypedDict

from prejit.runtime.generation.kv_cache import Prefix
from prejit.runtime.generation.request import TokenMask

Prompt = str | Sequence[int]


class Options(TypedDict, total=False):
    """What a generation may be asked for.

    What is not given, or None, is as the bundle's `defaults` say, or else off.

    Attributes:
        temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty,
            logit_bias, seed: see `Sampling`.
        max_new_tokens: stop after so many; without it, when a stop token comes or the longest context is
            full.
        stop_token_ids: stop at any of these; without them, at those of the model's generation config.
        stop: stop before any of these strings.
        logprobs: how many of the most likely tokens at each place to give with their log-probabilities, 0 to
            20, beside that of the chosen one.
        token_mask: called with the token ids generated so far, before every token; gives bool [V], which may
            come next, or None. It takes one step a call.
        prompt_lookup: draft tokens by prompt lookup and verify several in a pass, where the bundle has
            `draft_tokens`. The tokens are the same; text that repeats itself comes faster.
        prefix: from `Bundle.prefix`.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    max_new_tokens: int | None
    stop_token_ids: Collection[int] | None
    stop: str | Sequence[str]
    logprobs: int | None
    token_mask: TokenMask | None
    prompt_lookup: bool
    prefix: Prefix | None
