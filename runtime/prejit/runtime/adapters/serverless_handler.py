"""A bundle in a function of a serverless platform, which may be a snapshot that another machine restores.

    # app.py; the handler of the function is `app.handler`
    from prejit.runtime.adapters.serverless_handler import ServerlessHandler

    def answer(bundle, event):
        return {"text": bundle.generate(event["prompt"], max_new_tokens=32).text}

    handler = ServerlessHandler("/opt/bundles/demo", answer)

AWS Lambda calls `handler(event, context)`. With SnapStart it makes a snapshot of the process after the import
of this file, and each new process is a copy. The handler registers its hooks with `snapshot_restore_py`, a
package of Lambda's Python.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
from collections.abc import Callable
from typing import Any, final

import numpy as np

from prejit.runtime.base.files import Identity
from prejit.runtime.bundle import Bundle
from prejit.runtime.errors import ClosedError
from prejit.runtime.loader import load
from prejit.runtime.machine.compare import compare
from prejit.runtime.machine.fingerprint import Fingerprint

_log = logging.getLogger(__name__)


@final
class ServerlessHandler:
    """Answers events with a bundle that it loads at once.

    Attributes:
        bundle: the bundle. A restore may replace it.
    """

    def __init__(
        self, path: str | os.PathLike[str], answer: Callable[[Bundle, Any], Any], **options: Any
    ) -> None:
        """Load the bundle, and register with the platform if it takes snapshots.

        Args:
            path: the directory of the bundle, or a reference to it.
            answer: returns the answer to an event.
            **options: of `load`. `on_mismatch="error"` refuses to start, or to go on after a restore, on a
                machine that would have to compile.

        Raises:
            MismatchError, RejectError, StoreError, UntrustedError: as `load`.
        """
        self._path, self._answer, self._options = path, answer, options
        self._load()
        with contextlib.suppress(ImportError):
            from snapshot_restore_py import register_after_restore, register_before_snapshot

            register_before_snapshot(self.before_snapshot)
            register_after_restore(self.after_restore)

    def __call__(self, event: Any, context: object = None) -> Any:
        """Return the answer to an event."""
        return self._answer(self.bundle, event)

    def before_snapshot(self) -> None:
        """Verify every byte and make every program ready, so that no restored process has to."""
        self.bundle.prepare()
        self.bundle.finish()

    def after_restore(self) -> None:
        """Make a restored process ready: new random numbers, and a bundle that is right for its machine.

        The bundle stays if its programs run here and its files are the same. Otherwise it is loaded, and its
        files mapped, again: for another target, or to compile with a FallbackWarning.

        Raises:
            MismatchError: this machine matches no target, and `on_mismatch` is `error`.
            RejectError, StoreError, UntrustedError: as `load`.
        """
        random.seed()
        np.random.seed()
        if (reason := self._reason_to_load()) is None:
            _log.info("restored: %s stays loaded", self.bundle.digest)
            return
        _log.info("restored: %s is loaded again: %s", self.bundle.digest, reason)
        with contextlib.suppress(ClosedError):
            self.bundle.close()
        self._load()

    def _load(self) -> None:
        self._machine, self._files = Fingerprint.current(), self._identity()
        self.bundle = load(self._path, **self._options)

    def _reason_to_load(self) -> str | None:
        try:
            self.bundle.finish()
        except ClosedError as error:  # a fork has none of the threads that programs run in
            return str(error)
        machine = Fingerprint.current()
        if not self.bundle.matched and machine != self._machine:
            return "its programs were compiled on another machine"
        verdict = compare(self.bundle.target, self.bundle.config.requirement, machine)
        if self.bundle.matched and not verdict.matches:
            return f"target {self.bundle.target} does not match any more: {verdict.reason()}"
        if self._identity() != self._files:
            return "its files have changed"
        return None

    def _identity(self) -> Identity | None:
        """Return the identity of the file that names all others; None: the path is a reference."""
        try:
            return Identity.of(os.stat(os.path.join(self._path, "index.json")))
        except OSError:
            return None
