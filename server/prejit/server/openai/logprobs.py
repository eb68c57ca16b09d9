"""Log-probabilities of tokens in the forms of the chat API, of the older completions API, and of vLLM.

Those of a prompt come from the decode programs that every bundle has: a request generates the prompt itself.
It begins with the first token, and a token mask allows no other than the one that the prompt has next.
Log-probabilities are of the model's own logits, before the mask.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, final

import numpy as np

from prejit.runtime.base import arguments
from prejit.runtime.errors import ContextError
from prejit.runtime.generation.sampling_arguments import Logprob
from prejit.runtime.text.vocabulary import TokenBytes
from prejit.server.openai import engine_calls
from prejit.server.openai.bodies import ResponseFields
from prejit.server.openai.engine_calls import AskedTexts, TextCall
from prejit.server.served.served import Served

_UTF8 = codecs.getincrementaldecoder("utf-8")
LEAST = -9999.0
"""OpenAI's value for a probability of 0, whose logarithm JSON cannot hold."""


class TopLogprob(ResponseFields, frozen=True, kw_only=True):
    """One of the most likely tokens at a place."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(ResponseFields, frozen=True, kw_only=True):
    """A token and the most likely ones at its place."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(ResponseFields, frozen=True, kw_only=True):
    """Log-probabilities of the tokens of a chat's answer."""

    content: list[TokenLogprob] | None


class CompletionLogprobs(ResponseFields, frozen=True, kw_only=True):
    """Log-probabilities of the tokens of a completion, as parallel lists. The first of a text has none."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None] | None


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


@final
class TokenNames:
    """Texts of tokens. A bundle without a tokenizer has `token_id:N`, as vLLM writes them."""

    def __init__(
        self, tokens: TokenBytes | None, special_id: Callable[[str], int | None] = lambda text: None
    ) -> None:
        self._tokens = tokens
        self._special_id = special_id

    def of(self, token_id: int) -> tuple[str, list[int] | None]:
        """Return the text of a token, U+FFFD for parts of characters, and its bytes."""
        if self._tokens is None:
            return f"token_id:{token_id}", None
        content = self._tokens[token_id]
        return content.decode("utf-8", "replace"), list(content)

    def is_special(self, token_id: int) -> bool:
        """Return whether the text of an answer leaves a token out."""
        return self._special_id(self.of(token_id)[0]) == token_id


def token_names(served: Served, *, wanted: bool) -> TokenNames:
    """Return the texts of a model's tokens, which are only read if they are wanted."""
    if not wanted or not served.bundle.has_tokenizer:
        return TokenNames(None)
    tokenizer = served.bundle.tokenizer
    return TokenNames(tokenizer.token_bytes, tokenizer.special_id)


def for_chat(found: Logprob, names: TokenNames, top: int) -> TokenLogprob:
    """Return the log-probabilities of a token in the form of the chat API.

    Args:
        found: what the engine returned.
        names: texts of tokens.
        top: how many of the most likely tokens.
    """
    alternatives = []
    for token_id, logprob in found.top[:top]:
        text, content = names.of(token_id)
        alternatives.append(TopLogprob(token=text, logprob=max(logprob, LEAST), bytes=content))
    text, content = names.of(found.token_id)
    return TokenLogprob(
        token=text, logprob=max(found.logprob, LEAST), bytes=content, top_logprobs=alternatives
    )


