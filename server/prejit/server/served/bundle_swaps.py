"""Swap, add and remove bundles of a running server. A new one is loaded and tried beside those that serve.

`BundleFollowing` swaps them when their tag or directory leads to another one.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, final

from prejit.runtime.base.process_facts import policy_paths
from prejit.runtime.base.threads_and_forks import start_thread
from prejit.runtime.errors import AnswerError, ClosedError, PrejitError, UsageError, printable
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.root import read_root
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.ship.machine_store import machine_store
from prejit.runtime.ship.pulling import Pulled, Wanted, pull
from prejit.runtime.ship.reference import Reference, is_reference, parse_reference, without_login
from prejit.server.engine.memory import NoRoomError
from prejit.server.served import served_adapters
from prejit.server.served.process_upkeep import free_young, say
from prejit.server.served.served import CanaryShare, Models, Served
from prejit.server.served.served_adapters import carry
from prejit.server.served.served_loading import BundleSource, MakeServed
from prejit.server.served.work_threads import yield_cpu

if TYPE_CHECKING:
    from prejit.runtime.lora.adapter_slots import Adapter

_log = logging.getLogger(__name__)
_LONGEST_PAUSE_SECONDS = 3600.0
"""Pauses double up to this one while a registry fails."""
_NO_ROOM_SECONDS = 300.0
"""How long a bundle without room is not loaded again, unless what is served changes or somebody asks."""
_CLOSE_SECONDS = 2.0
"""How long a server that ends waits for a transfer to stop. What arrived is kept."""


@final
class BundleSwaps:
    """Swaps, adds, removes and wakes models. Safe to use from many threads.

    Bundles are fetched beside each other: a registry that stalls holds up nothing else. Then one change
    follows the other, because each counts on the memory that it has found. If two changes of one model
    overlap, the one that was asked for last stays.
    """

    def __init__(
        self,
        models: Models,
        make: MakeServed,
        longest_request_seconds: float,
        when_changed: Callable[[], object] | None = None,
    ) -> None:
        """Change these models.

        Args:
            models: what is served.
            make: fetches a bundle, loads it and makes its engine.
            longest_request_seconds: how long the requests to a bundle may go on after its swap or removal.
            when_changed: called after each change of what is served.
        """
        self._models, self._make = models, make
        self._longest_request_seconds = longest_request_seconds
        self._when_changed = when_changed
        self._one_at_a_time = threading.Lock()
        self._numbers = itertools.count(1)
        self._latest: dict[str, int] = {}
        """By name of a model, the number of its last change."""

    def swap(self, name: str, path: str, followed: str = "", only: Served | None = None) -> Served:
        """Let the next requests to a model go to the bundle that a path leads to now.

        It is loaded beside the one that serves, which goes on if anything fails here. Requests that run keep
        their bundle, which is freed in a thread after the last of them.

        Args:
            name: the model.
            path: a directory or a reference.
            followed: a path that led to it, which is looked at again; empty: `path` is.
            only: what must serve the model; if something else does by now, nothing is done.

        Returns:
            What serves the next request. That is what served before if the path leads to the same bundle.

        Raises:
            ModelNotFoundError: there is no such model.
            UsageError: the model was changed by what was asked for later, while this bundle was fetched.
            NoRoomError: it does not fit beside the models that are awake.
            ClosedError: the server loads or drains.
            AnswerError: a golden answer of the new bundle is wrong.
            PrejitError: it cannot be loaded, as `load` and `Engine` say.
        """
        began, number = time.monotonic(), next(self._numbers)
        self._models.check_ready(name)
        self._models.get(name)
        try:
            here = self._make.fetch(path)
            with self._one_at_a_time:
                before = self._models.get(name)
                if only is not None and before is not only:
                    return before
                if only is None and number < self._latest.get(name, 0):
                    raise UsageError(
                        f"{name}: expected no later change while {without_login(path)} was fetched, found "
                        f"{before.bundle.digest} of {without_login(before.path)}, which was asked for later",
                        hint="swap again if this bundle is to serve",
                    )
                after = self._try(BundleSource(here, name), followed or path, before)
                if only is None:
                    self._latest[name] = number
                if after.bundle.digest == before.bundle.digest:
                    _close(after)
                    return self._models.led_to(before, after.path)
                after.engine.begin_after(before.engine)
                self._put(after)
                self._swapped(before, after, began)
                return after
        except BaseException:
            self._models.swaps[name, "failed"] += 1
            raise

    def load(self, name: str, path: str) -> Served:
        """Return a bundle that was loaded and tried as in `swap`, and that no request goes to.

        Raises:
            ModelNotFoundError, NoRoomError, AnswerError, PrejitError: as `swap`.
        """
        here = self._make.fetch(path)
        with self._one_at_a_time:
            return self._try(BundleSource(here, name), path, self._models.get(name))

    def share(self, name: str, canary: CanaryShare) -> None:
        """Let a release of `load` answer its share of the requests to a model, with the model's adapters.

        Raises:
            ModelNotFoundError: the model was removed meanwhile.
            UsageError, CheckpointError, UntrustedError: the release does not take the adapters.
        """
        with self._one_at_a_time:
            carry(self._models.get(name), canary.served)
            self._models.share(name, canary)

    def take(self, after: Served, tried_beside: Served) -> None:
        """Let the next requests to a model go to a bundle of `load`, as `swap` does.

        Raises:
            ModelNotFoundError: the model was removed meanwhile.
            UsageError: another bundle than the one that it was tried beside serves the model by now.
            ClosedError: the server drains.
        """
        with self._one_at_a_time:
            began, before = time.monotonic(), self._models.get(after.name)
            if before.bundle is not tried_beside.bundle:
                raise UsageError(
                    f"{after.name}: expected {tried_beside.bundle.digest}, beside which the release was "
                    f"tried, found {before.bundle.digest} of {without_login(before.path)}",
                    hint="try it again, beside the bundle that serves now",
                )
            self._models.put(after.name, after)
            self._swapped(before, after, began)

    def drop(self, before: Served) -> None:
        """Free a retired bundle in a thread, after the last request that may use it."""
        start_thread(partial(self._free, [before]), "prejit-free")

    def _swapped(self, before: Served, after: Served, began: float) -> None:
        name, digests = after.name, (before.bundle.digest, after.bundle.digest)
        self._models.swaps[name, "done"] += 1
        self._changed(f"{name}: swapped {digests[0]} for {digests[1]} of {after.path}", began)
        self.drop(before)

    def add(self, name: str, path: str) -> Served:
        """Serve one more model, after the same checks as in `swap`; without a name, under the bundle's own.

        Raises:
            UsageError: there is a model of that name.
            NoRoomError, ClosedError, AnswerError, PrejitError: as `swap`.
        """
        began, number = time.monotonic(), next(self._numbers)
        self._check_new(name)
        self._models.check_ready(name or path)
        here = self._make.fetch(path)
        with self._one_at_a_time:
            self._check_new(name)
            after = self._try(BundleSource(here, name or None), path)
            try:
                self._check_new(after.name)
            except UsageError:
                _close(after)
                raise
            self._put(after)
            self._latest[after.name] = number
            self._changed(f"{after.name}: added {after.bundle.digest} of {path}", began)
            return after

    def remove(self, name: str) -> Served:
        """Serve a model no longer, and free it in a thread after the last request to it; return it.

        Raises:
            ModelNotFoundError: there is no such model.
            ClosedError: the server drains.
        """
        with self._one_at_a_time:
            before, began = self._models.get(name), time.monotonic()
            self._models.put(name, None)
            self._latest[name] = next(self._numbers)
            self._changed(f"{name}: removed {before.bundle.digest}", began)
            self.drop(before)
            return before

    def wake(self, name: str) -> Served:
        """Let a model take its memory again before a request comes; return it.

        Raises:
            ModelNotFoundError: there is no such model.
            NoRoomError: it does not fit beside the models that are awake.
            ClosedError: the server loads or drains.
        """
        self._models.check_ready(name)
        with self._one_at_a_time:
            served = self._models.get(name)
            self._wake(served)
            return served

    def load_adapter(self, model: str, name: str, path: str) -> Adapter:
        """Let requests to a model choose an adapter.

        Raises:
            ModelNotFoundError: there is no such model.
            UsageError, CheckpointError, UntrustedError: as `served_adapters.load_adapter`.
            ClosedError: the server loads or drains.
        """
        self._models.check_ready(model)
        with self._one_at_a_time:
            served_adapters.check_name(name, (each.name for each in self._models))
            found = served_adapters.load_adapter(self._sharing(model), name, path)
            self._changed(f"{model}: loaded adapter {name}, {found.digest} of {found.path}")
            return found

    def unload_adapter(self, model: str, name: str) -> None:
        """Let no new request choose an adapter of a model; those that run keep it to their end.

        Raises:
            ModelNotFoundError, UsageError: there is no such model or adapter.
        """
        with self._one_at_a_time:
            for served in self._sharing(model):
                served.bundle.adapters.unload(name)
            self._changed(f"{model}: unloaded adapter {name}")

    def _sharing(self, model: str) -> list[Served]:
        """Return what answers the requests to a model: itself, and a release that is tried."""
        canary = self._models.canaries.get(model)
        return [self._models.get(model), *([] if canary is None else [canary.served])]

    def _wake(self, served: Served) -> None:
        self._make.check_wake(served)
        served.engine.wake()

    def _check_new(self, name: str) -> None:
        if any(one.name == name for one in self._models):
            raise UsageError(
                f"model: expected a name that no model has, found {name!r}",
                hint="swap its bundle, or give another name",
            )

    def _put(self, after: Served) -> None:
        try:
            self._models.put(after.name, after)
        except PrejitError:
            _close(after)
            raise

    def _changed(self, done: str, began: float | None = None) -> None:
        if self._when_changed is not None:
            self._when_changed()
        took = "" if began is None else f" in {time.monotonic() - began:.2f} s"
        say(printable(f"{done}{took}"))

    def _try(self, source: BundleSource, path: str, before: Served | None = None) -> Served:
        """Return a bundle that is verified, and whose answers are right; `path` is looked at again.

        The programs that the one `before` has used are ready: others would cost memory that it did not take.
        Where programs are compiled, all are ready. It has the same adapters.
        """
        served = replace(self._make(source), path=path)
        used = set() if before is None else _used(before)
        try:
            if before is not None:
                carry(before, served)
            self._wake(served)
            served.bundle.finish()
            programs = (each.program for each in served.bundle.report())
            if wanted := [one for one in programs if one in used or not served.bundle.matched]:
                served.bundle.prepare(*wanted)
            if wrong := next(served.bundle.wrong_answers(), ""):
                raise AnswerError(f"{served.name}: a golden answer is wrong: {wrong}")
            if served.is_sleeping:  # another model took the room meanwhile
                served.bundle.sleep()
        except BaseException:
            _close(served)
            raise
        return served

    def _free(self, held: list[Served]) -> None:
        """Free a bundle when no request uses it any more, and give its memory back to the system.

        `held` is emptied: what the thread was given would keep the client of XLA until it ends.
        """
        before = held.pop()
        name, digest = before.name, before.bundle.digest
        if not self._models.free(before, self._longest_request_seconds):
            say(
                f"{name}: requests to {digest} were ended after {self._longest_request_seconds:g} s"
            )
        del before
        free_young()
        _log.info("%s: freed %s", name, digest)


def _used(served: Served) -> set[str]:
    """Return the programs of a bundle that requests have used."""
    return {each.program for each in served.bundle.report() if each.seconds}


def _close(served: Served) -> None:
    served.close()
    served.bundle.close()


class BundleFollowing:
    """A thread that looks at intervals what each path leads to, fetches it if a policy allows it, and swaps.

    Whatever fails, the server goes on with the bundle that it has.
    """

    def __init__(
        self, models: Models, swaps: BundleSwaps, every_seconds: float, *, must_match: bool
    ) -> None:
        """Start it. `must_match`: fetch nothing of a bundle that this machine would have to compile."""
        self._models, self._swaps, self._every = models, swaps, every_seconds
        self._must_match = must_match
        self._failures: dict[str, str] = {}
        self._no_room: dict[str, _NoRoom] = {}
        self._ends = threading.Event()
        self._looks = threading.Event()
        # Generations come first. A thread of its own, because those that it starts have its priority, and
        # kernels' threads must not.
        self._fetching = ThreadPoolExecutor(1, "prejit-fetch", yield_cpu, (19,))
        self._thread = start_thread(self._run, "prejit-follow")

    def look(self) -> None:
        """Look now, without waiting for the end of the interval."""
        self._looks.set()

    def close(self) -> bool:
        """End the thread and what it fetches; return whether it has ended. The network may keep it longer."""
        self._ends.set()
        self._looks.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)
        return self._thread is None or not self._thread.is_alive()

    def _run(self) -> None:
        pause = self._every
        while True:
            if self._looks.wait(pause):
                self._no_room.clear()
            self._looks.clear()
            if self._ends.is_set():
                return
            is_well = all([self._follow(served) for served in self._models])
            pause = self._every if is_well else max(pause, min(2 * pause, _LONGEST_PAUSE_SECONDS))

    def _follow(self, served: Served) -> bool:
        """Serve what a path leads to now; return whether that is so."""
        try:
            path, digest = self._found(served)
            if digest != served.bundle.digest:
                self._swap(served, path, digest)
        except Exception as error:  # whatever a registry sends, the server goes on
            text = f"{served.name}: cannot follow {served.path}: {error}"
            if self._failures.get(served.name) != text and not self._ends.is_set():
                say(printable(text))
            self._failures[served.name] = text
            return False
        self._failures.pop(served.name, None)
        return True

    def _swap(self, served: Served, path: str, digest: str) -> None:
        """Swap, unless this bundle had no room a moment ago. That it has none is no failure of its place."""
        name, changes, now = served.name, self._models.changes, time.monotonic()
        before = self._no_room.get(name)
        if before is not None and before[:2] == (digest, changes) and now < before.until:
            return
        try:
            self._swaps.swap(name, path, followed=served.path, only=served)
        except NoRoomError as error:
            self._no_room[name] = _NoRoom(digest, changes, now + _NO_ROOM_SECONDS)
            if before is None or before.digest != digest:
                text = f"{name}: no room for {digest} of {served.path}: {error}; {error.hint}"
                say(printable(text))

    def _found(self, served: Served) -> tuple[str, str]:
        """Return where the bundle is that a path leads to now, and its digest. One elsewhere is fetched."""
        path = served.path
        if not is_reference(path):
            with Layout(path) as layout:
                return path, read_root(layout).digest
        reference = parse_reference(path)
        if reference.digest or not reference.is_remote:  # it leads to one bundle for ever
            return path, served.bundle.digest
        found = self._fetching.submit(self._pull, reference).result()
        return str(reference.at(found.digest)), found.digest

    def _pull(self, reference: Reference) -> Pulled:
        wanted = Wanted(Fingerprint.current(), must_match=self._must_match)
        found = pull(reference, machine_store(), wanted, policy_paths(), self._go_on)
        if found.moved is not None:
            _log.info(
                "fetched %d bytes of %s to %s", found.moved.moved_bytes, found.digest, found.path
            )
        return found

    def _go_on(self, _: object) -> None:
        """Stop a transfer of a server that ends."""
        if self._ends.is_set():
            raise ClosedError("the server ends")


class _NoRoom(NamedTuple):
    """A bundle that did not fit.

    Attributes:
        digest: of the bundle.
        changes: `Models.changes` then.
        until: it is not loaded again before this time, by time.monotonic.
    """

    digest: str
    changes: int
    until: float
