"""Canaries: a release that a server tries beside the bundle that serves, and takes or drops by itself.

    compare what both say -> load and try it -> both answer seeded requests -> it answers a share -> decide

A share of the requests goes to the release, always the same clients. All other requests go where they went
before. A sample of all requests is played to both bundles once more, after its answers were sent: what
differs there decides, and no client sees it. Each bundle has an engine of one slot for that. In the engines
of clients a request would wait for others and be computed beside them, in each with another number of them,
and that would hide which bundle is slower.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast, final

from prejit.runtime.base.threads_and_forks import start_thread
from prejit.runtime.errors import PrejitError, UsageError, printable
from prejit.runtime.format.release_limits import ReleaseLimits, fraction_of
from prejit.runtime.ship.reference import without_login
from prejit.server.engine.engine import Engine
from prejit.server.engine.sleeper import Sleeper
from prejit.server.releases.measured_checks import (
    BundleAnswer,
    ComparedAnswers,
    Line,
    PairedTimes,
    is_settled,
    quick_enough,
    time_checks,
    times_of,
)
from prejit.server.releases.release_contents import ReleaseCheck, compare_contents, read_release
from prejit.server.releases.request_player import (
    AppOf,
    RequestPlayer,
    can_play,
    own_requests,
)
from prejit.server.served.bundle_swaps import BundleSwaps
from prejit.server.served.process_upkeep import say
from prejit.server.served.served import CanaryShare, Models, Served, asking
from prejit.server.telemetry.requestlog import Entry, Log, current, line_of, record
from prejit.server.telemetry.watched_engine import WatchedEngine

_log = logging.getLogger(__name__)

Stage = Literal["loading", "trying", "sharing", "promoted", "rolled back"]
"""The states of a canary, in order. The last two are its ends."""

LEAST_REQUESTS = 50
"""The fewest requests of clients that both bundles must have answered before a release is promoted."""
_MOST_REQUESTS = 20 * LEAST_REQUESTS
"""As many are enough, although times vary too much to rule out that the release is slower."""
_MOST_SAMPLED = 8
"""Requests that wait for being played again. While so many wait, others are not sampled."""
_LONGEST_SECONDS = 3600.0
"""The longest time in which requests are sampled. A release that saw too few by then is dropped."""
_GROUP = 10
"""Pairs of times of one group: see `measured_checks`."""
_TRIAL_ROUNDS = 3
_TRIAL_GROUPS = 3
_POLL_SECONDS = 0.2
_CLOSE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class CanaryState:
    """How far a canary is.

    Attributes:
        model: the name of the model.
        bundle: the path of the release, without a password.
        share: the share of requests that it answers, 0 to 1.
        stage: what it does.
        old, new: the digests of both; empty: not known yet.
        sampled: requests of clients that both answered.
        answered, failed: requests of clients that the release alone answered, and that failed there.
        checks: the checks so far.
        why: why it ended; empty: it goes on.
    """

    model: str
    bundle: str
    share: float
    stage: Stage = "loading"
    old: str = ""
    new: str = ""
    sampled: int = 0
    answered: int = 0
    failed: int = 0
    checks: tuple[ReleaseCheck, ...] = ()
    why: str = ""

    @property
    def is_over(self) -> bool:
        """Return whether it has ended."""
        return self.stage in ("promoted", "rolled back")


@final
class Canaries:
    """The canaries of a server, one for each model at a time. Safe to use from many threads."""

    def __init__(self, models: Models, swaps: BundleSwaps, app_of: AppOf, log: Log | None) -> None:
        """Begin without any.

        Args:
            models: what is served.
            swaps: loads releases and puts them in place.
            app_of: makes an application, in which requests are played again.
            log: what takes the records of requests anyway.
        """
        self._models, self._swaps, self._app_of, self._log = models, swaps, app_of, log
        self._lock = threading.Lock()
        self._runs: dict[str, _Run] = {}
        self._ends = threading.Event()

    def start_when_ready(self, path: str, share: float) -> None:
        """Begin to try a release beside the only model, once the server is ready."""
        while self._models.state != "ready":
            if self._ends.wait(_POLL_SECONDS):
                return
        self.start(next(iter(self._models)).name, path, share)

    def start(self, name: str, path: str, share: float) -> CanaryState:
        """Begin to try a release beside a model, in a thread.

        Raises:
            ClosedError: the server loads or drains.
            UsageError: a canary of that model runs.
        """
        self._models.check_ready(name)
        with self._lock:
            before = self._runs.get(name)
            if before is not None and not before.state.is_over:
                raise UsageError(
                    f"canary: expected no other canary of {name!r}, found one of {before.state.bundle}",
                    hint='end it first: POST /canary {"action": "abort"}',
                )
            state = CanaryState(name, without_login(path), share)
            run = _Run(state, path, self._models, self._swaps, self._app_of)
            self._runs[name] = run
        start_thread(run, "prejit-canary")
        return state

    def finish(self, name: str, action: Literal["promote", "abort"]) -> CanaryState:
        """Promote a release now, or drop it, whatever was found so far; return its state after that.

        Raises:
            UsageError: no canary of that model runs.
        """
        run = self._runs.get(name)
        if run is None or run.state.is_over:
            raise UsageError(f"canary: expected one of {name!r} that runs, found none")
        return run.end(action)

    def states(self) -> list[CanaryState]:
        """Return how far the last canary of each model is."""
        return [run.now() for run in self._runs.values()]

    def tap(self) -> Log | None:
        """Return what takes the records of requests while a canary runs; None: none runs."""
        return self if self._models.canaries else None

    def begin(self, entry: Entry) -> None:
        """Take what engines give this task from now on as results of this request."""
        current.set(entry)
        if self._log is not None:
            self._log.begin(entry)

    def end(self, entry: Entry) -> None:
        """Take the record of a finished request: count it, and perhaps sample it."""
        for name, canary in [*self._models.canaries.items()]:
            if any(call.model == name for call in entry.calls):
                if canary.takes(asking.get()):
                    canary.counts["answered"] += 1
                    canary.counts["failed"] += entry.status == 500
                self._runs[name].offer(entry)

    def close(self) -> bool:
        """End the threads; return whether they have ended. A load may keep one longer."""
        self._ends.set()
        until = time.monotonic() + _CLOSE_SECONDS
        return all([run.stop(until - time.monotonic()) for run in [*self._runs.values()]])


class _StoppedError(Exception):
    """The release is not taken; the text says why."""


@dataclass(frozen=True, slots=True)
class _Player:
    """Plays requests to a bundle while its programs are kept, which it gives back when it goes to sleep."""

    loop: asyncio.AbstractEventLoop
    player: RequestPlayer
    keeps_awake: Sleeper

    def play(self, line: Line) -> BundleAnswer:
        """Play a request, then pause as long: clients come first."""
        with self.keeps_awake:
            played = self.loop.run_until_complete(self.player.play(line))
        time.sleep(played.seconds)
        entry = played.entry
        return BundleAnswer(entry.status, tuple(entry.calls), played.said, played.seconds)


def _both(players: Sequence[_Player], line: Line, turn: int) -> list[BundleAnswer]:
    """Play a request to both, in turns."""
    order = (0, 1) if turn % 2 else (1, 0)
    found = {at: players[at].play(line) for at in order}
    return [found[0], found[1]]


@contextlib.contextmanager
def _one_slot(served: Served) -> Iterator[Served]:
    """Serve a bundle by one more engine, of one slot, which no client uses."""
    engine = Engine(served.bundle, slots=1, prefix_memory=0)
    try:
        yield replace(served, engine=cast("Engine", WatchedEngine(served.name, engine, record)))
    finally:
        engine.close()


@final
class _Run:
    """One canary: what its thread does."""

    def __init__(
        self, state: CanaryState, path: str, models: Models, swaps: BundleSwaps, app_of: AppOf
    ) -> None:
        self.state, self._path = state, path
        self._models, self._swaps, self._app_of = models, swaps, app_of
        self._sampled: queue.Queue[Line] = queue.Queue(_MOST_SAMPLED)
        self._wanted: Literal["", "promote", "abort", "stop"] = ""
        self._is_over = threading.Event()
        self._answers, self._times, self._noise = ComparedAnswers(), PairedTimes(), PairedTimes()
        self._limits = ReleaseLimits()
        self._static: tuple[ReleaseCheck, ...] = ()
        self._count = itertools.count()
        self._own = 0

    # ------------------------------------------------------------------ from other threads

    def end(self, action: Literal["promote", "abort"]) -> CanaryState:
        """Ask the thread to end so, and wait for it."""
        self._wanted = action
        self._is_over.wait(_LONGEST_SECONDS)
        return self.now()

    def stop(self, seconds: float) -> bool:
        """Ask the thread to end, because the server does; return whether it does so in time."""
        self._wanted = "stop"
        return self._is_over.wait(max(0.0, seconds))

    def offer(self, entry: Entry) -> None:
        """Take a request of a client as a sample, unless enough wait."""
        if not self._sampled.full():
            line = line_of(entry)
            if can_play(line):
                with contextlib.suppress(queue.Full):
                    self._sampled.put_nowait(line)

    def now(self) -> CanaryState:
        """Return how far it is."""
        canary = self._models.canaries.get(self.state.model)
        counts = {} if canary is None else canary.counts
        answered, failed = (
            counts.get(each, getattr(self.state, each)) for each in ("answered", "failed")
        )
        sampled = max(0, self._answers.requests - self._own)
        return replace(self.state, sampled=sampled, answered=answered, failed=failed)

    # ------------------------------------------------------------------ the thread

    def __call__(self) -> None:
        """Try the release, and take or drop it."""
        name = self.state.model
        new: Served | None = None
        loop = asyncio.new_event_loop()
        try:
            old = self._models.get(name)
            self._compare_contents(old)
            new = self._swaps.load(name, self._path)
            with _one_slot(old) as old_alone, _one_slot(new) as new_alone:
                players = [
                    _Player(loop, RequestPlayer(self._app_of, Models(alone)), served.engine.sleeper)
                    for alone, served in ((old_alone, old), (new_alone, new))
                ]
                self._try(old, players)
                self._share(new, players)
            self._swaps.take(new, old)
            self._end_share()
            self._end("promoted", self._why())
        except _StoppedError as stopped:
            self._drop(new)
            self._end("rolled back", str(stopped))
        except PrejitError as error:
            self._drop(new)
            self._end("rolled back", f"{error.code}: {error}")
        except Exception as error:  # of XLA, or no memory: the server goes on
            self._drop(new)
            self._end("rolled back", f"{type(error).__name__}: {error}")
        finally:
            loop.close()
            self._is_over.set()

    def _compare_contents(self, old: Served) -> None:
        self._go_on("loading")
        before, after = read_release(old.path, old.bundle.digest), read_release(self._path)
        self.state = replace(self.state, old=before.digest, new=after.digest)
        checks, self._limits = compare_contents(before, after)
        self._static = tuple(checks)
        self._stop_if_failed(checks)

    def _try(self, old: Served, players: Sequence[_Player]) -> None:
        """Play seeded requests to both, before a client sees the release."""
        self._go_on("trying")
        played: list[tuple[float, Line]] = []
        for number, own in enumerate(own_requests(old, 0)):
            answers = self._compare(players, own, f"own {number + 1}")
            played.append((answers[0].seconds, own))
        self._own = self._answers.requests
        self._stop_if_failed([*self._answers.checks(self._limits)])
        timed = quick_enough(played)
        for number in range(2 * _TRIAL_GROUPS - 1):
            pair = players if number % 2 == 0 else (players[0], players[0])
            times = self._times if number % 2 == 0 else self._noise
            times.begin_group()
            for turn, line in itertools.product(range(_TRIAL_ROUNDS), timed):
                self._check_wanted()
                answers = _both(pair, line, turn)
                if turn:
                    times.add(times_of(answers[0]), times_of(answers[1]))
        self._stop_if_failed(self._time_checks())

    def _share(self, new: Served, players: Sequence[_Player]) -> None:
        """Let the release answer its share, and play what clients sent to both, until there is a verdict."""
        self._go_on("sharing")
        canary = CanaryShare(new, self.state.share)
        self._swaps.share(self.state.model, canary)
        until = time.monotonic() + _LONGEST_SECONDS
        self._begin_groups()
        sampled, look = 0, LEAST_REQUESTS
        while True:
            if self._wanted == "promote":
                return
            self._check_wanted()
            if canary.counts["failed"]:
                why = f"{canary.counts['failed']} of {canary.counts['answered']} requests failed"
                raise _StoppedError(f"answers: {why} with status 500")
            if time.monotonic() > until:
                if sampled >= LEAST_REQUESTS:
                    self._stop_if_failed(self._time_checks())
                    return
                raise _StoppedError(
                    f"expected {LEAST_REQUESTS} requests within {_LONGEST_SECONDS:g} s, found {sampled}"
                )
            try:
                line = self._sampled.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                continue
            before, after = self._compare(players, line, str(line["id"]))
            again = players[0].play(line)
            pair = (before, again) if sampled % 2 else (again, before)
            self._times.add(times_of(before), times_of(after))
            self._noise.add(times_of(pair[0]), times_of(pair[1]))
            self._stop_if_failed([*self._answers.checks(self._limits)])
            sampled = self._answers.requests - self._own
            if sampled and sampled % _GROUP == 0:
                self._begin_groups()
            if sampled >= min(look, _MOST_REQUESTS):
                look *= 2  # each look is one more chance to be wrong
                self._stop_if_failed(self._time_checks())
                if sampled >= _MOST_REQUESTS or self._is_settled():
                    return

    # ------------------------------------------------------------------ parts of it

    def _compare(self, players: Sequence[_Player], line: Line, name: str) -> list[BundleAnswer]:
        answers = _both(players, line, next(self._count))
        if answers[0].status == 200:
            self._answers.add(name, str(line["path"]), answers[0], answers[1])
        return answers

    def _begin_groups(self) -> None:
        self._times.begin_group()
        self._noise.begin_group()

    def _time_checks(self) -> list[ReleaseCheck]:
        return [*time_checks(self._times, self._noise, self._limits)]

    def _is_settled(self) -> bool:
        share = self._limits.share("max_slower")
        return all(is_settled(self._times.ratio(name), share) for name in self._times.names())

    def _stop_if_failed(self, checks: Sequence[ReleaseCheck]) -> None:
        """Keep the checks, and end if one failed. Raise _StoppedError then."""
        names = {each.name for each in checks}
        kept = [each for each in (*self._static, *self.state.checks) if each.name not in names]
        found = {each.name: each for each in (*kept, *checks)}
        self.state = replace(self.state, checks=tuple(found.values()))
        failed = [each for each in checks if each.outcome == "failed"]
        if failed:
            raise _StoppedError("; ".join(f"{each.name}: {each.why}" for each in failed))

    def _check_wanted(self) -> None:
        if self._wanted in ("abort", "stop"):
            raise _StoppedError(
                "ended by POST /canary" if self._wanted == "abort" else "the server ends"
            )

    def _go_on(self, stage: Stage) -> None:
        self._check_wanted()
        self.state = replace(self.state, stage=stage)
        _log.info("%s: canary %s: %s", self.state.model, self.state.bundle, stage)

    def _end_share(self) -> None:
        """Let no further request go to the release for its share."""
        self.state = self.now()
        self._models.share(self.state.model, None)

    def _drop(self, new: Served | None) -> None:
        """Let no further request go to the release, and free it after the last one."""
        self._end_share()
        if new is not None:
            self._models.retire(new)
            self._swaps.drop(new)

    def _why(self) -> str:
        if self._wanted == "promote":
            return "promoted by POST /canary"
        unsure = (
            "" if self._is_settled() else "; times vary too much to be sure that it is not slower"
        )
        return f"{self.now().sampled} requests of clients gave the same, and no limit is passed{unsure}"

    def _end(self, stage: Stage, why: str) -> None:
        self.state = replace(self.state, stage=stage, why=why)
        if self._wanted == "stop":
            return
        outcome: Literal["promoted", "rolled_back"] = (
            "promoted" if stage == "promoted" else "rolled_back"
        )
        self._models.canary_ends[self.state.model, outcome] += 1
        say(printable(f"{self.state.model}: canary {self.state.bundle} {stage}: {why}"))


def share_of(text: str) -> float:
    """Return the share of requests that a canary gets: 0.05 for `5%`.

    Raises:
        UsageError: it is no share of 0 to 100 %.
    """
    try:
        found = fraction_of(text)
    except ValueError as error:
        raise UsageError(f"share: {error}") from error
    if found > 1:
        raise UsageError(f'share: expected "0%" to "100%", found {text!r:.40}')
    return found
