"""The arguments and results of each kind of program, as in docs/bundle-format.md. No JAX, no file access.

Texts are made, not parsed, and shared: to compare a table of hundreds takes milliseconds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from itertools import zip_longest
from typing import final

from prejit.runtime.format.arrays import Array
from prejit.runtime.format.bundle_schema import Config, Decoder, ProgramEntry
from prejit.runtime.format.limits import MAX_CACHE_ARRAYS, MAX_DEPTH
from prejit.runtime.format.names import ADAPTABLE_KINDS, ADAPTED
from prejit.runtime.records import replace

BUCKETS = {
    "prefill": ("batch", "context", "prompt"),
    "image-prefill": ("batch", "context", "prompt"),
    "decode": ("batch", "context"),
    "verify": ("batch", "context", "draft"),
    "copy": ("batch", "context", "source_batch", "source_context"),
    "encode": ("batch", "context", "source"),
    "embed": ("batch", "length"),
    "layer": ("batch", "length"),
    "pool": ("batch", "length"),
    "image": ("batch",),
}
"""The names of the sizes in a bucket of each kind. A `call` program has the names of its manifest."""
BUCKETS |= {f"{ADAPTED}{kind}": BUCKETS[kind] for kind in ADAPTABLE_KINDS}
DECODER_KINDS = ("copy", "encode", *ADAPTABLE_KINDS, *(f"{ADAPTED}{k}" for k in ADAPTABLE_KINDS))
ENCODER_KINDS = ("embed", "layer", "pool")
WITHOUT_WEIGHTS = ("copy", "pool")
"""Kinds of programs that may have no weight set."""

_TOP_LOGPROBS = 20
_CACHE_SHARDING = " @data,tensor,,"

Signature = tuple[tuple[str, ...], tuple[str, ...]]
"""The arguments after the weights, and the results, as texts of `Array`."""


@final
class Signatures:
    """Signatures of the programs of a decoder or an encoder."""

    def __init__(self, config: Config) -> None:
        """Read the sizes of the model.

        Args:
            config: whose decoder and encoder, if any, are right in themselves.
        """
        decoder = config.decoder
        self._vocab = 0 if decoder is None else decoder.vocab_size
        self._source_array = None if decoder is None else source_array(decoder)
        self._forms = () if decoder is None else _cache_forms(decoder)
        self._decoder = decoder
        self._split = "" if config.mesh is None else _CACHE_SHARDING
        if config.encoder or config.images:
            from prejit.runtime.format.checks.encoder_interfaces import encoder_signatures

            self._encoders = encoder_signatures(config, self.of)
        self._sampling = cache(self._sampling_uncached)
        self._cache = cache(self._cache_uncached)

    def of(self, program: ProgramEntry) -> Signature:
        """Return the signature of a program whose bucket was checked; its kind is not `call`."""
        if program.kind.startswith(ADAPTED):
            # Few have any.
            from prejit.runtime.format.checks.adapter_stacks import adapted_signature

            return adapted_signature(self.of, self._decoder, program)
        sizes = program.bucket
        if program.kind not in DECODER_KINDS:
            return self._encoders(program)
        batch, context = sizes["batch"], sizes["context"]
        if program.kind == "copy":
            return self._of_copy(sizes)
        if program.kind == "encode":
            length = f'["length"] int32[{batch}]'
            return (self._source(batch, sizes["source"]), length), self._cache(batch, context)
        history = f'["history"] int32[{batch},{self._vocab}]'
        sampling, cached = self._sampling(batch), self._cache(batch, context)
        donated = tuple(f"{text} donated{self._split}" for text in cached)
        given = tuple(f"{text}{self._split}" for text in cached)
        row = f"int32[{batch}]"
        if program.kind == "decode":
            inputs = (f'["token"] {row}', f'["position"] {row}', f'["live"] {row}')
            steps = _size(program.results[2:3], r'\["tokens"\] int32\[(\d{1,10}),\d+\]')
            chosen = self._chosen((steps, batch), "s")
            return (
                (*inputs, '["steps"] int32[]', *sampling, f"{history} donated", *donated),
                (*inputs[:2], *chosen, history, *given),
            )
        count = sizes["prompt"] if program.kind == "prefill" else sizes["draft"] + 1
        inputs = (f'["tokens"] int32[{batch},{count}]', f'["start"] {row}', f'["length"] {row}')
        if program.kind == "prefill":
            return (*inputs, *sampling, history, *donated), (*self._chosen((batch,), ""), *given)
        return (
            (*inputs, *sampling, f"{history} donated", *donated),
            (*self._chosen((count, batch), "s"), f'["accepted"] {row}', history, *given),
        )

    def _sampling_uncached(self, batch: int) -> tuple[str, ...]:
        """Return the arguments in the order of the document."""
        real, whole = f"float32[{batch}]", f"int32[{batch}]"
        return (
            f'["temperature"] {real}',
            f'["top_k"] {whole}',
            f'["top_p"] {real}',
            f'["min_p"] {real}',
            f'["repetition_penalty"] {real}',
            f'["presence_penalty"] {real}',
            f'["frequency_penalty"] {real}',
            f'["seed"] uint32[{batch},2]',
            f'["bias"] float32[{batch},{self._vocab}]',
            f'["logprobs"] {whole}',
        )

    def _chosen(self, sizes: tuple[int, ...], plural: str) -> tuple[str, ...]:
        shape = ",".join(map(str, sizes))
        tops = f"{shape},{min(_TOP_LOGPROBS, self._vocab)}"
        return (
            f'["token{plural}"] int32[{shape}]',
            f'["logprob{plural}"] float32[{shape}]',
            f'["top_tokens"] int32[{tops}]',
            f'["top_logprobs"] float32[{tops}]',
        )

    def _of_copy(self, sizes: dict[str, int]) -> Signature:
        """Return the signature of a copy of all arrays together."""
        batch, rows = sizes["batch"], f'["rows"] int32[{sizes["batch"]}]'
        whole = (
            self._cache(sizes["source_batch"], sizes["source_context"]),
            self._cache(batch, sizes["context"]),
        )
        sources, targets = (
            [text.replace("cache", name, 1) for text in texts]
            for name, texts in zip(("source", "target"), whole, strict=True)
        )
        return (
            (
                *(f"{text}{self._split}" for text in sources),
                rows,
                *(f"{text} donated{self._split}" for text in targets),
            ),
            tuple(f"{text}{self._split}" for text in targets),
        )

    def _source(self, batch: int, size: int) -> str:
        array = self._source_array
        return "" if array is None else str(sized(array, {"batch": batch, "source": size}))

    def _cache_uncached(self, batch: int, context: int) -> tuple[str, ...]:
        sizes = {"batch": str(batch), "context": str(context)}
        return tuple(
            f"{head}[{','.join(sizes.get(axis, axis) for axis in axes)}]"
            for head, axes in self._forms
        )


def _cache_forms(decoder: Decoder) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return path and dtype of each array of the cache, and for each axis its variable, or else its size."""
    return tuple(
        (
            f"{json.dumps(array.path, separators=(',', ':'))} {array.dtype}",
            tuple(
                variable or str(size)
                for variable, size in zip(array.variables, array.shape, strict=True)
            ),
        )
        for array in cache_arrays(decoder)
    )


