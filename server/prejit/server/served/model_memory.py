"""The memory that the models of a server share: the one that was used least recently sleeps first."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, final

from prejit.runtime.generation.cache_plan import stacks_bytes
from prejit.server.engine.memory import NoRoomError, free_bytes, programs_bytes, wake_bytes

if TYPE_CHECKING:
    from prejit.runtime.bundle import Bundle
    from prejit.server.engine.engine import Engine
    from prejit.server.engine.sleeper import Room, Sleeper

_PATIENCE_SECONDS = 1.0
"""How long a request waits for models to be idle. Then the least recently used ones begin no more requests
until it has their memory. So two busy models take turns of at least this long."""


@final
class ModelMemory:
    """Divides memory between engines. Safe to use from many threads.

    With a limit, the engines that are awake take no more than that, and others sleep. Without one, all of
    them are awake, and a new one gets what the system has left.
    """

    def __init__(self, limit_bytes: int | None, at_start: int) -> None:
        """Begin without engines; `at_start`: how many are made before requests come."""
        self._limit_bytes = limit_bytes
        self._to_come = at_start
        self._lock = threading.Lock()
        self._engines: weakref.WeakKeyDictionary[Engine, str] = weakref.WeakKeyDictionary()
        self._kept: weakref.WeakKeyDictionary[Engine, int] = weakref.WeakKeyDictionary()

    @property
    def room(self) -> Room | None:
        """What wakes engines; None: they never sleep for each other."""
        return None if self._limit_bytes is None else self

    def for_caches(self, name: str, bundle: Bundle) -> int:
        """Return how much the caches of one more engine may take.

        Raises:
            NoRoomError: its programs alone need more.
        """
        device = None if bundle.config.decoder is None else bundle.decoder.device
        awake = self._awake()
        if self._limit_bytes is not None:
            taken = sum(one.sleeper.need_bytes for one in awake)
            left = min(self._unkept_bytes, free_bytes(device) + taken)
        else:
            left = free_bytes(device) - sum(one.growth_bytes for one in awake)
            # Programs are loaded when they are used, caches allocated by requests.
            if self._to_come:
                return left // self._to_come
        need = programs_bytes(bundle) + stacks_bytes(bundle.config.decoder)
        if need >= left:
            # With a limit, all of them count as asleep already.
            others = awake if self._limit_bytes is None else []
            adapters = " and adapters" if stacks_bytes(bundle.config.decoder) else ""
            raise self._no_room(name, f"{need:,} bytes for its programs{adapters}", left, others)
        return left - need

    def check_wake(self, name: str, bundle: Bundle, sleeper: Sleeper) -> None:
        """Check that an engine has room to wake, beside those that are awake and stay so.

        Raises:
            NoRoomError: it has not.
        """
        if not sleeper.is_sleeping:
            return
        others = self._awake()
        if self._limit_bytes is None:
            device = None if bundle.config.decoder is None else bundle.decoder.device
            left = wake_bytes(device) - sum(one.growth_bytes for one in others)
        else:
            others = [one for one in others if not one.sleeper.is_idle]
            left = self._unkept_bytes - sum(one.sleeper.need_bytes for one in others)
        if (need := sleeper.need_bytes) > left:
            raise self._no_room(name, f"{need:,} bytes for its caches and programs", left, others)

    @property
    def _unkept_bytes(self) -> int:
        """How much of the limit engines may take beside what they keep while they sleep."""
        assert self._limit_bytes is not None
        return self._limit_bytes - sum(list(self._kept.values()))

    def _awake(self) -> list[Engine]:
        return [one for one in list(self._engines) if not one.sleeper.is_sleeping]

    def _no_room(self, name: str, need: str, left: int, others: Sequence[Engine]) -> NoRoomError:
        """Return the error about a model; `others` could sleep for it."""
        could = ", ".join(
            f"{self._engines[one]} ({one.sleeper.need_bytes:,} bytes"
            f"{'' if one.sleeper.is_idle else ', once its requests have ended'})"
            for one in others
        )
        hint = "give more memory, or serve fewer models"
        return NoRoomError(
            f"{name}: expected {need}, found {max(0, left):,} left",
            hint=f"{hint}; these could sleep: {could}" if could else hint,
        )

    def add(self, name: str, engine: Engine, bundle: Bundle) -> None:
        """Count the engine of a model, for as long as it is there. It keeps its adapters while it sleeps."""
        with self._lock:
            self._engines[engine] = name
            self._kept[engine] = stacks_bytes(bundle.config.decoder)
            self._to_come = max(0, self._to_come - 1)

    def claim(self, sleeper: Sleeper, waited_seconds: float) -> bool:
        """Wake an engine if there is room, for which others may go to sleep; return whether it is awake."""
        is_patient = waited_seconds < _PATIENCE_SECONDS
        with self._lock:
            awake = [one for one in self._awake() if one.sleeper is not sleeper]
            needs = sum(one.sleeper.need_bytes for one in awake) + sleeper.need_bytes
            over = needs - self._unkept_bytes
            may_sleep = [one for one in awake if one.sleeper.is_idle or not is_patient]
            if over > sum(one.sleeper.need_bytes for one in may_sleep):
                return False
            has_room = True
            for one in sorted(may_sleep, key=lambda one: one.sleeper.last_used):
                if over > 0:
                    has_room = one.sleep(between=not is_patient) and has_room
                    over -= one.sleeper.need_bytes
            if has_room:
                sleeper.rise()
            return has_room