@final
class CompletionLogprobLists:
    """Makes the parallel lists of the older API, piece by piece."""

    def __init__(self, names: TokenNames, top: int) -> None:
        self._names = names
        self._top = top
        # Before the next token in the text, the offset in characters.
        self._bytes = self._offset = 0
        self._decoder = _UTF8("replace")  # keeps the bytes of half a character

    def take(
        self, tokens: Sequence[Logprob], prompt: Sequence[int] = (), text: str = ""
    ) -> CompletionLogprobs:
        """Return the lists for the next tokens.

        Args:
            tokens: the tokens.
            prompt: what comes before them and is echoed: its first token has no log-probability, and `tokens`
                begins with those of the others.
            text: with the first tokens: the beginning of the text, as much of it as is known.
        """
        texts: list[str] = []
        offsets: list[int] = []
        known = text.encode()
        for token_id in (*prompt[:1], *(found.token_id for found in tokens)):
            texts.append(self._names.of(token_id)[0])
            offsets.append(self._pass(token_id, known))
        unknown = [None for _ in prompt[:1]]
        return CompletionLogprobs(
            text_offset=offsets,
            token_logprobs=[*unknown, *(max(found.logprob, LEAST) for found in tokens)],
            tokens=texts,
            top_logprobs=[*unknown, *map(self._likely, tokens)] if self._top else None,
        )

    def _pass(self, token_id: int, known: bytes) -> int:
        """Return where the next token begins in the text, in characters, and move behind it.

        A token that is a part of a character begins where that character does.

        A prompt may spell special tokens out or not, and a tokenizer may put a space before it that the text
        does not have.
        """
        name, listed = self._names.of(token_id)
        content = name.encode() if listed is None else bytes(listed)
        if not known.startswith(content, self._bytes):
            if self._names.is_special(token_id):
                return self._offset
            if not self._bytes and known and known.startswith(content[1:]) and content[:1] == b" ":
                content = content[1:]
        held = self._decoder.getstate()[0]
        at = self._offset
        self._bytes += len(content)
        self._offset += len(self._decoder.decode(content))
        # What does not go on with half a character begins behind the U+FFFD that stands for it.
        return at + bool(held and content and content[0] & 0xC0 != 0x80)

    def _likely(self, found: Logprob) -> dict[str, float]:
        # Parts of characters have one text: it keeps the most likely one's. The chosen token is always among
        # them, so there may be one more than asked for.
        likely: dict[str, float] = {}
        for token_id, logprob in (*found.top[: self._top], (found.token_id, found.logprob)):
            likely.setdefault(self._names.of(token_id)[0], max(logprob, LEAST))
        return likely


async def scores_of_prompts(
    asked: AskedTexts, wanted: Sequence[TextCall], top: int | None
) -> list[list[Logprob]]:
    """Return, for each call, the log-probabilities of the tokens of its prompt but the first.

    Args:
        asked: the request, which ends the work when its client is gone.
        wanted: the calls.
        top: how many of the most likely tokens; None: nothing is wanted, and the lists are empty.

    Raises:
        ContextError: a prompt is longer than the longest context that has memory.
        UsageError: a token is not in the vocabulary.
        ClientDisconnect, QueueFullError, ClosedError, DeadlineError, NumbersError: as `results`.
    """
    if top is None:
        return [[] for _ in wanted]
    scoring = [_scoring(asked.served, call, top) for call in wanted if len(call.prompt) > 1]
    found = iter(await engine_calls.results(asked.request, scoring))
    return [[*(next(found)[0].logprobs or ())] if len(call.prompt) > 1 else [] for call in wanted]


def _scoring(served: Served, call: TextCall, top: int) -> TextCall:
    prompt, size = call.prompt, served.bundle.decoder.decoder.vocab_size
    arguments.check_vocabulary("prompt", prompt, size)
    if len(prompt) > (context := served.engine.plan.context):
        raise ContextError(f"prompt: expected at most {context} tokens, found {len(prompt)}")

    def next_of_prompt(token_ids: Sequence[int]) -> np.ndarray[Any, np.dtype[np.bool_]]:
        mask = np.zeros(size, np.bool_)
        mask[prompt[len(token_ids) + 1]] = True
        return mask

    suppressed = (each for each in served.bundle.defaults.suppress_tokens if each < size)
    options = {
        "logit_bias": dict.fromkeys(suppressed, 0.0),
        "begin_suppress_tokens": (),
        "temperature": 0.0,
        "repetition_penalty": 1.0,
        "seed": 0,
        "max_new_tokens": len(prompt) - 1,
        "min_new_tokens": 0,
        "stop_token_ids": (),
        "logprobs": top,
        "adapter": call.options.get("adapter"),
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