def difference(found: tuple[str, ...], expected: tuple[str, ...]) -> str:
    """Return the first difference of two unequal lists of arguments or results, as text."""
    pairs = enumerate(zip_longest(found, expected))
    place, (one, other) = next(pair for pair in pairs if pair[1][0] != pair[1][1])
    wanted, shown = ("nothing" if text is None else f"{text!r:.80}" for text in (other, one))
    return f"[{place}]: expected {wanted}, found {shown}"


def _size(texts: tuple[str, ...], form: str) -> int:
    """Return a size from the text of a program's own array; 1 if the text is not of that form."""
    found = re.fullmatch(form, texts[0], re.ASCII) if texts else None
    return max(1, int(found[1])) if found else 1


def cache_arrays(decoder: Decoder) -> tuple[Array, ...]:
    """Return the arrays of the cache at one row and one position, in order.

    Raises:
        ValueError: a text is no such array, two arrays have one path, or there are none or too many.
    """
    if not 0 < (count := len(decoder.cache)) <= MAX_CACHE_ARRAYS:
        raise ValueError(f"cache: expected 1 to {MAX_CACHE_ARRAYS} arrays, found {count}")
    arrays = tuple(_parse(text, "cache", ("batch", "", "context")) for text in decoder.cache)
    seen = set[tuple[str | int, ...]]()
    for array in arrays:
        if array.path in seen:
            raise ValueError(f"cache: expected each path once, found {str(array)!r:.80} again")
        seen.add(array.path)
    return arrays


def source_array(decoder: Decoder) -> Array | None:
    """Return the source of an encoder-decoder at one row and one place; None: it is another model.

    Raises:
        ValueError: the text is no such array.
    """
    if decoder.source is None:
        return None
    array = _parse(decoder.source, "source", ("batch", "", "source"))
    if array.path != ("source",) or array.variables.count("source") != 1:
        raise ValueError(
            f"source: expected one axis that follows 'source', found {str(array)!r:.80}"
        )
    return array


def is_rewindable(decoder: Decoder) -> bool:
    """Return whether a row can go back to an earlier position: no array holds the state of a whole text."""
    return decoder.source is not None or all(
        "context" in array.variables for array in cache_arrays(decoder)
    )


def sized(array: Array, sizes: Mapping[str, int], name: str | None = None) -> Array:
    """Return an array at the sizes of a bucket, with another first key of its path if `name` is given."""
    return replace(
        array,
        path=array.path if name is None else (name, *array.path[1:]),
        shape=array.shape_at(sizes),
        variables=(),
    )


def _parse(text: str, name: str, known: tuple[str, ...]) -> Array:
    try:
        array = Array.parse(text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    at = tuple(array.variables)
    if (
        array.path[:1] != (name,)
        or len(array.path) > MAX_DEPTH
        or array.donated
        or array.sharding
        or at[:1] != ("batch",)
        or not set(at[1:]) <= set(known[1:])
        or at.count(known[-1]) > 1
        or any(size != 1 for size, variable in zip(array.shape, at, strict=True) if variable)
        or 0 in array.shape
    ):
        raise ValueError(
            f"{name}: expected '[\"{name}\", ...] dtype[1, ...] ~batch, ...', found {text!r:.80}"
        )
    return array
