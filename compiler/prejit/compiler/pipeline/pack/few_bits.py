"""Count the matrices that were published in few bits: those kept exactly, and those converted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FewBits:
    """How many matrices of few bits were kept exactly, and how many were converted.

    Attributes:
        forms: number of matrices by form, such as `GPTQ, 4 bits, groups of 128`.
        kept: number of matrices whose values are exactly the published ones.
        converted: number of the others.
        error: the largest error of one: the root of the sum of its squares, as a share of that of the values.
    """

    forms: dict[str, int]
    kept: int
    converted: int
    error: float

    def __str__(self) -> str:
        """Return it as a line for people."""
        matrices = "matrix" if self.kept == 1 else "matrices"
        forms = "; ".join(
            form if len(self.forms) == 1 else f"{count} of {form}"
            for form, count in self.forms.items()
        )
        line = f"kept {self.kept:,} {matrices} exactly as published ({forms})"
        if not self.converted:
            return line
        return f"{line}; converted {self.converted:,}, with an error of up to {self.error:.2%}"


def few_bits(forms: Mapping[str, str], errors: Mapping[str, float]) -> FewBits | None:
    """Return what became of matrices; None: there are none."""
    if not forms:
        return None
    wrong = [error for error in errors.values() if error]
    return FewBits(
        dict(sorted(Counter(forms.values()).items())),
        len(forms) - len(wrong),
        len(wrong),
        max(wrong, default=0.0),
    )
