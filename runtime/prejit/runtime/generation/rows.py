"""The rows of a batch: each is one request, its text so far and its cost. Also the tokens that come out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from prejit.runtime.base import arguments
from prejit.runtime.errors import ContextError, UsageError
from prejit.runtime.generation.decoder_programs import DecoderPrograms
from prejit.runtime.generation.options import Namespace, Request
from prejit.runtime.generation.sampling_arguments import Logprob, bias_row, check_bias
from prejit.runtime.records import dataclass, field

if TYPE_CHECKING:
    from prejit.runtime.generation.drafting import PromptLookup


@dataclass(frozen=True, slots=True)
class Token:
    """A new token of a slot, or the end of its request.

    Attributes:
        slot: which slot.
        usage: what the request has cost so far.
        token_id: the token; None if the request ended without one, since stop tokens are not returned.
        logprob: its log-probability, if the request has `logprobs`.
        finish_reason: `stop` (a stop token), `length` (max_new_tokens), `context` (the longest context is
            full), `mask` (mask and bias forbid every token), `nan` (the logits are not numbers); None while
            the request continues.
    """

    slot: int
    usage: Usage
    token_id: int | None
    logprob: Logprob | None = None
    finish_reason: str | None = None


class CachedText(NamedTuple):
    """A text that a cache holds.

    Attributes:
        token_ids: its tokens.
        namespace: whose it is.
    """

    token_ids: Sequence[int] = ()
    namespace: Namespace = ()

    def reusable(self, decoder: DecoderPrograms, request: Request) -> int:
        """Return how many tokens of a request's prompt need not be computed; 0 in another namespace."""
        if self.namespace != request.namespace:
            return 0
        return decoder.reusable(self.token_ids, request.prompt)


@dataclass(slots=True)
class Usage:
    """The cost of a request so far.

    Attributes:
        reused_tokens: tokens of the prompt that were in a cache already.
        prefill_seconds: time from its insertion until its prompt was in the cache.
        decode_seconds: time of the decode calls that it was part of.
        passes: runs over the weights after prefill: decode steps and verifications.
        drafted_tokens, accepted_tokens: counts of drafts.
        computed_tokens: positions computed for it, with its share of padding and of idle rows.
        programs: names of the programs that ran for it, in order of their first run.
    """

    reused_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    passes: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    computed_tokens: float = 0.0
    programs: dict[str, None] = field(default_factory=dict)


@dataclass(slots=True)
class Row:
    """An occupied slot.

    Attributes:
        request: the request.
        stop: the tokens that end it.
        token_ids: the prompt and the generated tokens.
        usage: what it has cost.
        cached: how many tokens are in the cache. While the request continues, all but the last.
        lookup: the index for drafts; None without prompt lookup.
        allowed: the tokens that may come next; None: all.
    """

    request: Request
    stop: frozenset[int]
    token_ids: list[int]
    usage: Usage
    lookup: PromptLookup | None
    cached: int = 0
    allowed: np.ndarray[Any, Any] | None = None

    @property
    def held(self) -> CachedText:
        """The beginning of its text that the cache holds."""
        return CachedText(self.token_ids[: self.cached], self.request.namespace)

    @property
    def generated(self) -> int:
        """The number of generated tokens."""
        return len(self.token_ids) - len(self.request.prompt)

    @property
    def left(self) -> int | None:
        """The number of tokens that may still come; None: only the context limits it."""
        limit = self.request.max_new_tokens
        return None if limit is None else limit - self.generated

    @property
    def may_not_stop(self) -> bool:
        """True if stop tokens are forbidden, because too few tokens were generated."""
        return bool(self.stop) and self.generated < self.request.min_new_tokens

    @property
    def is_masked(self) -> bool:
        """True if the tokens that may come next, as `mask` found, are no rule for those after them."""
        return self.request.token_mask is not None or self.allowed is not None

    def mask(self, vocab_size: int) -> np.ndarray[Any, Any] | None:
        """Return which tokens may come next as bool [V], or None if all may. This calls the token mask.

        Raises:
            UsageError: the mask returned something else.
        """
        self.allowed, mask, start = None, self.request.token_mask, len(self.request.prompt)
        if mask is not None:
            self.allowed = checked_mask(mask(self.token_ids[start:]), vocab_size)
        first = (() if self.generated else self.request.begin_suppress_tokens) or ()
        forbidden = [each for each in first if 0 <= each < vocab_size]
        if forbidden := [*forbidden, *(self.stop if self.may_not_stop else ())]:
            allowed = np.ones(vocab_size, bool) if self.allowed is None else self.allowed.copy()
            allowed[forbidden] = False
            self.allowed = allowed
        return self.allowed

    def allows_none(self, vocab_size: int) -> bool:
        """Return whether the logit bias and the last token mask together forbid every token."""
        allowed = bias_row(self.request.sampling, vocab_size) > -np.inf
        return not (allowed if self.allowed is None else allowed & self.allowed).any()


def checked_mask(mask: Any, vocab_size: int) -> np.ndarray[Any, Any] | None:
    """Return what a token mask returned as bool [V]; None: all tokens are allowed.

    Raises:
        UsageError: it is something else.
    """
    if mask is None:
        return None
    try:
        allowed: np.ndarray[Any, Any] = np.asarray(mask)
    except Exception:  # a ragged list, a deleted buffer: NumPy raises whatever the object does
        arguments.refuse("token_mask", f"bool[{vocab_size}] or None", mask)
    if allowed.dtype != np.bool_ or allowed.shape != (vocab_size,):
        raise UsageError(
            f"token_mask: expected bool[{vocab_size}] or None, found {allowed.dtype}{list(allowed.shape)}"
        )
    return allowed


def admit(request: Request, programs: DecoderPrograms) -> Row:
    """Return a row for a request that the programs can serve.

    Raises:
        ContextError: the prompt is longer than the longest context.
        UsageError: the model or the bundle does not support something in the request.
    """
    decoder, limit = programs.decoder, programs.contexts[-1]
    prompt = list(request.prompt)
    if not prompt:
        raise UsageError("prompt: expected at least one token, found none")
    arguments.check_vocabulary("prompt", prompt, decoder.vocab_size)
    if len(prompt) > limit:
        raise ContextError(
            f"prompt: expected at most {limit} tokens (the longest context), found {len(prompt)}",
            hint="shorten the prompt, or add a longer context to [generate] of the manifest",
        )
    if request.stop_token_ids is not None:
        arguments.check_vocabulary("stop_token_ids", request.stop_token_ids, decoder.vocab_size)
    stop = decoder.eos_token_ids if request.stop_token_ids is None else request.stop_token_ids
    lookup = None
    if request.prompt_lookup:
        from prejit.runtime.generation.drafting import PromptLookup  # few requests ask for it

        lookup = PromptLookup(prompt)
    row = Row(request, frozenset(stop), prompt, Usage(), lookup)
    check_bias(request.sampling, decoder.vocab_size)
    if request.prompt_lookup and not programs.draft_tokens:
        raise UsageError(
            "prompt_lookup: expected a bundle with programs that verify drafts, found none",
            hint="set draft_tokens, such as 8, in [generate] of the manifest and build again",
        )
    if request.source is not None or programs.source is not None:
        from prejit.runtime.generation.source_check import check_source

        check_source(request.source, programs)
    if request.prefix is not None and not request.prefix.is_of(programs.programs):
        raise UsageError("prefix: expected one that this bundle computed, found another bundle's")
    if request.adapter is not None:
        programs.adapters.check(request.adapter)
    return row
