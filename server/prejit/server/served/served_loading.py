"""Load bundles for a server: for swaps, and at its start, beside the imports of the HTTP stack.

`ModelMemory` divides the memory between their engines.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import re
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, final

from prejit.runtime.base.process_facts import importing, policy_paths, seconds_since_exec
from prejit.runtime.cli.command_options import reporting
from prejit.runtime.cli.output import progress
from prejit.runtime.errors import NumbersError, PrejitError, printable
from prejit.runtime.generation.cache_plan import stacks_bytes
from prejit.runtime.loader import load
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.programs.usage_hint import functions_of
from prejit.runtime.ship.reference import is_reference, parse_reference
from prejit.server.engine.memory import NoRoomError, free_bytes, programs_bytes, wake_bytes
from prejit.server.served.process_upkeep import say
from prejit.server.served.served import Models, Served, State
from prejit.server.served.served_adapters import check_name

if TYPE_CHECKING:
    from prejit.runtime.bundle import Bundle
    from prejit.server.engine.engine import Engine
    from prejit.server.engine.sleeper import Room, Sleeper

_log = logging.getLogger(__name__)
MODEL_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
"""A name that an operator gives a model."""
_GC_THRESHOLDS = (100_000, 50, 100)
"""With Python's own thresholds, decoding 3 MB of small lists takes six times as long, because all new objects
are looked at some hundred times. No other thread runs meanwhile."""
Wrap = Callable[[str, "Engine"], "Engine"]
"""Takes the name of a bundle and its engine; returns the engine that requests use."""
_PATIENCE_SECONDS = 1.0
"""How long a request waits for models to be idle. Then the least recently used ones begin no more requests
until it has their memory. So two busy models take turns of at least this long."""


@dataclass(frozen=True, slots=True)
class BundleSource:
    """A bundle to serve.

    Attributes:
        path: its directory, or a reference to it.
        name: the name that it is served under; None: its own.
        adapters: the name and the directory of each of its adapters.
    """

    path: str
    name: str | None = None
    adapters: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of the engines; None leaves the engine's own default.

    Attributes:
        slots: how many generations run at once.
        queue: how many more may wait.
        prefix_memory: how many bytes earlier prompts may take.
        must_match: whether a machine that matches no target is an error instead of a compile.
        share_prefixes: whether prompts begin with what those of other keys have computed.
        memory: how many bytes the caches and programs of all engines may take together; None: what is free.
        check_finite: whether to look for NaN and infinity in what programs return.
    """

    slots: int | None = None
    queue: int | None = None
    prefix_memory: int | None = None
    must_match: bool = False
    share_prefixes: bool = False
    memory: int | None = None
    check_finite: bool = False


@final
class MakeServed:
    """Loads a bundle and makes its engine, as the options of the server say."""

    def __init__(
        self, engines: EngineOptions, count: int, wrap: Wrap, odd_runs: Counter[tuple[str, str]]
    ) -> None:
        """Take the options of all engines, and what they share.

        Args:
            engines: the options.
            count: the number of bundles at the start.
            wrap: wraps engines.
            odd_runs: counts runs that returned no numbers, by model and program.
        """
        self._engines, self._wrap, self._odd_runs = engines, wrap, odd_runs
        self._memory = ModelMemory(engines.memory, count)

    def fetch(self, path: str) -> str:
        """Fetch what this machine lacks of a bundle, weights too; return a path to it that needs no network.

        Raises:
            MismatchError, RejectError, StoreError, UntrustedError: as `load`.
        """
        if not is_reference(path) or not (reference := parse_reference(path)).is_remote:
            return path
        from prejit.runtime.ship.machine_store import machine_store  # few servers need it
        from prejit.runtime.ship.pulling import Wanted, pull

        wanted = Wanted(Fingerprint.current(), must_match=self._engines.must_match)
        with progress() as show:
            found = pull(reference, machine_store(), wanted, policy_paths(), reporting(show))
        return str(reference.at(found.digest))

    def check_wake(self, served: Served) -> None:
        """Check that a model has room to wake beside the others.

        Raises:
            NoRoomError: it has not; the error says which others could sleep.
        """
        self._memory.check_wake(served.name, served.bundle, served.engine.sleeper)

    def __call__(self, source: BundleSource) -> Served:
        """Load a bundle, whose weights may be on the way then, and make its engine.

        Raises:
            MismatchError, RejectError, StoreError, UntrustedError: as `load`.
            NoRoomError: its caches or programs do not fit into the memory that is left.
        """
        on_mismatch: Literal["jit", "error"] = "error" if self._engines.must_match else "jit"
        with progress() as show:
            bundle = load(source.path, on_mismatch=on_mismatch, on_transfer=reporting(show))
        name = source.name or bundle.name
        try:
            for adapter, directory in source.adapters:
                check_name(adapter, (name,))
                bundle.adapters.load(adapter, directory)
        except BaseException:
            bundle.close()
            raise
        options: dict[str, Any] = {
            "slots": self._engines.slots,
            "queue": self._engines.queue,
            "prefix_memory": self._engines.prefix_memory,
            "share_prefixes": self._engines.share_prefixes,
        }
        with importing():
            from prejit.server.engine.engine import Engine  # the HTTP stack is imported beside it

        try:
            memory = self._memory.for_caches(name, bundle)
            options |= {"memory": memory, "room": self._memory.room}
            engine = Engine(bundle, **{k: v for k, v in options.items() if v is not None})
            if engine.sleeper.is_sleeping:
                bundle.sleep()  # an encoder loads its programs at once
        except BaseException:
            bundle.close()
            raise
        self._memory.add(name, engine, bundle)
        if self._engines.check_finite:
            check_numbers(name, bundle, self._odd_runs)
        how = "its executables" if bundle.matched else "programs that are compiled here"
        _log.info("%s: %s, target %s, runs %s", name, bundle.digest, bundle.target, how)
        engine = self._wrap(name, engine)
        return Served(name, bundle, engine, int(time.time()), path=source.path)


