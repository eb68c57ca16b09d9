"""The tokens that a request allows: `allowed_token_ids` and `bad_words`, as vLLM means them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from prejit.runtime.base import arguments
from prejit.runtime.server.openai.fields import Sampled
from prejit.runtime.server.served import Served

if TYPE_CHECKING:
    from prejit.runtime.generation.options import TokenMask
    from prejit.runtime.text.tokenizer import Tokenizer

_Mask = np.ndarray[Any, np.dtype[np.bool_]]


def limited(
    served: Served, body: Sampled, mask: Callable[[], TokenMask] | None
) -> Callable[[], TokenMask] | None:
    """Return what makes token masks that also keep the limits of a request; None: all tokens are allowed.

    Args:
        served: the model.
        body: has the limits.
        mask: makes token masks of other limits, such as a grammar; None: there are none.

    Raises:
        UsageError: a token is not in the vocabulary; or there are bad words and no tokenizer.
    """
    if body.allowed_token_ids is None and not body.bad_words:
        return mask
    size = served.bundle.decoder.decoder.vocab_size
    always = np.full(size, body.allowed_token_ids is None)
    if body.allowed_token_ids is not None:
        arguments.check_vocabulary("allowed_token_ids", body.allowed_token_ids, size)
        always[body.allowed_token_ids] = True
    longer: list[tuple[list[int], int]] = []
    for word in body.bad_words or ():
        for *before, last in _spellings(served.bundle.tokenizer, word):
            if before:
                longer.append((before, last))
            else:
                always[last] = False

    def make() -> TokenMask:
        inner = None if mask is None else mask()

        def allowed(token_ids: Sequence[int]) -> _Mask:
            found = always.copy()
            for before, last in longer:
                if [*token_ids[-len(before) :]] == before:
                    found[last] = False
            if inner is not None and (other := inner(token_ids)) is not None:
                found &= other
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
