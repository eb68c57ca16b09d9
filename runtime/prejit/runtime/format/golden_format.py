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
from dataclasses import dataclass

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


def is_results(text: str) -> bool:
    """Return whether a text has the form of the results of a golden answer."""
    return len(text) <= MAX_BYTES and _RESULTS.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class Golden:
    """The results of a program on the build host, for arguments that a seed makes.

    Attributes:
        recipe: version of the recipe of the arguments; readers ignore recipes that they do not have.
        seed: the seed.
        source: the target whose executable gave the answer, or `portable`: the portable program did, because
            the build host runs none of the targets.
        tolerance: results may differ from it by their scale / 2 ** tolerance; whole numbers may not.
        results: samples of the results, as text (format/golden_format.py).
    """

    recipe: int
    seed: int
    source: str
    tolerance: int
    results: str

    def __post_init__(self) -> None:
        if not (self.recipe >= 1 and 0 <= self.seed < 1 << 32 and self.tolerance in TOLERANCES):
            raise ValueError(
                f"golden: expected a recipe from 1, a seed of 32 bits and a tolerance of 1 to "
                f"{TOLERANCES[-1]}; found {self.recipe}, {self.seed} and {self.tolerance}"
            )
        if not is_results(self.results):
            raise ValueError(f"golden: results: expected samples, found {self.results!r:.80}")
