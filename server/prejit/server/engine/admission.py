"""How much of new prompts an engine computes before the texts that run get their next tokens."""

from __future__ import annotations

import sys
from collections.abc import Mapping

_MOST_TIMES = 4
"""However many prompts wait, a text that runs waits for at most so many times the usual positions."""
_CALL_TIMES = 2
"""Prompts that are computed in one call have at most so many times the usual positions together. Larger calls
save little on a CPU, and the first of them would wait for all."""


def positions_between(
    prefill_tokens: int, waiting: Mapping[str, int], running: Mapping[str, int]
) -> int:
    """Return how many positions of prompts to compute before the next decode step.

    A decode step makes each waiting prompt wait, a prompt each text that runs. So a step computes more of
    the prompts if more of them wait than texts run, and all of them if none runs. No client's texts wait for
    more prompts of the others than they do for their own: one that sends very many would else stop the rest.

    Args:
        prefill_tokens: how many it is if no more prompts wait than texts run.
        waiting: how many prompts of each client could be computed now: those that have slots, and those for
            free ones.
        running: how many texts of each client run.
    """
    if not running:
        return sys.maxsize
    times = min(waiting.get(client, 0) / texts for client, texts in running.items())
    return int(prefill_tokens * min(max(1.0, times), _MOST_TIMES))


def positions_of_call(prefill_tokens: int, between: int) -> int:
    """Return the most positions that prompts computed together may have.

    Args:
        prefill_tokens: as for `positions_between`.
        between: what that returned.
    """
    return min(_CALL_TIMES * prefill_tokens, between)
