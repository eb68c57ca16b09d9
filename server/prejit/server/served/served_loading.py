"""Load the bundles of a server in a thread, beside the imports of the HTTP stack."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, final

from prejit.runtime.base.process_facts import importing, seconds_since_exec
from prejit.runtime.cli.bundle_references import reporting
from prejit.runtime.cli.output import progress
from prejit.runtime.errors import printable
from prejit.runtime.loader import load
from prejit.runtime.ship.reference import is_reference
from prejit.server.engine.memory import free_bytes
from prejit.server.served.say import say
from prejit.server.served.served import Models, Served, State

if TYPE_CHECKING:
    from prejit.runtime.bundle import Bundle
    from prejit.runtime.ship.reference import Reference
    from prejit.server.engine.engine import Engine

_log = logging.getLogger(__name__)
_GC_THRESHOLDS = (100_000, 50, 100)
"""With Python's own thresholds, decoding 3 MB of small lists takes six times as long, because all new objects
are looked at some hundred times. No other thread runs meanwhile."""
Wrap = Callable[[str, "Engine"], "Engine"]
"""Takes the name of a bundle and its engine; returns the engine that requests use."""


@dataclass(frozen=True, slots=True)
class BundleSource:
    """A bundle to serve.

    Attributes:
        path: its directory, or a reference to it.
        name: the name that it is served under; None: its own.
        follows: the reference whose tag led to it, if newer bundles are fetched; None: they are not.
    """

    path: str
    name: str | None = None
    follows: Reference | None = None


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of the engines; None leaves the engine's own default.

    Attributes:
        slots: how many generations run at once.
        queue: how many more may wait.
        prefix_memory: how many bytes earlier prompts may take.
        must_match: whether a machine that matches no target is an error instead of a compile.
        share_prefixes: whether prompts begin with what those of other keys have computed.
    """

    slots: int | None = None
    queue: int | None = None
    prefix_memory: int | None = None
    must_match: bool = False
    share_prefixes: bool = False


@final
class Loading(threading.Thread):
    """Loads the bundles and makes the server ready.

    Attributes:
        when_loaded: takes the path of each bundle by its name, before the server is ready.
        error: why it failed, or None.
    """

    def __init__(
        self,
        sources: Sequence[BundleSource],
        engines: EngineOptions,
        models: Models,
        url: str,
        wrap: Wrap,
    ) -> None:
        super().__init__(name="prejit-load", daemon=True)
        self._sources = sources
        self._paths = [source.path for source in sources]
        self._engines = engines
        self._models = models
        self._url = url
        self._wrap = wrap
        self._lock = threading.Lock()
        self._on_failure: Callable[[], object] | None = None
        self.when_loaded: Callable[[dict[str, str]], object] | None = None
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
            bundles = [self._load(source) for source in self._sources]
            for source, (bundle, _) in zip(self._sources, bundles, strict=True):
                if is_reference(source.path):  # its weights may be on the way, or not come
                    bundle.finish()
            before: State = "loading"
            if any(not bundle.matched for bundle, _ in bundles):
                self._models.change(before, "compiling")
                before = "compiling"
                for bundle, _ in bundles:
                    bundle.prepare()
            if self.when_loaded is not None:
                self.when_loaded(
                    {name: path for (_, name), path in zip(bundles, self._paths, strict=True)}
                )
            self._is_answering.wait()
            gc.freeze()
            gc.set_threshold(*_GC_THRESHOLDS)
            gc.enable()
            if self._models.change(before, "ready"):
                _log.info("ready, after %s", before)
                names = ", ".join(name for _, name in bundles)
                text = f"{self._url}  {names}  ready in {seconds_since_exec():.2f} s"
                say(printable(text))
        except BaseException as error:
            with self._lock:
                self.error = error
                call = self._on_failure
            if call is not None:
                call()

    def _load(self, source: BundleSource) -> tuple[Bundle, str]:
        on_mismatch: Literal["jit", "error"] = "error" if self._engines.must_match else "jit"
        with progress() as show:
            bundle = load(source.path, on_mismatch=on_mismatch, on_transfer=reporting(show))
        options: dict[str, Any] = {
            "slots": self._engines.slots,
            "queue": self._engines.queue,
            "prefix_memory": self._engines.prefix_memory,
            "share_prefixes": self._engines.share_prefixes,
        }
        if len(self._sources) > 1 and bundle.config.decoder is not None:
            # The caches of the others are planned too, and not allocated yet.
            options["memory"] = free_bytes(bundle.decoder.device) // len(self._sources)
        with importing():
            from prejit.server.engine.engine import Engine  # the HTTP stack is imported beside it

        engine = Engine(bundle, **{k: v for k, v in options.items() if v is not None})
        name = source.name or bundle.name
        engine = self._wrap(name, engine)
        self._models.add(Served(name, bundle, engine, int(time.time()), follows=source.follows))
        how = "its executables" if bundle.matched else "programs that are compiled here"
        _log.info("%s: %s, target %s, runs %s", name, bundle.digest, bundle.target, how)
        return bundle, name
