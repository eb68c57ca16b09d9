"""The bundles that a server serves, by name, its state, counts of requests, and the grammars of clients."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal, final

from starlette.routing import Match

from prejit.runtime.base.wording import did_you_mean
from prejit.runtime.errors import ClosedError, UsageError
from prejit.server.engine.engine_metrics import REQUEST_BOUNDS, Histogram, HistogramValue
from prejit.server.grammar.grammar_sources import GrammarSource
from prejit.server.grammar.grammars import GrammarMask, Grammars
from prejit.server.served.work_threads import yield_cpu

if TYPE_CHECKING:
    from starlette.types import Scope

    from prejit.runtime.bundle import Bundle
    from prejit.server.engine.engine import Engine

_GRAMMAR_NICENESS = 10
"""As of the process that compiles first (grammar_trial.py): other threads run while llguidance compiles."""
MAX_GRAMMAR_CHARACTERS = 256 << 10
"""The largest grammar, with its schemas. Above it no compilation ends in time."""


@dataclass(eq=False, slots=True)
class _Turn:
    """A compilation that waits or runs.

    Attributes:
        client: for whom.
        work: compiles.
        result: gets the mask.
    """

    client: str
    work: Callable[[], GrammarMask]
    result: asyncio.Future[GrammarMask]


@final
class GrammarCompiling:
    """Compiles grammars of clients for one bundle. All calls come from the event loop.

    The turn is that of the client who has had the least time since nobody waited: the flood of one delays
    the others by one grammar.
    """

    def __init__(self) -> None:
        self._grammars: Grammars | None = None
        self._pool = ThreadPoolExecutor(1, "prejit-grammar", yield_cpu, (_GRAMMAR_NICENESS,))
        self._waiting: list[_Turn] = []
        self._running: _Turn | None = None
        self._seconds: dict[str, float] = {}
        self._is_closed = False

    async def mask(
        self,
        bundle: Bundle,
        source: GrammarSource,
        stop_token_ids: Collection[int] | None,
        client: str,
    ) -> GrammarMask:
        """Return a mask for a grammar. If the caller is cancelled, nothing is compiled for it any more.

        Raises:
            UsageError: as `Grammars.mask`, or it is too large.
            ClosedError: `close` was called before it was compiled.
        """
        if len(source.text) > MAX_GRAMMAR_CHARACTERS:
            raise UsageError(
                f"{source.expected}, of at most {MAX_GRAMMAR_CHARACTERS} characters, found "
                f"{len(source.text)}",
                hint="send a smaller one",
            )
        if self._grammars is None:
            self._grammars = Grammars(bundle, of_strangers=True)
        if (kept := self._grammars.kept_mask(source, stop_token_ids)) is not None:
            return kept
        work = partial(self._grammars.mask, source, stop_token_ids)
        turn = _Turn(client, work, asyncio.get_running_loop().create_future())
        self._waiting.append(turn)
        self._begin_next()
        try:
            return await turn.result
        except asyncio.CancelledError:
            if turn in self._waiting:
                self._waiting.remove(turn)
            elif turn is self._running:
                self._grammars.stop_trial()
            raise
        finally:
            # The error of a refused grammar has this frame: a cycle, which would keep the grammar and pipes.
            del turn

    def close(self) -> None:
        """End the process that compiles. It may be called from any thread."""
        self._is_closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._grammars is not None:
            self._grammars.stop_trial()

    def _begin_next(self) -> None:
        while self._running is None and self._waiting:
            turn = min(self._waiting, key=lambda each: self._seconds.get(each.client, 0.0))
            self._waiting.remove(turn)
            try:
                work = asyncio.get_running_loop().run_in_executor(self._pool, turn.work)
            except RuntimeError:  # it is closed, or no thread can start
                turn.result.set_exception(_closed())
                continue
            self._running = turn
            work.add_done_callback(partial(self._finish, turn, time.monotonic()))

    def _finish(self, turn: _Turn, started: float, work: asyncio.Future[GrammarMask]) -> None:
        self._running = None
        if not self._waiting:
            self._seconds.clear()
        else:
            before = self._seconds.get(turn.client, 0.0)
            self._seconds[turn.client] = before + time.monotonic() - started
        error = None if work.cancelled() else work.exception()
        if not turn.result.done():
            if work.cancelled() or (error is not None and self._is_closed):
                turn.result.set_exception(_closed())  # the client's grammar may be right
            elif error is not None:
                turn.result.set_exception(error)
            else:
                turn.result.set_result(work.result())
        self._begin_next()


def _closed() -> ClosedError:
    return ClosedError(
        "this model is closed", hint="send the request again, to another server or later"
    )


OTHER = "other"
"""The route of requests to paths that the server does not have: clients must not make names of series."""


@final
class HttpRequests:
    """Counts answers by route and status, and how long they took. Safe to use from many threads."""

    def __init__(self) -> None:
        """Begin with nothing counted."""
        self._lock = threading.Lock()
        self._answers: Counter[tuple[str, int]] = Counter()
        self._seconds: dict[str, Histogram] = {}

    def answered(self, scope: Scope, status: int, seconds: float) -> None:
        """Count a request that has its whole answer; status 0: its client went before it began."""
        route = _route(scope)
        with self._lock:
            self._answers[route, status] += 1
            self._seconds.setdefault(route, Histogram(REQUEST_BOUNDS)).observe(seconds)

    def snapshot(self) -> tuple[dict[tuple[str, int], int], dict[str, HistogramValue]]:
        """Return the number of answers by route and status, and their times by route."""
        with self._lock:
            seconds = {route: each.snapshot() for route, each in self._seconds.items()}
            return dict(self._answers), seconds


def _route(scope: Scope) -> str:
    """Return the path of a request as the routes have it, `/v2/models/{model}/infer`."""
    for route in scope["app"].routes:
        if route.matches(scope)[0] is not Match.NONE:
            return str(route.path)
    return OTHER


@final
class RunningRequests:
    """Counts the requests that run, by the epoch in which each began.

    A request belongs to the epoch in which it begins. What was replaced before the end of an epoch is used by
    the requests of that epoch and of earlier ones alone (the grace period of read-copy-update).
    """

    def __init__(self) -> None:
        """Begin with the first epoch."""
        self._changed = threading.Condition()
        self._epoch = 0
        self._running: Counter[int] = Counter()

    def begin(self) -> int:
        """Count a request; return its epoch."""
        with self._changed:
            self._running[self._epoch] += 1
            return self._epoch

    def end(self, epoch: int) -> None:
        """Count no longer a request of an epoch."""
        with self._changed:
            self._running[epoch] -= 1
            if not self._running[epoch]:
                del self._running[epoch]
                self._changed.notify_all()

    def wait_for_earlier(self, seconds: float) -> bool:
        """End the epoch, and wait for all requests that have begun; return whether they ended in time."""
        with self._changed:
            self._epoch += 1
            before = self._epoch
            return self._changed.wait_for(
                lambda: min(self._running, default=before) >= before, seconds
            )


State = Literal["loading", "compiling", "ready", "draining"]
"""What a server does: it loads, compiles what no target of a bundle holds, answers, or ends."""

Outcome = Literal["done", "failed"]
"""How a swap of a bundle ended."""


class ModelNotFoundError(UsageError):
    """A request names a model that the server does not serve."""

    code: ClassVar[str] = "model-not-found"


@dataclass(frozen=True, slots=True)
class Served:
    """One bundle of a server.

    Attributes:
        name: the name that clients give as their model.
        bundle: the bundle.
        engine: its engine, which all requests share.
        created: when the server loaded it, in seconds since 1970.
        compiling: compiles the grammars that its clients send.
        path: the directory or the reference that led to it. Another bundle may lie there now.
        adapter: the name of the adapter that a request chose; empty: none.
    """

    name: str
    bundle: Bundle
    engine: Engine
    created: int
    compiling: GrammarCompiling = field(default_factory=GrammarCompiling)
    path: str = ""
    adapter: str = ""

    @property
    def is_sleeping(self) -> bool:
        """True if it has given its memory back. The next request wakes it."""
        return self.engine.sleeper.is_sleeping

    def close(self) -> None:
        """Close the engine. What still runs fails with ClosedError."""
        self.compiling.close()
        self.engine.close()


asking: ContextVar[str] = ContextVar("asking", default="")
"""Who sends the request whose handler runs, while a canary runs: the name of its key, or else its id."""


@dataclass(frozen=True, slots=True)
class CanaryShare:
    """A release that answers a share of the requests to a model.

    Attributes:
        served: the release.
        share: the share, 0 to 1.
        counts: how many requests it answered, and how many failed with status 500.
    """

    served: Served
    share: float
    counts: Counter[Literal["answered", "failed"]] = field(default_factory=Counter)

    def takes(self, who: str) -> bool:
        """Return whether the requests of somebody go to the release: always, or never."""
        digest = hashlib.sha256(f"{self.served.bundle.digest} {who}".encode()).digest()
        return bool(who) and int.from_bytes(digest[:8]) < self.share * 2**64


@final
class Models:
    """The served bundles by name. It is empty until they are loaded: requests come before that.

    Attributes:
        http: counts the requests of all clients.
        suspected: set when a request fails and the client cannot mend it.
        wrong: by name of a model, what it returns in place of a golden answer.
        running: counts the requests that run now.
        swaps: how many swaps of a model, by its name, were `done` and `failed`.
        canaries: by name of a model, a release that answers a share of its requests.
        canary_ends: how many canaries of a model, by its name, were `promoted` and `rolled_back`.
        odd_runs: by model and program, how many runs returned no numbers, where somebody looks.
        changes: how often bundles were added, replaced or removed, also those that answer a share.
        log_lines_lost: how many lines of the log of requests could not be written.
    """

    def __init__(self, *served: Served) -> None:
        """Serve these bundles now; without any, the state is `loading`."""
        self._stage: State = "loading"
        self._is_draining = self._is_ending = False
        self.http = HttpRequests()
        self.suspected = threading.Event()
        self.wrong: dict[str, str] = {}
        self.running = RunningRequests()
        self.swaps: Counter[tuple[str, Outcome]] = Counter()
        self.canaries: dict[str, CanaryShare] = {}
        self.canary_ends: Counter[tuple[str, Literal["promoted", "rolled_back"]]] = Counter()
        self.odd_runs: Counter[tuple[str, str]] = Counter()
        self.changes = self.log_lines_lost = 0
        self._lock = threading.Lock()
        self._by_name: dict[str, Served] = {}
        self._replaced: list[Served] = []
        if served:
            self.add(*served)
            self._stage = "ready"

    @property
    def state(self) -> State:
        """The state of the server. Only `ready` takes requests to models."""
        return "draining" if self._is_draining else self._stage

    def add(self, *served: Served) -> None:
        """Add bundles.

        Raises:
            UsageError: two have the same name.
        """
        for one in served:
            if one.name in self._by_name:
                raise UsageError(
                    f"serve: expected each name once, found two bundles named {one.name!r}",
                    hint="give one of them another name: NAME=PATH",
                )
            self._by_name[one.name] = one
            self.changes += 1

    def check_ready(self, name: str) -> None:
        """Check that the server takes requests, before something of a model changes.

        Raises:
            ClosedError: it loads or drains.
        """
        if (state := self.state) != "ready":
            hint = "take requests again first: POST /undrain"
            raise ClosedError(
                f"{name}: the server is {state}",
                hint=hint if state == "draining" else "wait until /health/ready is 200",
            )

    def put(self, name: str, after: Served | None) -> Served | None:
        """Let the next requests for a name go to a bundle, or to none; return the one before.

        Requests that have begun keep the one before. `drain` and `close` reach it until it is freed.

        Raises:
            ClosedError: the server does not take requests.
        """
        with self._lock:
            self.check_ready(name)
            before = self._by_name.pop(name, None) if after is None else self._by_name.get(name)
            if after is not None:
                self._by_name[name] = after
            if before is not None:
                self.retire(before)
            self.changes += 1
        self.wrong.pop(name, None)
        return before

    def retire(self, served: Served) -> None:
        """Keep a bundle for `drain` and `close` that the next requests do not use; `free` closes it."""
        self._replaced.append(served)

    def share(self, name: str, canary: CanaryShare | None) -> None:
        """Let a release answer its share of the requests to a model from now on; None: none does."""
        with self._lock:
            self.canaries.pop(name, None)
            if canary is not None:
                self.canaries[name] = canary
            self.changes += 1

    def led_to(self, before: Served, path: str) -> Served:
        """Note that another path leads to a bundle that is served; return it."""
        with self._lock:
            after = replace(before, path=path)
            if self._by_name.get(before.name) is before:
                self._by_name[before.name] = after
            return after

    def free(self, before: Served, seconds: float) -> bool:
        """Close a replaced bundle when the requests that may use it have ended, or after so many seconds.

        Returns:
            Whether they had all ended.
        """
        has_ended = self.running.wait_for_earlier(seconds)
        before.close()
        before.bundle.close()
        self._replaced.remove(before)
        return has_ended

    def get(self, name: str) -> Served:
        """Return the bundle of that name.

        Raises:
            ModelNotFoundError: there is none.
        """
        if (found := self._by_name.get(name)) is None:
            known = ", ".join(map(repr, self._by_name)) or "none yet"
            raise ModelNotFoundError(
                f"model: expected one of the served models ({known}), found {name!r:.200}"
                + did_you_mean(name, self._by_name)
            )
        canary = self.canaries.get(name)
        return canary.served if canary is not None and canary.takes(asking.get()) else found

    @property
    def is_ready(self) -> bool:
        """True if the server takes requests to models, and no golden answer was wrong at the last check."""
        return self.state == "ready" and not self.wrong and len(self) > 0

    def __iter__(self) -> Iterator[Served]:
        return iter(tuple(self._by_name.values()))

    def __len__(self) -> int:
        return len(self._by_name)

    def change(self, before: State, after: State) -> bool:
        """Go on to a state, unless another thread has done so since `before`; return whether it is the state.

        It is not while the server drains. After that it is.
        """
        with self._lock:
            if self._stage == before:
                self._stage = after
            return self.state == after

    def drain(self, *, ends: bool = False) -> bool:
        """Refuse new requests; return whether none is left. If the server ends, `undrain` has no effect."""
        with self._lock:
            self._is_draining = True
            self._is_ending = self._is_ending or ends
        return all([one.engine.drain(0.0) for one in self._all()])

    def undrain(self) -> bool:
        """Take requests again, unless the server ends; return whether it does not."""
        if self._is_ending:
            return False
        for one in self._all():
            with contextlib.suppress(ClosedError):  # it was replaced, and is freed just now
                one.engine.undrain()
        self._is_draining = False
        return True

    def close(self) -> None:
        """Close every engine. What still runs fails with ClosedError."""
        for one in self._all():
            one.close()

    def _all(self) -> list[Served]:
        """Return every bundle that a request may use, those included that are being freed."""
        return [*self, *self._replaced, *(each.served for each in [*self.canaries.values()])]
