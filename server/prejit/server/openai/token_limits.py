"""The tokens that a request allows: `allowed_token_ids` and `bad_words`, as vLLM means them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from prejit.runtime.base import arguments
from prejit.runtime.errors import UsageError
from prejit.server.openai.fields import Sampled
from prejit.server.openai.prompts import off_loop
from prejit.server.served.served import Served

if TYPE_CHECKING:
    from prejit.runtime.generation.options import TokenMask
    from prejit.runtime.text.tokenizer import Tokenizer

_Mask = np.ndarray[Any, np.dtype[np.bool_]]


async def limited(
    served: Served,
    body: Sampled,
    mask: Callable[[], TokenMask] | None,
    stop_token_ids: Collection[int] | None,
) -> Callable[[], TokenMask] | None:
    """Return what makes token masks that also keep the limits of a request; None: all tokens are allowed.

    Args:
        served: the model.
        body: has the limits.
        mask: makes token masks of other limits, such as a grammar; None: there are none.

        stop_token_ids: of the request; None: those of the model.

    Raises:
        UsageError: a token is not in the vocabulary, a bad word has no tokens, or there is no tokenizer for
            them. The masks raise it, too: the limits leave no token, and the text is not at its end.
    """
    words, token_ids = body.bad_words or (), body.allowed_token_ids
    if token_ids is None and not words:
        return mask
    work = sum(map(len, words)) + len(token_ids or ())
    return await off_loop(work, lambda: _limited(served, body, mask, stop_token_ids))


def _limited(
    served: Served,
    body: Sampled,
    mask: Callable[[], TokenMask] | None,
    stop_token_ids: Collection[int] | None,
) -> Callable[[], TokenMask]:
    decoder = served.bundle.decoder.decoder
    size = decoder.vocab_size
    stops = decoder.eos_token_ids if stop_token_ids is None else stop_token_ids
    ends = [token_id for token_id in stops if token_id < size]
    always = np.full(size, body.allowed_token_ids is None)
    if body.allowed_token_ids is not None:
        arguments.check_vocabulary("allowed_token_ids", body.allowed_token_ids, size)
        always[body.allowed_token_ids] = True
    longer: dict[int, list[tuple[list[int], int]]] = {}  # by the token before the last
    for word in body.bad_words or ():
        spellings = _spellings(served.bundle.tokenizer, word)
        if not spellings:
            raise UsageError(f"bad_words: expected texts that have tokens, found {word!r:.80}")
        for *before, last in spellings:
            if before:
                longer.setdefault(before[-1], []).append((before, last))
            else:
                always[last] = False

    def make() -> TokenMask:
        inner = None if mask is None else mask()

        def allowed(token_ids: Sequence[int]) -> _Mask:
            found = always.copy()
            for before, last in longer.get(token_ids[-1], ()) if token_ids else ():
                if [*token_ids[-len(before) :]] == before:
                    found[last] = False
            other = None if inner is None else inner(token_ids)
            if other is not None:
                found &= other
            is_end = other is not None and (other[ends].any() or not other.any())
            if not is_end and not found.any():
                raise UsageError(
                    f"allowed_token_ids, bad_words: expected them to leave a token that may come, found none "
                    f"after {len(token_ids)} tokens",
                    hint="allow more tokens, those of a grammar and one that ends the answer included",
                )
            return found

        return allowed

    return make


def _spellings(tokenizer: Tokenizer, word: str) -> list[list[int]]:
    """Return the token ids of a word at the beginning of a text, and after a space if those are others.

    As vLLM has it: SamplingParams.update_from_tokenizer in vllm/sampling_params.py.
    """
    bare, spaced = (
        tokenizer.encode(before + word.lstrip(), add_special_tokens=False) for before in ("", " ")
    )
    is_other = spaced and bare and spaced[0] != bare[0] and len(spaced) == len(bare)
    return [found for found in (bare, spaced if is_other else []) if found]
