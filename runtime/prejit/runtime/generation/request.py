"""What is asked of generation, what comes of it token by token, and what it costs. No JAX."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from prejit.runtime.base import arguments
from prejit.runtime.errors import ContextError, UsageError
from prejit.runtime.generation.decoder_programs import DecoderPrograms
from prejit.runtime.generation.kv_cache import Prefix
from prejit.runtime.generation.prompt_lookup import PromptLookup
from prejit.runtime.generation.sampling import Sampling, bias_row

TokenMask = Callable[[Sequence[int]], Any]
"""Takes the token ids generated so far, gives bool [V]: which tokens may come next; or None: all may."""

MAX_LOGPROBS = 20
"""Of the most likely tokens at a place, how many a program gives with their log-probabilities."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be generated.

    Attributes:
        prompt: token ids, at least one.
        sampling: how tokens are chosen.
        max_new_tokens: stop after so many; None: when a stop token comes or the longest context is full.
        stop_token_ids: stop at any of these; None: those of the model's generation config.
        logprobs: how many of the most likely tokens at each place are wanted with their log-probabilities,
            beside the chosen one's; None: none at all.
        token_mask: asked before every token for those that may come.
        prompt_lookup: whether tokens are drafted by prompt lookup and verified, several in a pass. It
            changes no token, only how fast they come.
        prefix: what of the prompt may be computed already, by the same bundle.

    Raises:
        UsageError: a value is of the wrong type or out of its range.
    """

    prompt: Sequence[int]
    sampling: Sampling = field(default_factory=Sampling)
    max_new_tokens: int | None = None
    stop_token_ids: Collection[int] | None = None
    logprobs: int | None = None
    token_mask: TokenMask | None = None
    prompt_lookup: bool = False
    prefix: Prefix | None = None

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            "prompt": arguments.integers("prompt", self.prompt, "a list of token ids"),
            "sampling": arguments.instance("sampling", self.sampling, Sampling),
            "token_mask": arguments.function("token_mask", self.token_mask),
            "prompt_lookup": arguments.flag("prompt_lookup", self.prompt_lookup),
        }
        if self.max_new_tokens is not None:
            checked["max_new_tokens"] = arguments.integer("max_new_tokens", self.max_new_tokens, 1)
        if self.stop_token_ids is not None:
            stop = arguments.integers("stop_token_ids", self.stop_token_ids, sets=True)
            checked["stop_token_ids"] = frozenset(stop)
        if self.logprobs is not None:
            checked["logprobs"] = arguments.integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prefix is not None:
            arguments.instance("prefix", self.prefix, Prefix)
        for name, value in checked.items():
            object.__setattr__(self, name, value)


SAMPLING_OPTIONS = tuple(field.name for field in fields(Sampling))
OPTIONS = (
    *SAMPLING_OPTIONS,
    *(field.name for field in fields(Request) if field.name not in ("prompt", "sampling")),
    "stop",
)
"""Names of the options of a generation; those before them are of its sampling."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The options of a generation, resolved.

    Attributes:
        sampling: how tokens are chosen.
        common: the fields of a `Request` beside its prompt and sampling, where they were given.
        stop: strings to stop before.
    """

    sampling: Sampling
    common: dict[str, Any]
    stop: tuple[str, ...] = ()

    def request(self, prompt: Sequence[int]) -> Request:
        """Return the request for a prompt.

        Raises:
            UsageError: an option is of the wrong type or out of its range.
        """
        return Request(prompt, self.sampling, **self.common)


def resolve(options: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> Wanted:
    """Resolve the options of a call. None stands for an option that is not given, nothing else does.

    Args:
        options: by their names.
        defaults: those of the bundle, for options that are not given; None: there are none.

    Raises:
        UsageError: there is no such option, or one is of the wrong type or out of its range.
    """
    if unknown := options.keys() - set(OPTIONS):
        raise UsageError(f"expected options of {', '.join(OPTIONS)}; found {min(unknown)!r}")
    given = dict(defaults or {})
    given |= {name: value for name, value in options.items() if value is not None}
    stop = arguments.strings("stop", given.pop("stop", ()))
    chosen = {
        field.name: given.pop(field.name) for field in fields(Sampling) if field.name in given
    }
    return Wanted(Sampling(**chosen), given, stop)


@dataclass(frozen=True, slots=True)
class Logprob:
    """How likely a token was, by the model's own logits (before penalties, bias and temperature).

    Attributes:
        token_id: that was chosen.
        logprob: its log-probability.
        top: the most likely tokens and their log-probabilities, best first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Token:
    """What came of a slot.

    Attributes:
        slot: which.
        usage: what the request has cost so far.
        token_id: the token; None where there is none, as a stop token is not given out.
        logprob: where it was asked for.
        finish_reason: `stop` (a stop token), `length` (max_new_tokens), `context` (the longest context is
            full), `mask` (mask and bias allow nothing), `nan` (the model gave no numbers); None: it goes on.
    """

    slot: int
    usage: Usage
    token_id: int | None
    logprob: Logprob | None = None
    finish_reason: str | None = None


