"""The first load of a bundle on a machine, in a child process, where a policy has `first_load = "child"`.

The child loads every executable of the target and runs one program. So code that crashes ends the child and
not the server. It is not a sandbox: the child runs with the rights of this process. The outcome is kept.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from prejit.runtime.base.files import digest_of, is_digest
from prejit.runtime.base.typed_json import to_json
from prejit.runtime.errors import ExecutableError, RejectError, StoreError, UntrustedError
from prejit.runtime.format.opening import OpenTarget
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.machine.kept_files import cache_root, read_own, write_own

_log = logging.getLogger(__name__)
CHILD_MODULE = "prejit.runtime.first_load_child"
"""The module that the child process runs."""

SECONDS = 600.0
"""How long a child process may take. It hashes all files of the target first."""
_MAX_ANSWER_BYTES = 1 << 16
_TRIES = 2
"""Number of fresh processes that must crash until a crash is held against a bundle. The memory of the last
one has no limit, because code that gets no memory aborts, too."""
_CRASHES = frozenset({"SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV", "SIGTRAP"})
"""The signals by which code ends its own process. Others come from outside and prove nothing."""

_HINT_OF_FAILURE = 'mend what the message names, or take first_load = "child" out of the policy'


class FirstLoad(NamedTuple):
    """The bundle that a child process loads, and how.

    `must_match`: whether a machine that matches no target is an error. `declared`: the fingerprint to load it
    for; None: this machine's. `policies`: the files of those that apply.
    """

    path: str | os.PathLike[str]
    targets: Sequence[OpenTarget]
    must_match: bool
    declared: Fingerprint | None
    policies: Sequence[str]

    @property
    def manifests(self) -> list[str]:
        """The digests of the targets' manifests, sorted. They name all files of the targets."""
        return sorted(target.descriptor.digest for target in self.targets)

    def request(self, *, limited: bool) -> bytes:
        """Return what the child process reads. Its memory is limited to what is free, or not at all."""
        request = {
            "path": os.path.abspath(self.path),
            "on_mismatch": "error" if self.must_match else "jit",
            "fingerprint": None if self.declared is None else to_json(self.declared).decode(),
            "limited": limited,
            "policies": [os.path.abspath(path) for path in self.policies],
        }
        return json.dumps(request).encode()


class _Process:
    """The role of this process: the child of a first load, whose own loads begin at once, or not."""

    is_child = False
    manifests: Sequence[str] = ()


def become_child() -> None:
    """Make this process the child process of a first load: it loads without another one."""
    _Process.is_child = True


def begun_manifests() -> Sequence[str]:
    """Return the manifests of the bundle that this child process has begun to load."""
    return _Process.manifests


def check_first_load(wanted: FirstLoad, machine: Fingerprint, policy: str) -> None:
    """Load a bundle in a child process, unless this machine has done so before.

    Raises:
        UntrustedError: two child processes crashed or took too long, now or at an earlier load. Or one was
            ended from outside, or failed in a way that no other error is for: that is not kept. The case is
            `first-load`.
        RejectError: the bundle is damaged, or was replaced meanwhile.
        ExecutableError: XLA cannot load an executable on this machine.
        StoreError: a file cannot be read, or no process can be started.
    """
    manifests = wanted.manifests
    if _Process.is_child:
        _Process.manifests = manifests
        return
    key = digest_of(json.dumps([manifests, asdict(machine)], sort_keys=True).encode())
    outcome = first_load_outcome(key)
    _log.info("%s wants the first load in a child process: %s", policy, outcome or "it begins")
    if outcome is None:
        for number in range(_TRIES):
            outcome = _tried(wanted, manifests, policy, limited=number < _TRIES - 1)
            if outcome == LOADED:
                break
        kept = {"key": key, "outcome": outcome, "manifests": manifests}
        # Without a place to keep it, the next load tries again.
        write_own(first_load_file(key), json.dumps(kept).encode())
    if outcome != LOADED:
        path = os.fspath(wanted.path)
        raise UntrustedError(
            path,
            f"{_wanted_by(policy)} {outcome:.200}, {_TRIES} times",
            case="first-load",
            hint=f"do not run this bundle. {first_load_file(key)} keeps that it crashed: "
            f"`prejit verify --forget {path}` removes the file, and the next load tries again",
        )


def _wanted_by(policy: str) -> str:
    return f"{policy} wants the first load in a child process, and there the bundle"


