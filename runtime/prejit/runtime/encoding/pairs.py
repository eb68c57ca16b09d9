"""Pairs of texts to scores: how relevant a document is to a query, as a cross-encoder finds."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer as Library

from prejit.runtime.base import arguments
from prejit.runtime.encoding.sentences import OnTooLong, Tokenized, check_ids, need, reason_of_limit
from prejit.runtime.errors import ContextError, TruncationWarning, UsageError

if TYPE_CHECKING:
    from prejit.runtime.encoding.encoder import EncoderPrograms
    from prejit.runtime.text.bundle_text import BundleText
    from prejit.runtime.text.tokenizer import Tokenizer

Queries = str | Sequence[str] | None
"""One text for all documents, or as many as there are documents; None: documents are scored alone."""


def tokenize_pairs(
    encoder: EncoderPrograms,
    text: BundleText,
    query: Queries,
    documents: str | Sequence[str],
    on_too_long: OnTooLong,
    instruction: str | None = None,
) -> Tokenized:
    """Return the token ids of pairs, as transformers' tokenizers make them, or of the model's template.

    A pair that is too long loses tokens of its longer text, one after the other (`longest_first`). One of a
    template loses those before the end of the template.

    Raises:
        UsageError, ContextError, RejectError: as `Bundle.score`.
    """
    need(encoder, scores=True)
    arguments.choice("on_too_long", on_too_long, ("truncate", "error"))
    one = [documents] if isinstance(documents, str) else documents
    listed = arguments.items("documents", one, "a text or a list of texts")
    alone = query is None or isinstance(query, str)
    queries = [query] * len(listed) if alone else arguments.items("query", query, "a text")
    if len(queries) != len(listed):
        raise UsageError(
            f"query: expected one text, or {len(listed)} as documents has, found {len(queries)}"
        )
    named = (("query", queries if query is not None else ()), ("documents", listed))
    for name, texts in named:
        for place, each in enumerate(texts):
            arguments.text(f"{name}[{place}]", each)
    started = time.perf_counter()
    tokenizer, limit = text.need_tokenizer(), encoder.max_tokens
    described = encoder.encoder
    template, default = described.template, described.instruction
    if instruction is not None and default is None:
        raise UsageError("instruction: expected none: this model has no place for one")
    pairs: Sequence[Any]
    if template is not None:
        if query is None:
            raise UsageError("query: expected a text, found none: this model compares two texts")
        filled_in = default if instruction is None else arguments.text("instruction", instruction)
        pairs = [_filled(template, filled_in, *pair) for pair in zip(queries, listed, strict=True)]
    else:
        pairs = listed if query is None else list(zip(queries, listed, strict=True))
    is_plain = template is None
    found = tokenizer.encoded(
        lambda: tokenizer.library.encode_batch(pairs, add_special_tokens=is_plain)
    )
    check_ids([each.ids for each in found], described.vocab_size)
    too_long = [place for place, each in enumerate(found) if len(each.ids) > limit]
    if too_long:
        what = (
            f"{len(too_long)} of {len(found)} pairs are longer than {limit} tokens, "
            f"{reason_of_limit(encoder)}; the first is number {too_long[0]} with "
            f"{len(found[too_long[0]].ids)}"
        )
        if on_too_long == "error":
            raise ContextError(f"expected pairs of at most {limit} tokens: {what}")
        warnings.warn(
            f"{what}: they are cut off there",
            TruncationWarning,
            stacklevel=arguments.callers_level(),
        )
        cutting = Library.from_str(tokenizer.library.to_str())
        cutting.enable_truncation(limit)
        cut = tokenizer.encoded(
            lambda: cutting.encode_batch(
                [pairs[at] for at in too_long], add_special_tokens=is_plain
            )
        )
        for place, each in zip(too_long, cut, strict=True):
            found[place] = each
    second = described.vocab_size if described.segments else 0
    ids = [
        [token + second * kind for token, kind in zip(each.ids, each.type_ids, strict=True)]
        for each in found
    ]
    if template is not None and too_long:
        end = _end(tokenizer, template, filled_in)[-limit:]
        for place in too_long:
            ids[place][len(ids[place]) - len(end) :] = end
    if (unread := described.unread) is not None:
        for each in ids:
            # Causal models score at the last other token, which does not see those behind it.
            count = next((at for at in range(len(each), 0, -1) if each[at - 1] != unread), 1)
            del each[count:]
    return Tokenized(ids, len(too_long), time.perf_counter() - started)


def _filled(template: Sequence[str], instruction: str | None, query: str, document: str) -> str:
    """Return the text of a pair."""
    texts = {"instruction": instruction or "", "query": query, "document": document}
    return "".join(texts[each] if at % 2 else each for at, each in enumerate(template))


def _end(tokenizer: Tokenizer, template: Sequence[str], instruction: str | None) -> list[int]:
    """Return the tokens with which every text of a template ends, whatever stands in it."""
    one, other = tokenizer.encode_batch(
        [_filled(template, instruction, each, each) for each in ("0", "1 2 3 4")],
        add_special_tokens=False,
    )
    count = 0
    while count < min(len(one), len(other)) and one[-1 - count] == other[-1 - count]:
        count += 1
    return one[len(one) - count :]
