"""Shape strings: how manifests write the dtype and shape of an array, `float32[{batch}, 128]`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from prejit.compiler.base.suggestions import did_you_mean, shown
from prejit.runtime.errors import ManifestError
from prejit.runtime.format.arrays import DTYPES
from prejit.runtime.format.limits import MAX_DIMENSIONS

MAX_SIZE = 2**31 - 1
"""Largest bucket and largest extent of an array: XLA uses 32-bit indexes in places."""
KEY = "key"
"""In place of a dtype: random keys of jax (jax.random.key)."""
EXAMPLE = 'a shape such as "float32[{batch}, 128]"'
SIZE = f"an integer from 1 to {MAX_SIZE}"

_EXTENT = re.compile(r"\s*(?:([0-9]{1,10})|\{([A-Za-z_][A-Za-z0-9_]*)\})\s*", re.ASCII)


def parse_shape(text: str, buckets: Mapping[str, int]) -> tuple[str, tuple[int, ...], bool]:
    """Return the dtype and shape of a shape string (`float32[{batch}, 128]`), and whether it is weak.

    Raises:
        ManifestError: the text has another form, an unknown dtype, too many dimensions, or a variable
            without a size.
    """
    try:
        dtype, extents, weak = split_shape(text)
    except ValueError as error:
        raise ManifestError(str(error)) from None
    unknown = [name for name in extents if isinstance(name, str) and name not in buckets]
    if unknown:
        raise ManifestError(undefined(unknown[0], buckets))
    shape = tuple(buckets[size] if isinstance(size, str) else size for size in extents)
    return dtype, shape, weak


def split_shape(text: str) -> tuple[str, tuple[int | str, ...], bool]:
    """Return the dtype and the extents of a shape string, and whether it is weak.

    A variable stands as its name.

    Raises:
        ValueError: the text has another form, an unknown dtype, or too many dimensions.
    """
    match = re.fullmatch(r"\s*(weak\s+)?([^\[\]\s]+)\s*\[([^\[\]]*)\]\s*", text)
    if match is None:
        raise ValueError(f"expected {EXAMPLE}; found {shown(text)}")
    weak, dtype, inside = match.groups()
    if dtype not in (*DTYPES, KEY):
        raise ValueError(
            f"expected a dtype{did_you_mean(dtype, DTYPES)}, one of {', '.join(DTYPES)};"
            f" found {shown(dtype)}"
        )
    extents: list[int | str] = []
    for part in inside.split(",") if inside.strip() else ():
        extent = _EXTENT.fullmatch(part)
        if extent is None or (extent[1] and not 0 < int(extent[1]) <= MAX_SIZE):
            raise ValueError(
                f"expected {SIZE} or a bucket variable such as {{batch}} in {shown(text)};"
                f" found {shown(part.strip())}"
            )
        extents.append(extent[2] or int(extent[1]))
    if len(extents) > MAX_DIMENSIONS:
        raise ValueError(f"expected at most {MAX_DIMENSIONS} dimensions; found {len(extents)}")
    return dtype, tuple(extents), weak is not None


def undefined(variable: str, defined: Iterable[str]) -> str:
    """Return the problem with a variable that has no sizes."""
    known = f"defined: {', '.join(defined)}" if defined else "none is defined in buckets"
    return f"undefined bucket variable {shown(variable)}{did_you_mean(variable, defined)}; {known}"
