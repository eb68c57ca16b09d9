"""Sentences to embeddings, and pairs of texts to scores: tokenized, checked, cut if too long, and encoded.

A score says how relevant a document is to a query, as a cross-encoder finds.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from prejit.runtime.base import arguments
from prejit.runtime.encoding.encoder import Encoded
from prejit.runtime.errors import ContextError, TruncationWarning, UsageError

if TYPE_CHECKING:
    from prejit.runtime.encoding.encoder import EncoderPrograms
    from prejit.runtime.text.bundle_text import BundleText
    from prejit.runtime.text.tokenizer import Tokenizer

Embeddings = np.ndarray[Any, np.dtype[np.float32]]

OnTooLong = Literal["truncate", "error"]
"""What to do with a sentence that is too long."""


class Tokenized(NamedTuple):
    """Sentences as an encoder takes them.

    Attributes:
        ids: the token ids of each.
        truncated: how many of them were too long.
        seconds: time from texts to token ids.
    """

    ids: list[list[int]]
    truncated: int
    seconds: float


def tokenize(
    encoder: EncoderPrograms,
    text: BundleText,
    sentences: str | Sequence[str | Sequence[int]],
    on_too_long: OnTooLong,
    prompt_name: str | None = None,
) -> Tokenized:
    """Return the token ids of sentences, checked and cut. A prompt is put before texts, not before ids.

    Raises:
        UsageError, ContextError, RejectError: as `Bundle.encode`.
    """
    need(encoder, scores=False)
    before = _prompt(encoder, prompt_name)
    one = [sentences] if isinstance(sentences, str) else sentences
    listed = arguments.items("sentences", one, "a text or a list of texts")
    arguments.choice("on_too_long", on_too_long, ("truncate", "error"))
    started = time.perf_counter()
    texts = [before + sentence for sentence in listed if isinstance(sentence, str)]
    encoded = iter(text.need_tokenizer().encode_batch(texts) if texts else ())
    ids = [
        next(encoded)
        if isinstance(sentence, str)
        else arguments.integers(f"sentences[{place}]", sentence, "text or a list of token ids")
        for place, sentence in enumerate(listed)
    ]
    seconds = time.perf_counter() - started
    check_ids(ids, encoder.encoder.vocab_size)
    limit, why = encoder.max_tokens, reason_of_limit(encoder)
    truncated = shorten(ids, limit, lambda: text.tokenizer, on_too_long, why)
    if encoder.encoder.family == "clip":
        ids = [
            _to_end(each, encoder.encoder.vocab_size - 1, place) for place, each in enumerate(ids)
        ]
    if (padding := encoder.encoder.padding) is not None:
        ids = [each + [padding] * (limit - len(each)) for each in ids]
    return Tokenized(ids, truncated, seconds)


def _to_end(ids: list[int], end: int, place: int) -> list[int]:
    """Return ids up to the first end, which CLIP pools: what follows changes nothing before it."""
    if end not in ids:
        raise UsageError(f"sentences[{place}]: expected the end of a text, token {end}, in it")
    return ids[: ids.index(end) + 1]


def need(encoder: EncoderPrograms, *, scores: bool) -> None:
    """Check that a model embeds sentences, or that it scores texts.

    Raises:
        UsageError: it does the other.
    """
    if scores and encoder.encoder.scores is None:
        raise UsageError("expected a model that scores texts, found one that embeds", hint="encode")
    if not scores and encoder.encoder.scores is not None:
        raise UsageError(
            "expected a model that embeds sentences, found one that scores pairs of texts",
            hint="bundle.score(query, documents), or POST /v1/rerank",
        )


def reason_of_limit(encoder: EncoderPrograms) -> str:
    """Return what sets the most tokens of a sentence, for errors."""
    of_model = encoder.max_tokens == encoder.encoder.max_tokens
    return "the limit of the model" if of_model else "the longest shape of the manifest"


def _prompt(encoder: EncoderPrograms, name: str | None) -> str:
    """Return the text to put before sentences: that of a name, or of the model's default."""
    prompts = encoder.encoder.prompts or {}
    name = encoder.encoder.default_prompt if name is None else name
    if not name:
        return ""
    if name not in prompts:
        known = ", ".join(map(repr, prompts)) or "no name: this model has no prompts"
        raise UsageError(f"prompt_name: expected {known}; found {name!r:.80}")
    return prompts[name]


