"""The end of a generation: its whole text, and what it cost."""

from __future__ import annotations

from collections.abc import Mapping

from prejit.runtime.generation.rows import Usage
from prejit.runtime.generation.sampling_arguments import Logprob
from prejit.runtime.programs.ready_programs import ProgramReport
from prejit.runtime.records import dataclass


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts and times of a generation.

    Attributes:
        prompt_tokens, new_tokens: counts.
        reused_tokens: tokens of the prompt that were in a cache already.
        queue_seconds: time from the call until the request had a slot.
        prefill_seconds: time of the insertion that computed its prompt, with the prompts inserted together.
        decode_seconds: time of the decode calls that it was part of.
        first_token_seconds: time from the call to the first token.
        tokens_per_second: rate of the tokens after the first.
        passes: runs over the weights after prefill; fewer than tokens if drafts were accepted.
        drafted_tokens, accepted_tokens: counts of drafts, by prompt lookup or the draft model.
        padding: the fraction of computed positions that was wasted, 0 to 1: padding of buckets, free slots,
            wrong drafts.
        programs: names of the programs that ran for it. They name the buckets too.
        obtained: how those of them became ready that were not ready before the call: loaded, compiled, kept.
    """

    prompt_tokens: int
    new_tokens: int
    reused_tokens: int
    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    first_token_seconds: float
    tokens_per_second: float
    passes: int
    drafted_tokens: int
    accepted_tokens: int
    padding: float
    programs: tuple[str, ...]
    obtained: tuple[ProgramReport, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """One finished generation.

    Attributes:
        text: the text of the new tokens; empty if the bundle has no tokenizer.
        token_ids: the new tokens, without the stop token.
        finish_reason: `stop` (a stop token or stop string came), `length` (max_new_tokens), `context` (the
            longest context of the bundle is full), `mask` (token mask and bias forbid every token) or `nan`
            (the logits are not numbers: the weights are broken, or the cache dtype overflowed).
        stats: what it cost.
        logprobs: log-probabilities of each new token, if the request has `logprobs`.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stats: Stats
    logprobs: tuple[Logprob, ...] | None = None


def stats_of(
    usage: Usage,
    prompt: int,
    new_tokens: int,
    times: tuple[float, float, float, float],
    obtained: Mapping[str, ProgramReport],
) -> Stats:
    """Return what a generation cost.

    Args:
        usage: of its row.
        prompt: number of tokens of its prompt.
        new_tokens: number of new ones.
        times: when it began, had a slot, had its first token and its last.
        obtained: how programs became ready since it began, by name.
    """
    started, entered, first, last = times
    # The last new token is never fed back, so nothing is computed for it.
    useful = prompt - usage.reused_tokens + max(0, new_tokens - 1)
    return Stats(
        prompt_tokens=prompt,
        new_tokens=new_tokens,
        reused_tokens=usage.reused_tokens,
        queue_seconds=entered - started,
        prefill_seconds=usage.prefill_seconds,
        decode_seconds=usage.decode_seconds,
        first_token_seconds=first - started,
        tokens_per_second=(new_tokens - 1) / (last - first)
        if new_tokens > 1 and last > first
        else 0.0,
        passes=usage.passes,
        drafted_tokens=usage.drafted_tokens,
        accepted_tokens=usage.accepted_tokens,
        padding=max(0.0, 1 - useful / usage.computed_tokens),
        programs=tuple(usage.programs),
        obtained=tuple(obtained[name] for name in usage.programs if name in obtained),
    )
