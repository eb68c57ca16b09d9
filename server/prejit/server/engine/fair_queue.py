"""The requests that wait: whose turn it is, and how much of their prompts a step computes."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypedDict, TypeVar, final

from prejit.runtime.base import arguments

_Item = TypeVar("_Item")

_REMEMBERED = 1000
"""How many clients without requests are remembered, for the tokens that they had."""

LONGER_QUEUE = "a longer queue lets more wait: `queue` of an engine, --queue of a server"
"""What those may do who run an engine whose queue is full; its clients can only try again."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one client in an engine.

    Attributes:
        waiting: how many of its requests may wait; None: as many as the queue takes.
        running: how many of them may run at a time; None: as many as there are slots. The others wait.
        on_tokens: called, in the engine's thread, with the number of tokens of each prompt that gets a slot
            and of new tokens.

    Raises:
        UsageError: a number is less than 1.
    """

    waiting: int | None = None
    running: int | None = None
    on_tokens: Callable[[int], object] | None = None

    def __post_init__(self) -> None:
        for name in ("waiting", "running"):
            if (number := getattr(self, name)) is not None:
                arguments.integer(name, number, 1)


NO_LIMITS = Limits()


class Place(TypedDict, total=False):
    """How a request is served beside others.

    Attributes:
        priority: smaller is served first; 0 if it is not given.
        client: requests of different clients get fair shares of tokens.
        timeout: seconds until the request must be finished; None: any.
        cache_salt: only prompts of the same salt share what they have computed.
        limits: how much the client may have of the engine. The last request of a client sets them.
    """

    priority: int
    client: str
    timeout: float | None
    cache_salt: str
    limits: Limits


@dataclass(slots=True)
class _Client(Generic[_Item]):
    """A client's waiting requests, first come first, and what it has been served.

    Attributes:
        waiting: its requests by priority.
        running: how many of its requests were taken and have not ended.
        tokens: how many tokens it has been served, counted as `FairQueue` says.
        most_running: how many of its requests may run.
    """

    waiting: dict[int, deque[_Item]]
    running: int
    tokens: float
    most_running: int | None = None

    def first(self, fits: Callable[[_Item], bool]) -> tuple[int, _Item] | None:
        """Return its next request that fits, with the priority; None: it has none."""
        for priority in sorted(self.waiting):
            for item in self.waiting[priority]:
                if fits(item):
                    return priority, item
        return None

    @property
    def count(self) -> int:
        """How many of its requests wait."""
        return sum(map(len, self.waiting.values()))

    @property
    def can_run(self) -> int:
        """How many of its waiting requests may run now, if there are slots."""
        if self.most_running is None:
            return self.count
        return min(self.count, max(0, self.most_running - self.running))


@final
class FairQueue(Generic[_Item]):
    """Requests by priority, and by the tokens that their clients have been served. For one thread.

    The next request is one of the smallest priority that is waiting, and of those the first one of the client
    that has been served the fewest tokens; if two are even, of the one with fewer running requests. A client
    that comes back begins where the least served one is, so that nobody saves up by waiting (the virtual
    token counter of Sheng et al., OSDI 2024, arXiv 2401.00588).

    A queue with room for so many requests stays fair if the newest request of the client with the most leaves
    it for one of a client with fewer (`drop`; McKenney, Stochastic Fairness Queueing, INFOCOM 1990): of N
    clients, one with at most an Nth of the room loses none.

    Attributes:
        running: how many requests were taken and have not ended.
    """

    def __init__(self) -> None:
        """Begin empty."""
        self._clients: dict[str, _Client[_Item]] = {}
        self._count = 0
        self.running = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[_Item]:
        for client in self._clients.values():
            for items in client.waiting.values():
                yield from items

    def count(self, client: str) -> int:
        """Return how many requests of a client wait."""
        return self._clients[client].count if client in self._clients else 0

    @property
    def can_run(self) -> dict[str, int]:
        """How many waiting requests of each client may run now, if there are slots."""
        return {name: client.can_run for name, client in self._clients.items() if client.waiting}

    def put(
        self, item: _Item, client: str = "", priority: int = 0, most_running: int | None = None
    ) -> None:
        """Add a request behind those of the same client and priority.

        Args:
            item: the request.
            client: whose it is.
            priority: a smaller one is served first.
            most_running: how many requests of this client may run from now on; None: any number.
        """
        known = self._clients.get(client)
        active = (one.tokens for one in self._clients.values() if one.waiting or one.running)
        least = min(active, default=0.0)
        if known is None:
            known = self._clients[client] = _Client({}, 0, least)
        elif not known.waiting and not known.running:
            known.tokens = max(known.tokens, least)
        known.most_running = most_running
        known.waiting.setdefault(priority, deque()).append(item)
        self._count += 1
        self._forget()

    def drop(self, client: str) -> _Item | None:
        """Remove and return the request that makes room for one of this client; None: no other has more.

        It is the newest, least urgent one of the client with the most. If several have as many, of the one
        that has been served the most tokens.
        """
        waiting = (name for name, one in self._clients.items() if one.waiting)
        largest = max(
            waiting,
            key=lambda name: (self._clients[name].count, self._clients[name].tokens),
            default=client,
        )
        if self.count(largest) <= self.count(client):
            return None
        priority = max(self._clients[largest].waiting)
        item = self._clients[largest].waiting[priority][-1]
        self._remove(largest, priority, item)
        return item

    def next(self) -> tuple[str, _Item] | None:
        """Return the next request with its client, and leave it in the queue; None: nobody may run."""
        found = self._next(lambda item: True)
        return None if found is None else (found[0], found[2])

    def take(self, fits: Callable[[_Item], bool] = lambda item: True) -> tuple[str, _Item]:
        """Remove the next request that fits, and return it with its client. Call `end` when it has ended.

        Raises:
            IndexError: there is none that may run.
        """
        if (found := self._next(fits)) is None:
            raise IndexError("nobody may run")
        name, priority, item = found
        self._remove(name, priority, item)
        self._clients[name].running += 1
        self.running += 1
        return name, item

    def charge(self, client: str, tokens: float) -> None:
        """Count tokens that a client with a running request has been served."""
        self._clients[client].tokens += tokens

    def end(self, client: str) -> None:
        """Record that a request that was taken has ended."""
        self._clients[client].running -= 1
        self.running -= 1

    def remove(self, item: _Item) -> bool:
        """Remove a request that is waiting; return whether it was there."""
        for name, client in self._clients.items():
            for priority, items in client.waiting.items():
                if item in items:
                    self._remove(name, priority, item)
                    return True
        return False

    def _remove(self, name: str, priority: int, item: _Item) -> None:
        waiting = self._clients[name].waiting
        waiting[priority].remove(item)
        if not waiting[priority]:
            del waiting[priority]
        self._count -= 1

    def _next(self, fits: Callable[[_Item], bool]) -> tuple[str, int, _Item] | None:
        """Return the client, the priority and the request that is the next of those that fit."""
        best: tuple[int, float, int] | None = None
        found = None
        for name, client in self._clients.items():
            if client.waiting and client.can_run and (first := client.first(fits)) is not None:
                rank = first[0], client.tokens, client.running
                if best is None or rank < best:
                    best, found = rank, (name, *first)
        return found

    def _forget(self) -> None:
        """Forget the clients that were served least, of those without requests."""
        idle = [n for n, one in self._clients.items() if not one.waiting and not one.running]
        if len(idle) > _REMEMBERED:
            idle.sort(key=lambda name: self._clients[name].tokens)
            for name in idle[: len(idle) - _REMEMBERED]:
                del self._clients[name]


_PROMPT_WEIGHT = 4
"""A prompt that waits counts as much as so many texts that run: a person waits for the first token."""
_CALL_TIMES = 2
"""Prompts that are computed in one call have at most so many times the usual positions together. Larger calls
save little on a CPU, and the first of them would wait for all."""


def positions_between(
    prefill_tokens: int, waiting: Mapping[str, int], running: Mapping[str, int]
) -> int:
    """Return how many positions of prompts to compute before the next decode step.

    A decode step makes each waiting prompt wait, a prompt each text that runs. So a step computes more of
    the prompts the more of them wait beside few texts, and all of them if no text runs (a batch limits the
    time that it takes). No client's texts wait for more prompts of the others than they do for their own: one
    that sends very many would else stop the rest.

    Args:
        prefill_tokens: how many it is if few prompts wait.
        waiting: how many prompts of each client could be computed now: those that have slots, and those for
            free ones.
        running: how many texts of each client run.
    """
    if not running:
        return sys.maxsize
    times = min(waiting.get(client, 0) / texts for client, texts in running.items())
    return int(prefill_tokens * max(1.0, _PROMPT_WEIGHT * times))


def positions_of_call(prefill_tokens: int, between: int) -> int:
    """Return the most positions that prompts computed together may have."""
    return min(_CALL_TIMES * prefill_tokens, between)