def shortened(encoder: EncoderPrograms, encoded: Encoded, dimensions: int | None) -> Encoded:
    """Return embeddings with their first components only, of length 1 if those of the model have it.

    That is of use with a model that was trained so (Kusupati et al. 2022, Matryoshka, arXiv 2205.13147).

    Raises:
        UsageError: the embeddings have fewer.
    """
    width = encoder.encoder.width
    if dimensions is None or arguments.integer("dimensions", dimensions, 1, width) == width:
        return encoded
    vectors = encoded.embeddings[:, :dimensions]
    if encoder.encoder.normalized:
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        vectors = (vectors / np.maximum(lengths, 1e-12)).astype(np.float32)
    return replace(encoded, embeddings=vectors)


def embed(encoder: EncoderPrograms, tokenized: Tokenized) -> Encoded:
    """Return the embeddings of sentences, or the scores of pairs, and what they cost.

    Raises:
        RejectError: a program is damaged.
    """
    found = encoder.encode(tokenized.ids)
    return replace(
        found,
        embeddings=activated(encoder, found.embeddings),
        stats=replace(
            found.stats, truncated=tokenized.truncated, tokenize_seconds=tokenized.seconds
        ),
    )


def activated(encoder: EncoderPrograms, found: Embeddings) -> Embeddings:
    """Return what a model found, with the activation of its scores, if it has one."""
    if encoder.encoder.scores != "sigmoid":
        return found
    with np.errstate(over="ignore"):  # then the score is 0
        return (1 / (1 + np.exp(-found))).astype(np.float32)


def check_ids(sentences: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Check that no sentence is empty and that all token ids are in the vocabulary.

    Raises:
        UsageError: a sentence is empty, or a token id is not in the vocabulary.
    """
    for place, ids in enumerate(sentences):
        if not ids:
            raise UsageError(f"expected at least one token in sentence {place}, found none")
        if not 0 <= min(ids) <= max(ids) < vocab_size:
            found = min(ids) if min(ids) < 0 else max(ids)
            raise UsageError(
                f"expected tokens of 0 to {vocab_size - 1} in sentence {place}, found {found}"
            )


def shorten(
    sentences: list[list[int]],
    limit: int,
    tokenizer: Callable[[], Tokenizer | None],
    on_too_long: OnTooLong,
    why: str,
) -> int:
    """Cut sentences that are too long, in place. They keep their last special tokens, such as a [SEP].

    Args:
        sentences: token ids.
        limit: the maximum length in tokens.
        tokenizer: returns the tokenizer, whose special tokens are kept; None: there are none.
        on_too_long: `truncate`, with one warning for all, or `error`.
        why: what sets the limit, for errors and the warning.

    Returns:
        How many were too long.

    Raises:
        ContextError: a sentence is too long, and on_too_long is `error`.
    """
    too_long = [place for place, ids in enumerate(sentences) if len(ids) > limit]
    if not too_long:
        return 0
    first = too_long[0]
    what = (
        f"{len(too_long)} of {len(sentences)} sentences are longer than {limit} tokens, {why}; the first "
        f"is number {first} with {len(sentences[first])}"
    )
    if on_too_long == "error":
        raise ContextError(f"expected sentences of at most {limit} tokens: {what}")
    end = [] if (known := tokenizer()) is None else known.around()[1]
    for place in too_long:
        ids = sentences[place]
        kept = end if end and len(end) < limit and ids[-len(end) :] == end else []
        sentences[place] = [*ids[: limit - len(kept)], *kept]
    warnings.warn(
        f"{what}: they are cut off there", TruncationWarning, stacklevel=arguments.callers_level()
    )
    return len(too_long)


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
    queries, listed = _checked_texts(query, documents)
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
        long = [pairs[at] for at in too_long]
        cut = _cut_encoded(tokenizer, long, limit, add_special_tokens=is_plain)
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


def _checked_texts(
    query: Queries, documents: str | Sequence[str]
) -> tuple[Sequence[Any], Sequence[str]]:
    """Return a query for each document, and the documents."""
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
    return queries, listed


def _cut_encoded(
    tokenizer: Tokenizer, pairs: Sequence[Any], limit: int, *, add_special_tokens: bool
) -> Sequence[Any]:
    """Return the encodings of pairs, cut off at a number of tokens."""
    from tokenizers import Tokenizer as Library

    cutting = Library.from_str(tokenizer.library.to_str())
    cutting.enable_truncation(limit)
    return tokenizer.encoded(
        lambda: cutting.encode_batch(pairs, add_special_tokens=add_special_tokens)
    )


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
