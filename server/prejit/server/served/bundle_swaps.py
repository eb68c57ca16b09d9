"""Let a server go on with another bundle, which is loaded and tried beside the one that serves until then."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import final

from prejit.runtime.base.threads_and_forks import start_thread
from prejit.runtime.errors import AnswerError, PrejitError, printable
from prejit.server.served.heap import trim
from prejit.server.served.say import say
from prejit.server.served.served import Models, Served
from prejit.server.served.served_loading import BundleSource

_log = logging.getLogger(__name__)


@final
class BundleSwaps:
    """Swaps one bundle after another. Safe to use from many threads."""

    def __init__(
        self,
        models: Models,
        make: Callable[[BundleSource], Served],
        longest_request_seconds: float,
        when_swapped: Callable[[], object] | None = None,
    ) -> None:
        """Swap bundles of these models.

        Args:
            models: what is served.
            make: loads a bundle and makes its engine.
            longest_request_seconds: how long the requests to a bundle may go on after its swap.
            when_swapped: called after each swap, with the new bundle in its place.
        """
        self._models, self._make = models, make
        self._longest_request_seconds = longest_request_seconds
        self._when_swapped = when_swapped
        self._one_at_a_time = threading.Lock()

    def swap(self, name: str, path: str, followed: str = "") -> Served:
        """Let the next requests to a model go to the bundle that a path leads to now.

        It is loaded beside the one that serves, which goes on if anything fails here. Requests that run keep
        their bundle, which is freed in a thread after the last of them.

        Args:
            name: the model.
            path: a directory or a reference.
            followed: a path that led to it, which is looked at again; empty: `path` is.

        Returns:
            What serves the next request. That is what served before if the path leads to the same bundle.

        Raises:
            ModelNotFoundError: there is no such model.
            ClosedError: the server drains.
            AnswerError: a golden answer of the new bundle is wrong.
            PrejitError: it cannot be loaded, as `load` and `Engine` say.
        """
        with self._one_at_a_time:
            before = self._models.get(name)
            began = time.monotonic()
            try:
                after = replace(self._try(BundleSource(path, name)), path=followed or path)
                if after.bundle.digest == before.bundle.digest:
                    _close(after)
                    return before
                try:
                    self._models.replace(after)
                except PrejitError:
                    _close(after)
                    raise
            except BaseException:
                self._models.swaps[name, "failed"] += 1
                raise
            self._models.swaps[name, "done"] += 1
            if self._when_swapped is not None:
                self._when_swapped()
            shown = f"{name}: swapped {before.bundle.digest} for {after.bundle.digest} of {path}"
            say(printable(f"{shown} in {time.monotonic() - began:.2f} s"))
            start_thread(partial(self._free, before), "prejit-free")
            return after

    def _try(self, source: BundleSource) -> Served:
        """Return a bundle that is verified, whose programs are ready, and whose answers are right."""
        served = self._make(source)
        try:
            served.bundle.finish()
            served.bundle.prepare()
            if wrong := next(served.bundle.wrong_answers(), ""):
                raise AnswerError(f"{served.name}: a golden answer is wrong: {wrong}")
        except BaseException:
            _close(served)
            raise
        return served

    def _free(self, before: Served) -> None:
        """Free a bundle when no request uses it any more, and give its memory back to the system."""
        name, digest = before.name, before.bundle.digest
        if not self._models.free(before, self._longest_request_seconds):
            say(
                f"{name}: requests to {digest} were ended after {self._longest_request_seconds:g} s"
            )
        del before
        gc.unfreeze()  # the objects of the first bundles do not count as garbage before
        trim()
        gc.freeze()
        _log.info("%s: freed %s", name, digest)


def _close(served: Served) -> None:
    served.close()
    served.bundle.close()
