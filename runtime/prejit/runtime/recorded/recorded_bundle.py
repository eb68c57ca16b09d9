"""Open a recorded bundle, choose its target for this machine, and unpack it into a directory for jax.

The files are unpacked once into the runtime's cache and shared by all processes. Each is verified when it is
written, and again at every start, by its receipt or by hashing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import stat
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from prejit.runtime.base.file_hashing import digest_file
from prejit.runtime.base.files import Identity, store_errors
from prejit.runtime.base.process_facts import policy_paths
from prejit.runtime.base.written_files import locking
from prejit.runtime.errors import StoreError, UntrustedError, UntrustedWarning, UsageError
from prejit.runtime.format.blobs import Layer, read_whole
from prejit.runtime.format.bundle_schema import RecordedProgram
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.names import BUNDLE_NAME, RECORDED_MEDIA_TYPE
from prejit.runtime.format.opening import Contents, OpenTarget, match, read_contents
from prejit.runtime.format.root import Root
from prejit.runtime.machine.fingerprint import Fingerprint, Requirement
from prejit.runtime.machine.kept_files import Receipts, cache_root, is_own
from prejit.runtime.recorded.watched_command import make_directory
from prejit.runtime.verdict import Verdict

_log = logging.getLogger(__name__)
_UNUSED_DAYS = 30
"""After so many days without a start, unpacked files are removed when another bundle is unpacked."""

_TEMPORARY_SUFFIX = ".tmp"
_OTHER_CACHE = (
    "set PREJIT_RUNTIME_CACHE to a directory that can be written, or free some space there"
)


@dataclass(frozen=True, slots=True)
class RecordedBundle:
    """A recorded bundle that is open for this machine.

    Attributes:
        name, digest: of the bundle.
        verdict: of the chosen target: the first that matches, or else the closest.
        requirement: of the same target.
        programs: of the same target.
        directory: its files, unpacked; None: no target matches.
    """

    name: str
    digest: str
    verdict: Verdict
    requirement: Requirement
    programs: tuple[RecordedProgram, ...]
    directory: Path | None


def open_recorded(path: str | os.PathLike[str]) -> RecordedBundle:
    """Open a recorded bundle, and unpack the target that matches this machine.

    Raises:
        RejectError: the bundle is damaged.
        StoreError: it cannot be read, or the runtime's cache cannot be written.
        UsageError: `prejit record` did not write it.
        UntrustedError, PolicyError: a trust policy does not let it run.
    """
    return read_whole(path, partial(_open, machine=Fingerprint.current()))


def _open(layout: Layout, root: Root, *, machine: Fingerprint) -> RecordedBundle:
    targets = match(root, machine)
    if machine.platform != "cpu":
        # The program decides where it runs. On a machine with an accelerator it may still choose the CPU.
        targets += match(root, on_cpu(machine))
    closest = min(targets, key=lambda each: each.verdict.distance)
    chosen = next((each for each in targets if each.verdict.matches), closest)
    fit = "it matches" if chosen.verdict.matches else f"none matches: {chosen.verdict.reason()}"
    _log.info("%s, %s: chose target %s: %s", layout.path, root.digest, chosen.name, fit)
    contents = read_contents(layout, chosen)
    if policies := policy_paths():
        from prejit.runtime.trust.enforcing import enforce

        manifests = {chosen.name: contents.manifest}
        enforced = enforce(policies, layout, root, [chosen], manifests)
        if enforced.first_load is not None:
            raise UntrustedError(
                os.fspath(layout.path),
                f"{enforced.first_load} wants the first load in a child process, and the files of a recorded "
                "bundle are loaded by jax in the process of their program",
                case="first-load",
                hint='give recorded bundles a rule of their own, without first_load = "child"',
            )
        for text in enforced.reported:
            warnings.warn(text, UntrustedWarning, stacklevel=2)
    programs = recorded_of(layout, contents)
    directory = unpacked(layout, chosen, contents) if chosen.verdict.matches else None
    return RecordedBundle(
        root.bundle.annotations[BUNDLE_NAME],
        root.digest,
        chosen.verdict,
        contents.config.requirement,
        programs,
        directory,
    )


def on_cpu(machine: Fingerprint) -> Fingerprint:
    """Return a machine as a program finds it that runs on its CPU."""
    return replace(
        machine,
        platform="cpu",
        plugin=None,
        cuda=None,
        driver=None,
        device_kind=None,
        compute_capability=None,
        device_count=None,
        topology=None,
        device_memory_bytes=None,
    )


def recorded_of(layout: Layout, contents: Contents) -> tuple[RecordedProgram, ...]:
    """Return the recorded programs of a target.

    Raises:
        UsageError: it has none, because `prejit build` wrote the bundle.
    """
    if contents.config.recorded is None:
        raise UsageError(
            f"{layout.path}: expected a bundle that `prejit record` wrote, found one of `prejit build`",
            hint="load it with prejit.runtime.load, or record a run with: prejit record -o BUNDLE -- COMMAND",
        )
    return contents.config.recorded


def read_files(layout: Layout, contents: Contents, into: Path) -> None:
    """Write the files of a target into a directory, each verified.

    Raises:
        RejectError: a file is damaged.
        StoreError: it cannot be written.
    """
    pack = Layer.in_layout(layout, contents.manifest.layer(RECORDED_MEDIA_TYPE))
    for program in recorded_of(layout, contents):
        content = pack.unpack(program.entry)
        with store_errors(into / program.file, "write", hint=_OTHER_CACHE):
            (into / program.file).write_bytes(content)
            (into / program.file).chmod(0o444)


def unpacked(layout: Layout, target: OpenTarget, contents: Contents) -> Path:
    """Return the directory with the files of a target, and nothing else; it is read-only.

    Raises:
        RejectError: the bundle is damaged.
        StoreError: the runtime's cache cannot be written.
    """
    # The digest of the manifest names all files, and unlike the target's name it is a safe name.
    name = target.descriptor.digest.removeprefix("sha256:")
    root = make_directory(cache_root() / "recorded" / "v1")
    directory = root / name
    programs = recorded_of(layout, contents)
    with _locked(root, shared=True):
        if _is_whole(directory, programs):
            with contextlib.suppress(OSError):  # a cache that may only be read
                os.utime(directory)  # its last use
            return directory
    with _locked(root, shared=False):
        if _is_whole(directory, programs):  # another process unpacked it while this one waited
            return directory
        _remove_unused(root)
        unique = f".{name}.{os.getpid()}.{os.urandom(4).hex()}"
        temporary = make_directory(root / f"{unique}{_TEMPORARY_SUFFIX}")
        damaged = root / f"{unique}.damaged{_TEMPORARY_SUFFIX}"
        try:
            with store_errors(directory, "write"):
                read_files(layout, contents, temporary)
                temporary.chmod(0o555)
                with contextlib.suppress(FileNotFoundError):
                    directory.rename(damaged)
                temporary.rename(directory)
        finally:
            _remove(temporary)
            _remove(damaged)
        if _is_whole(directory, programs):
            return directory
    raise StoreError(
        f"{directory}: expected the unpacked files of {layout.path}, found others",
        hint="another process writes there: remove the directory, then try again",
    )


@contextlib.contextmanager
def _locked(root: Path, *, shared: bool) -> Iterator[None]:
    """Lock the directory of all unpacked targets: alone to change it, shared to look for one.

    Raises:
        StoreError: it cannot be opened.
    """
    with store_errors(root, "open", hint=_OTHER_CACHE):
        descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with locking(descriptor, shared=shared):
        yield


def _remove_unused(root: Path) -> None:
    """Remove the directories that no start has used for a long time, and those of killed processes.

    The caller has the lock, so nobody writes a directory that is not finished.
    """
    now = time.time()
    for directory in root.iterdir():
        with contextlib.suppress(OSError):
            unused_seconds = now - directory.lstat().st_mtime
            if directory.name.endswith(_TEMPORARY_SUFFIX) or unused_seconds > _UNUSED_DAYS * 86400:
                _remove(directory)
            elif unused_seconds < -86400:  # of a clock that was wrong: from now on it grows old
                os.utime(directory)


def _remove(directory: Path) -> None:
    with contextlib.suppress(OSError):
        if not directory.is_dir() or directory.is_symlink():
            directory.unlink()
            return
        directory.chmod(0o700)
    shutil.rmtree(directory, ignore_errors=True)


def _is_whole(directory: Path, programs: Sequence[RecordedProgram]) -> bool:
    """Return whether a directory holds these files, undamaged, and no other, and only this user writes there.

    A file of somebody else would run as code in the program.
    """
    try:
        status = directory.lstat()
        names = set(os.listdir(directory))
    except OSError:
        return False
    if not stat.S_ISDIR(status.st_mode) or not is_own(status):
        return False
    if names != {program.file for program in programs}:
        return False
    receipts = Receipts(directory)
    whole = all(_is_file(directory / each.file, each, receipts) for each in programs)
    receipts.save()
    return whole


def _is_file(path: Path, program: RecordedProgram, receipts: Receipts) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or not is_own(status):
            return False
        expected, identity = program.entry.raw_digest, Identity.of(status)
        if identity.size != program.entry.raw_size:
            return False
        if receipts.holds(expected, identity):
            return True
        hashed_at = time.time()
        if digest_file(descriptor) != expected:
            return False
        receipts.add(expected, identity, hashed_at=hashed_at)
        return True
    finally:
        os.close(descriptor)