def finish(served: Served) -> None:
    """Wait for the weights of a bundle, which may be on the way, or not come."""
    if is_reference(served.path):
        served.bundle.finish()


def _read_chat_templates(models: Models) -> None:
    """Read the chat templates, so that the first chat does not import Jinja.

    That takes 40 ms, and modules between the objects of requests hold the memory of these for ever.
    """
    for served in models:
        if served.bundle.has_chat_template:
            with contextlib.suppress(PrejitError):  # the requests that need it say so
                _ = served.bundle.text.chat


@final
class Loading(threading.Thread):
    """Loads the bundles and makes the server ready.

    Attributes:
        error: why it failed, or None.
    """

    def __init__(
        self,
        sources: Sequence[BundleSource],
        make: MakeServed,
        models: Models,
        url: str,
        when_loaded: Callable[[], object] | None = None,
    ) -> None:
        super().__init__(name="prejit-load", daemon=True)
        self._sources = sources
        self._make = make
        self._models = models
        self._url = url
        self._lock = threading.Lock()
        self._on_failure: Callable[[], object] | None = None
        self._when_loaded = when_loaded
        self.error: BaseException | None = None
        self._is_answering = threading.Event()

    def answers(self) -> None:
        """Note that the server accepts connections; it is not ready before that."""
        self._is_answering.set()

    def when_failed(self, call: Callable[[], object]) -> None:
        """Call this, in any thread, when a bundle cannot be loaded; at once if that has happened."""
        with self._lock:
            self._on_failure = call
            failed = self.error is not None
        if failed:
            call()

    def run(self) -> None:
        """Load, compile what no target holds, and say that the server is ready."""
        try:
            for source in self._sources:
                self._models.add(self._make(source))
            for served in self._models:
                finish(served)
            before: State = "loading"
            if any(not served.bundle.matched for served in self._models):
                self._models.change(before, "compiling")
                before = "compiling"
                for served in self._models:
                    served.bundle.prepare()
                    if served.engine.sleeper.is_sleeping:
                        served.bundle.sleep()
            if self._when_loaded is not None:
                self._when_loaded()
            self._is_answering.wait()
            gc.freeze()
            gc.set_threshold(*_GC_THRESHOLDS)
            gc.enable()
            if self._models.change(before, "ready"):
                _log.info("ready, after %s", before)
                names = ", ".join(served.name for served in self._models)
                text = f"{self._url}  {names}  ready in {seconds_since_exec():.2f} s"
                say(printable(text))
            _read_chat_templates(self._models)
        except BaseException as error:
            with self._lock:
                self.error = error
                call = self._on_failure
            if call is not None:
                call()


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
        """Makes room for an engine that wakes; None: there is no limit, so no engine sleeps for another."""
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
