"""How a mesh splits an array, as text."""

from __future__ import annotations

import re

_SPLIT = re.compile(r"([A-Za-z_]\w{0,63}(\+[A-Za-z_]\w{0,63})*)?", re.ASCII)
"""The axes that split one dimension."""


def parse_sharding(text: str, dimensions: int) -> tuple[str, ...]:
    """Return a sharding from its text: `data,tensor,,` has four dimensions; two axes split that of `a+b`.

    Empty text: nothing is split.

    Raises:
        ValueError: no name of an axis, or one comes twice, or the number of dimensions is wrong.
    """
    if not text:
        return ()
    axes = tuple(text.split(","))
    named = [axis for split in axes for axis in split.split("+") if axis]
    known = all(map(_SPLIT.fullmatch, axes)) and len(set(named)) == len(named)
    if len(axes) != dimensions or not named or not known:
        raise ValueError(
            f"expected a mesh axis or none for each of {dimensions} dimensions, {text!r:.80}"
        )
    return axes
