"""The text of a golden answer: what a program returned on the build host. No NumPy, no file access.

The results of a program are words, separated by spaces, one for each result of the program table, in order:

    -                        it is not compared
    =3,0,17                  whole numbers, bool included: samples, which must be equal
    -2:271,-54,n,1033        other numbers: the mean of the absolute values, then samples

The number before the colon is the exponent of the scale: 2 to its power is near the mean. What follows are
multiples of scale / 2 ** (tolerance + 2). `n` is NaN, `p` and `m` are infinities. `programs.golden_check`
chooses the elements.
"""

from __future__ import annotations

import re
from typing import NamedTuple

RECIPE = 1
"""The version of the recipe by which arguments and samples are made (programs/golden_inputs.py). A reader
that does not have an entry's version compares nothing."""

TOLERANCES = range(1, 17)
"""The tolerances that an entry may have: results may differ by scale / 2 ** tolerance."""

_NUMBER = r"-?\d{1,18}"
_WORD = rf"(?:-|={_NUMBER}(?:,{_NUMBER}){{0,31}}|-?\d{{1,4}}:\d{{1,18}}(?:,(?:{_NUMBER}|[npm])){{0,32}})"
_RESULTS = re.compile(rf"(?:{_WORD}(?: {_WORD}){{0,32767}})?", re.ASCII)
MAX_BYTES = 1 << 19
"""Maximum length of the results of one golden answer as text."""


class GoldenResult(NamedTuple):
    """The golden values of one result.

    Attributes:
        exponent: of the scale; None: the values are whole numbers.
        mean: mean of the absolute values of all finite elements, in units; 0 for whole numbers.
        samples: the samples; numbers in units, or `n`, `p`, `m`.
    """

    exponent: int | None
    mean: int
    samples: tuple[int | str, ...]


def is_results(text: str) -> bool:
    """Return whether a text has the form of the results of a golden answer."""
    return len(text) <= MAX_BYTES and _RESULTS.fullmatch(text) is not None


def parse_results(text: str) -> tuple[GoldenResult | None, ...]:
    """Return the golden values of each result; None: it is not compared.

    Args:
        text: one for which `is_results` is true.
    """
    return tuple(map(_parse, text.split(" "))) if text else ()


def format_results(results: tuple[GoldenResult | None, ...]) -> str:
    """Return the text of golden values: the inverse of `parse_results`."""
    return " ".join(map(_format, results))


def _parse(word: str) -> GoldenResult | None:
    if word == "-":
        return None
    if word[0] == "=":
        return GoldenResult(None, 0, tuple(map(int, word[1:].split(","))))
    exponent, _, values = word.partition(":")
    mean, *samples = values.split(",")
    read = tuple(each if each in ("n", "p", "m") else int(each) for each in samples)
    return GoldenResult(int(exponent), int(mean), read)


def _format(sampled: GoldenResult | None) -> str:
    if sampled is None:
        return "-"
    samples = ",".join(map(str, sampled.samples))
    if sampled.exponent is None:
        return f"={samples}"
    return f"{sampled.exponent}:{sampled.mean}{',' if samples else ''}{samples}"
