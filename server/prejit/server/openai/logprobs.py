"""Log-probabilities of tokens, in the form of the chat API and in that of the older completions API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from prejit.runtime.generation.sampling import Logprob
from prejit.runtime.text.vocabulary import TokenBytes
from prejit.server.openai.bodies import ResponseFields
from prejit.server.served.served import Served

LEAST = -9999.0
"""What OpenAI gives for a probability of 0, whose logarithm JSON cannot hold."""


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


@final
class TokenNames:
    """Texts of tokens. A bundle without a tokenizer has `token_id:N`, as vLLM writes them."""

    def __init__(self, tokens: TokenBytes | None) -> None:
        self._tokens = tokens

    def of(self, token_id: int) -> tuple[str, list[int] | None]:
        """Return the text of a token, U+FFFD for parts of characters, and its bytes."""
        if self._tokens is None:
            return f"token_id:{token_id}", None
        content = self._tokens[token_id]
        return content.decode("utf-8", "replace"), list(content)


def token_names(served: Served, *, wanted: bool) -> TokenNames:
    """Return the texts of a model's tokens, which are only read if they are wanted."""
    bundle = served.bundle
    return TokenNames(bundle.tokenizer.token_bytes if wanted and bundle.has_tokenizer else None)


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
        token=text,
        logprob=max(found.logprob, LEAST),
        bytes=content,
        top_logprobs=alternatives,
    )


@final
class CompletionLogprobLists:
    """Makes the parallel lists of the older API, piece by piece.

    Attributes:
        offset: the place of the next token in the text.
    """

    def __init__(self, names: TokenNames, top: int, offset: int = 0) -> None:
        self._names = names
        self._top = top
        self.offset = offset

    def take(self, tokens: Sequence[Logprob], prompt: Sequence[int] = ()) -> CompletionLogprobs:
        """Return the lists for the next tokens.

        Args:
            tokens: the tokens.
            prompt: what comes before them and is echoed: its first token has no log-probability, and `tokens`
                begins with those of the others.
        """
        texts: list[str] = []
        offsets: list[int] = []
        tops: list[dict[str, float] | None] = []
        for token_id in prompt[:1]:
            text, _ = self._names.of(token_id)
            texts.append(text)
            offsets.append(self.offset)
            self.offset += len(text)
            tops.append(None)
        for found in tokens:
            text, _ = self._names.of(found.token_id)
            texts.append(text)
            offsets.append(self.offset)
            self.offset += len(text)
            # The chosen token is always among them, so there may be one more than asked for.
            likely = {
                self._names.of(token_id)[0]: max(logprob, LEAST)
                for token_id, logprob in found.top[: self._top]
            }
            likely.setdefault(text, max(found.logprob, LEAST))
            tops.append(likely)
        return CompletionLogprobs(
            text_offset=offsets,
            token_logprobs=[
                *(None for _ in prompt[:1]),
                *(max(found.logprob, LEAST) for found in tokens),
            ],
            tokens=texts,
            top_logprobs=tops if self._top else None,
        )
