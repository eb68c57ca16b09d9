"""The arrays of a decoder's cache, and of the source of an encoder-decoder. No JAX, no file access.

The program table holds each array at one row and one position; `~batch,,context,` says which axes follow the
bucket: `["cache",0,1] float32[1,12,1,64] ~batch,,context,`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from prejit.runtime.format.arrays import Array
from prejit.runtime.format.bundle_schema import Decoder
from prejit.runtime.format.limits import MAX_CACHE_ARRAYS
from prejit.runtime.format.trees import MAX_DEPTH


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
        shape=tuple(
            sizes[variable] if variable else size
            for variable, size in zip(array.variables, array.shape, strict=True)
        ),
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
