"""NaN and infinity in what programs of served bundles return: the first program is named, all are counted."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from prejit.runtime.errors import NumbersError, printable
from prejit.runtime.programs.usage_hint import functions_of
from prejit.server.served.say import say

if TYPE_CHECKING:
    from prejit.runtime.bundle import Bundle


def check_numbers(name: str, bundle: Bundle, odd_runs: Counter[tuple[str, str]]) -> None:
    """Look at what the programs of a served bundle return from now on. It waits for each run.

    Functions are left out: they may return infinities, and so may the rows that pad them.

    Args:
        name: of the model.
        bundle: its bundle.
        odd_runs: counts runs with a NaN or an infinity, by model and program.
    """
    functions = {
        each.name for group in functions_of(bundle.config.programs).values() for each in group
    }
    is_first = True

    def report(program: str, error: NumbersError) -> None:
        nonlocal is_first
        if program in functions:
            return
        odd_runs[name, program] += 1
        if is_first:
            is_first = False
            say(printable(f"{name}: the first program that returns no numbers: {error}"))

    bundle.check_finite(report)