@dataclass(slots=True)
class Usage:
    """What a request has cost so far.

    Attributes:
        reused_tokens: of the prompt, that were in a cache already.
        prefill_seconds: until its prompt was in the cache, from its insertion.
        decode_seconds: of the steps that it was part of.
        passes: runs over the weights after prefill: steps and verifications.
        drafted_tokens, accepted_tokens: of prompt lookup.
        computed_tokens: positions that were computed for it, padding and resting rows included; a call's
            are shared among its rows.
        programs: names of those that ran for it, in order of their first run.
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
    """A live slot. All of `token_ids` but the last are in the cache, once its prompt is.

    Attributes:
        request: what it is for.
        stop: the tokens that end it.
        token_ids: the prompt and what was generated.
        usage: what it has cost.
        lookup: the index for drafts.
        allowed: what the token mask last said; None: all may come.
    """

    request: Request
    stop: frozenset[int]
    token_ids: list[int]
    usage: Usage
    lookup: PromptLookup | None
    allowed: np.ndarray[Any, Any] | None = None

    @property
    def generated(self) -> int:
        """How many tokens were generated."""
        return len(self.token_ids) - len(self.request.prompt)

    @property
    def left(self) -> int | None:
        """Tokens that may still come; None: no limit but the context."""
        limit = self.request.max_new_tokens
        return None if limit is None else limit - self.generated

    def mask(self, vocab_size: int) -> np.ndarray[Any, Any] | None:
        """What the token mask says of the next token: bool [V]; None: all may come.

        Raises:
            UsageError: it says something else.
        """
        if self.request.token_mask is None:
            return None
        mask = self.request.token_mask(self.token_ids[len(self.request.prompt) :])
        self.allowed = None
        if mask is None:
            return None
        try:
            mask = np.asarray(mask)
        except Exception:  # a ragged list, a deleted buffer: NumPy raises whatever the object does
            arguments.refuse("token_mask", f"bool[{vocab_size}] or None", mask)
        if mask.dtype != np.bool_ or mask.shape != (vocab_size,):
            raise UsageError(
                f"token_mask: expected bool[{vocab_size}] or None, found {mask.dtype}{list(mask.shape)}"
            )
        self.allowed = mask
        return mask

    def allows_none(self, vocab_size: int) -> bool:
        """Whether logit bias and the last token mask forbid every token."""
        allowed = bias_row(self.request.sampling, vocab_size) > -np.inf
        return not (allowed if self.allowed is None else allowed & self.allowed).any()


def admit(request: Request, programs: DecoderPrograms) -> Row:
    """A row for a request, if the programs can serve it.

    Raises:
        ContextError: its prompt is longer than the longest context.
        UsageError: something else is asked for that this model or bundle has not.
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
    programs.check_sampling(
        request.sampling,
        logprobs=request.logprobs is not None,
        masked=request.token_mask is not None,
    )
    bias_row(request.sampling, decoder.vocab_size)
    if request.prompt_lookup and not programs.draft_tokens:
        raise UsageError(
            "prompt_lookup: expected a bundle with programs that verify drafts, found none",
            hint="set draft_tokens, such as 8, in [generate] of the manifest and build again",
        )
    if request.prefix is not None and not request.prefix.is_of(programs.programs):
        raise UsageError("prefix: expected one that this bundle computed, found another bundle's")
    stop = decoder.eos_token_ids if request.stop_token_ids is None else request.stop_token_ids
    lookup = PromptLookup(prompt) if request.prompt_lookup else None
    return Row(request, frozenset(stop), prompt, Usage(), lookup)