def _tried(wanted: FirstLoad, manifests: list[str], policy: str, *, limited: bool) -> str:
    """Return how a child process ended: `loaded`, or how it crashed. Raises as `check_first_load`."""
    import subprocess  # later loads need none of these

    from prejit.runtime.base.child_process import run_child, signal_name

    path = os.fspath(wanted.path)
    try:
        code, answer, _ = run_child(
            [sys.executable, "-P", "-m", CHILD_MODULE],
            wanted.request(limited=limited),
            seconds=SECONDS,
            stderr=subprocess.DEVNULL,
            most_bytes=_MAX_ANSWER_BYTES,
        )
    except (OSError, ValueError) as error:
        raise StoreError(
            f"{path}: cannot start a process for the first load: {error}", hint=_HINT_OF_FAILURE
        ) from error
    if code is None:
        return f"took more than {SECONDS:.0f} seconds"
    if code < 0:
        name = signal_name(-code)
        if name in _CRASHES and (limited or not _has_memory_limit()):
            return f"ended the process by {name}"
        cause = "within the memory limit of this process" if name in _CRASHES else "from outside"
        raise UntrustedError(
            path,
            f"{_wanted_by(policy)} was ended by {name} {cause}",
            case="first-load",
            hint="nothing is held against the bundle: load it again. If this service was not stopped, this "
            "machine had too little memory",
        )
    _judge(path, manifests, answer, code, policy)
    return LOADED


def _has_memory_limit() -> bool:
    """Return whether this process, and so its child, has a limit of memory (ulimit -d, -v)."""
    import resource

    kinds = (resource.RLIMIT_DATA, resource.RLIMIT_AS)
    return any(resource.getrlimit(kind)[0] != resource.RLIM_INFINITY for kind in kinds)


def _judge(path: str, manifests: list[str], answer: bytes, status: int, policy: str) -> None:
    """Raise the error that the answer of a child process is, unless the bundle was loaded."""
    try:
        said: Any = json.loads(answer)
        error, text, found = str(said["error"]), str(said["text"]), said["manifests"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise UntrustedError(
            path,
            f"{_wanted_by(policy)} ended the process with status {status} and without an answer",
            case="first-load",
            hint=_HINT_OF_FAILURE,
        ) from None
    if error == RejectError.code:
        raise RejectError(str(said.get("path", path)), text)
    if error == ExecutableError.code:
        raise ExecutableError(text)
    if error == StoreError.code:
        raise StoreError(text)
    if error or status:
        raise UntrustedError(
            path,
            f"the first load in a child process failed: {text or f'status {status}'}",
            case="first-load",
            hint=_HINT_OF_FAILURE,
        )
    if found != manifests:
        raise RejectError(path, "expected the same bundle in the child process, found another")


LOADED = "loaded"
"""The outcome of a first load that went well; another outcome says how the child process ended."""


def first_load_outcome(key: str) -> str | None:
    """Return the outcome of the first load of a digest that stands for a bundle on a machine.

    None: there was none, or its file is damaged.
    """
    outcome = _kept(first_load_file(key)).get("outcome")
    return outcome if isinstance(outcome, str) and outcome else None


def forget_failed_loads(manifests: Collection[str]) -> list[Path]:
    """Remove the outcomes of first loads that failed, of these digests of manifests. Return the files.

    Raises:
        OSError: a file cannot be removed.
    """
    found = []
    for file in sorted(_directory().glob("*.json")):
        kept = _kept(file)
        loaded = kept.get("manifests")
        about = isinstance(loaded, list) and any(each in manifests for each in loaded)
        if about and kept.get("outcome") != LOADED:
            file.unlink(missing_ok=True)
            found.append(file)
    return found


def first_load_file(key: str) -> Path:
    """Return the file with the outcome of a first load."""
    assert is_digest(key)
    return _directory() / f"{key.removeprefix('sha256:')}.json"


def _directory() -> Path:
    return cache_root() / "first-loads" / "v1"


def _kept(file: Path) -> dict[str, Any]:
    """Return the content of a file; an empty one if it is missing, damaged or another's."""
    with contextlib.suppress(ValueError, RecursionError):
        found: Any = json.loads(read_own(file, _MAX_ANSWER_BYTES) or b"")
        if isinstance(found, dict) and found.get("key") == f"sha256:{file.stem}":
            return found
    return {}
