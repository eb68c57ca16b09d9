"""A request on its way through an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from prejit.runtime.generation.generate import Generation
from prejit.runtime.generation.options import TokenMask
from prejit.runtime.generation.rows import checked_mask
from prejit.server.engine.request_queue import Limits
from prejit.server.engine.stream import Receiver


@dataclass(slots=True, eq=False)
class Ticket:
    """A request, and what the engine must know of it.

    Attributes:
        generation: its text so far.
        receiver: who gets what comes of it.
        client, priority: whose it is, and how soon it is served.
        limits: those of the client.
        deadline: when it must be finished, by time.perf_counter; None: at any time.
        submitted, last: when it came, and when its last tokens came.
        guard: its token mask, if it has one.
        cancelled: whether nobody waits for it any more.
    """

    generation: Generation
    receiver: Receiver
    client: str
    priority: int
    limits: Limits
    deadline: float | None
    submitted: float
    last: float = 0.0
    guard: GuardedMask | None = None
    cancelled: bool = False


@final
class GuardedMask:
    """A token mask of a caller, whose errors end its own request and no other."""

    def __init__(self, mask: TokenMask, vocab_size: int) -> None:
        """Guard a mask."""
        self._mask = mask
        self._vocab_size = vocab_size
        self.error: Exception | None = None

    def __call__(self, token_ids: Sequence[int]) -> np.ndarray[Any, Any] | None:
        """Return what the mask returns, bool [V]; None: all tokens are allowed, or the mask has failed."""
        if self.error is not None:
            return None
        try:
            return checked_mask(self._mask(token_ids), self._vocab_size)
        except Exception as error:  # whatever the caller's function raises
            self.error = error
            return None
