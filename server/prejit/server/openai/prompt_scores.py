"""Log-probabilities of the tokens of a prompt, by the decode programs that every bundle has.

A request generates the prompt itself: it begins with the first token, and a token mask allows no other than
the one that the prompt has next. Log-probabilities are of the model's own logits, before the mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from starlette.requests import Request

from prejit.runtime.base import arguments
from prejit.runtime.errors import ContextError
from prejit.runtime.generation.sampling import Logprob
from prejit.server.openai import engine_calls
from prejit.server.openai.bodies import ResponseFields
from prejit.server.openai.engine_calls import TextCall
from prejit.server.openai.logprobs import LEAST, TokenNames
from prejit.server.served.served import Served


class PromptLogprob(ResponseFields, frozen=True, kw_only=True):
    """The log-probability of a token at a place of a prompt.

    Attributes:
        logprob: of the token.
        rank: 1 for the most likely token; None: it is not among those that were returned.
        decoded_token: its text.
    """

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each token of a prompt, log-probabilities by token id; None for the first, which nothing precedes."""


async def scores(
    request: Request, served: Served, wanted: Sequence[TextCall], top: int | None
) -> list[list[Logprob]]:
    """Return, for each call, the log-probabilities of the tokens of its prompt but the first.

    Args:
        request: ends the work when its client is gone.
        served: the model.
        wanted: the calls.
        top: how many of the most likely tokens; None: nothing is wanted, and the lists are empty.

    Raises:
        ContextError: a prompt is longer than the longest context that has memory.
        UsageError: a token is not in the vocabulary.
        ClientDisconnect, QueueFullError, ClosedError, DeadlineError, NumbersError: as `calls.results`.
    """
    if top is None:
        return [[] for _ in wanted]
    scored = [call for call in wanted if len(call.prompt) > 1]
    found = await engine_calls.results(request, [_scoring(served, call, top) for call in scored])
    by_call = {
        id(call): list(result.logprobs or ()) for call, [result] in zip(scored, found, strict=True)
    }
    return [by_call.get(id(call), []) for call in wanted]


def _scoring(served: Served, call: TextCall, top: int) -> TextCall:
    prompt, size = call.prompt, served.bundle.decoder.decoder.vocab_size
    arguments.check_vocabulary("prompt", prompt, size)
    if len(prompt) > (context := served.engine.plan.context):
        raise ContextError(f"prompt: expected at most {context} tokens, found {len(prompt)}")

    def next_of_prompt(token_ids: Sequence[int]) -> np.ndarray[Any, np.dtype[np.bool_]]:
        mask = np.zeros(size, np.bool_)
        mask[prompt[len(token_ids) + 1]] = True
        return mask

    options = {
        "temperature": 0.0,
        "repetition_penalty": 1.0,
        "seed": 0,
        "max_new_tokens": len(prompt) - 1,
        "min_new_tokens": 0,
        "stop_token_ids": (),
        "logprobs": top,
    }
    return replace(call, prompt=prompt[:1], options=options, choices=1, mask=lambda: next_of_prompt)


def as_vllm(
    prompt: Sequence[int], found: Sequence[Logprob], top: int, names: TokenNames
) -> PromptLogprobs:
    """Return log-probabilities of a prompt in the form of vLLM.

    Args:
        prompt: token ids.
        found: of each but the first.
        top: how many of the most likely tokens.
        names: texts of tokens.
    """
    lists: PromptLogprobs = [None for _ in prompt[:1]]
    for each in found:
        likely: dict[int, tuple[float, int | None]] = {
            token_id: (logprob, rank) for rank, (token_id, logprob) in enumerate(each.top[:top], 1)
        }
        likely.setdefault(each.token_id, (each.logprob, None))
        lists.append(
            {
                str(token_id): PromptLogprob(
                    logprob=max(logprob, LEAST), rank=rank, decoded_token=names.of(token_id)[0]
                )
                for token_id, (logprob, rank) in likely.items()
            }
        )
    return lists
