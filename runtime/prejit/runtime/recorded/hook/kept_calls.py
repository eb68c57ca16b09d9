"""Run calls of jitted functions without a trace, as a recording of the same process has them.

A call is served if the command, files, environment variables and modules that the recorded process had read
before it are the same, and two recordings gave the same program for a call of this signature.
"""

from __future__ import annotations

import functools
import json
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prejit.runtime.recorded.hook.jax_calls import (
    PARTS,
    JaxCall,
    KeptCall,
    SignatureReader,
    TracedPart,
    load_executable,
    looks_for_nans,
    signature_of,
)
from prejit.runtime.recorded.hook.kept_shardings import NotKeptError
from prejit.runtime.recorded.hook.plain_texts import digest_of
from prejit.runtime.recorded.hook.process_inputs import (
    InputComparison,
    calls_file,
    command_of_process,
)
from prejit.runtime.recorded.hook.result_trees import given_values, tree_of


class KeptCalls:
    """Serves the calls of this process.

    Args:
        directory: the directory of jax's cache, with the files of calls.
        settings: settings of jax that prejit sets, which tell nothing of a program.
        checked: the share of the calls that jax traces for comparison, from 0 to 1.
        tell: takes of each call the name of its function, why it is traced (None: it is not), and the
            seconds that it took to say so.
    """

    def __init__(
        self,
        directory: Path,
        settings: tuple[str, ...],
        checked: float,
        tell: Callable[[str, str | None, float], None],
    ) -> None:
        self._file = directory / calls_file(command_of_process())
        # Beside the directories of unpacked bundles, which nobody writes.
        self._receipts = directory.parent.parent / "inputs" / self._file.name
        self._reader = SignatureReader(settings)
        self._checked = checked
        self._tell = tell
        self._broken: str | None = None
        self._times: dict[str, int] = {}
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._stopped: set[str] = set()

    @functools.cached_property
    def _recorded(self) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = json.loads(self._file.read_text())
        except (OSError, ValueError):
            return None
        return found

    @functools.cached_property
    def _comparison(self) -> InputComparison:
        assert self._recorded is not None
        return InputComparison(self._recorded["inputs"], self._receipts)

    def started(self, token: object, call: JaxCall) -> KeptCall | None:
        """Return what runs a call without a trace; None: jax traces it."""
        began = time.perf_counter()
        try:
            with self._lock:
                kept, reason = self._kept(call), None
        except NotKeptError as error:
            kept, reason = None, str(error)
        except Exception as error:  # of a class of the program, or of jax
            kept, reason = None, f"{type(error).__name__}: {error}"
        self._tell(call_name(call), reason, time.perf_counter() - began)
        return kept

    def stop(self, function: str) -> None:
        """Serve no call of a function any more: its trace has given another program."""
        self._stopped.add(function)

    def _kept(self, call: JaxCall) -> KeptCall:
        if self._broken is not None:
            raise NotKeptError(self._broken)
        if self._recorded is None:
            raise NotKeptError("no recording of this command in this directory")
        if os.getpid() != self._process:
            raise NotKeptError("it runs in a process that was forked after jax was imported")
        if looks_for_nans():
            raise NotKeptError("jax looks for NaNs or infinities")
        parts = self._reader.read(call)
        signature = signature_of(parts)
        recorded = self._recorded["calls"].get(signature)
        if recorded is None:
            raise NotKeptError(self._difference(parts))
        if recorded["reason"] is not None:
            raise NotKeptError(recorded["reason"])
        if call_name(call) in self._stopped:
            raise NotKeptError("a trace of this function has given another program")
        before = self._times.get(signature, 0)
        if before >= len(recorded["indices"]):
            raise NotKeptError("it is called for more functions than were recorded")
        self._times[signature] = before + 1
        difference = self._comparison.difference(recorded["indices"][before])
        if difference is not None:
            self._broken = f"{difference} is not as recorded"
            raise NotKeptError(self._broken)
        if self._checked and random.random() < self._checked:  # noqa: S311, no secret
            raise NotKeptError(CHECKED + recorded["program"])
        tree = tree_of(recorded["results"], functools.cache(functools.partial(given_values, call)))
        kept = KeptCall(_executable(recorded["program"], json.dumps(recorded["executable"])), tree)
        self._comparison.save()
        return kept

    def _difference(self, parts: dict[str, str]) -> str:
        """Return which part of a signature no recorded call has."""
        assert self._recorded is not None
        same = [*self._recorded["calls"].values()]
        for name in PARTS:
            digest = digest_of(parts[name])
            found = [each for each in same if each["parts"][name][0] == digest]
            if not found:
                text = parts[name] if len(parts[name]) < 200 else f"{parts[name][:200]}..."
                near = f", recorded {same[0]['parts'][name][1]}" if name != "function" else ""
                return f"{name} not as recorded: {text}{near}"
            same = found
        return "not as recorded"


CHECKED = "traced to be compared with "
"""The beginning of the reason why a call that could be served is traced; the program's key follows."""


def call_name(call: JaxCall) -> str:
    """Return the name of a call's function as jax's programs have it."""
    if isinstance(call.function, TracedPart):
        return call.function.name
    return str(getattr(call.function, "__name__", type(call.function).__name__))


@functools.lru_cache(8192)
def _executable(key: str, described: str) -> Any:
    return load_executable(json.loads(described), key)
