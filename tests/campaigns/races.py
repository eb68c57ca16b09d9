"""Processes that write and read one cache at once, some of them killed; and loads of a bundle that changes.

Each class of `CACHES` is one shared directory: how it is written, how it is read, and what may be left there.
What a cache holds follows from its name, so that every reader knows what is right.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import itertools
import json
import mmap
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from . import faults, processes

if TYPE_CHECKING:
    from prejit.compiler.recording.recording_run import RecordedFile

PROCESSES = 16
"""So many write, and as many read."""
NAMES = 8
"""So many things a cache holds at once, at most: few, so that processes meet."""
_LIMIT_SECONDS = 3600
_KILL_SECONDS = 0.2
"""A writer is killed after at most this time, and then the next."""
_EXCHANGE = 2
"""RENAME_EXCHANGE of renameat2."""


class Cache(Protocol):
    """A shared directory.

    `write` and `read` are called in processes that may be killed at any moment. `read` raises AssertionError
    where it finds something wrong. Any other error of either is a false rejection.
    """

    def __init__(self, directory: Path) -> None: ...

    def prepare(self) -> None:
        """Make what has to be there before."""

    def write(self, number: int) -> None:
        """Write in the round of this number."""

    def read(self, number: int) -> None:
        """Read in the round of this number."""

    def left(self) -> list[str]:
        """Return what is left there that nobody wants, after one more use by a single process."""


def content_of(name: str) -> bytes:
    """Return the only right content of a name: some kilobytes that no other name has."""
    return random.Random(name).randbytes(3000)


def _names(directory: Path, *patterns: str) -> list[str]:
    found = itertools.chain.from_iterable(directory.rglob(pattern) for pattern in patterns)
    return sorted(str(path.relative_to(directory)) for path in found)


class BuildCache:
    """The build's store: results that several builds make at once, while `prejit gc` runs."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._log = directory / "made"

    def prepare(self) -> None:
        self._directory.mkdir()
        self._log.touch()

    def _key(self, number: int) -> tuple[str, bytes]:
        # New results appear all the time. Each is wanted in 40 rounds of every process.
        name = f"result {number // 5 + random.randrange(NAMES)}"
        return name, content_of(name)

    def write(self, number: int) -> None:
        from prejit.compiler.garbage import collect
        from prejit.compiler.store.directory_store import DirectoryStore
        from prejit.compiler.store.key import Key
        from prejit.runtime.base.files import digest_of

        name, content = self._key(number)
        key = Key("compile", name, (("source", name),))
        store = DirectoryStore.open(self._directory / "cache")
        with store.making(key) as mine:
            assert mine
            if store.get(key, verify=True) is None:
                digest = store.put_blob(content)
                store.put(key, {"name": name}, blobs=[digest])
                with self._log.open("a") as log:
                    log.write(f"{name}\n")
            assert store.read_blob(digest_of(content)) == content
        if number % 10 == 0:
            collect(self._directory / "cache", days=1)

    def read(self, number: int) -> None:
        from prejit.compiler.store.directory_store import DirectoryStore
        from prejit.compiler.store.key import Key
        from prejit.runtime.base.files import digest_of

        name, content = self._key(number)
        store = DirectoryStore.open(self._directory / "cache")
        if (found := store.get(Key("compile", name, (("source", name),)))) is not None:
            assert found == {"name": name}
            assert store.read_blob(digest_of(content)) == content

    def left(self) -> list[str]:
        from prejit.compiler.store.directory_store import DirectoryStore

        made = self._log.read_text().splitlines()
        twice = {name for name in made if made.count(name) > 1}
        store = DirectoryStore.open(self._directory / "cache")
        temporary = [*(store.root / "v1" / "temp").iterdir()]
        return [*map(str, temporary), *(f"made twice: {name}" for name in sorted(twice))]


class CompiledHere:
    """Programs that this machine compiled: more than the cache may hold, so that it drops old ones."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def prepare(self) -> None:
        self._directory.mkdir()

    def _use(self, number: int) -> None:
        from prejit.runtime.machine.fingerprint import Fingerprint
        from prejit.runtime.programs.compile_cache import PortableKey, compiled_here

        os.environ["PREJIT_RUNTIME_CACHE"] = str(self._directory)
        os.environ["PREJIT_COMPILE_CACHE_BYTES"] = "20000"
        name = f"program {number // 20 + random.randrange(NAMES)}"
        key = PortableKey(
            f"sha256:{hashlib.sha256(name.encode()).hexdigest()}", ("cpu",), "cpu", None
        )
        found, _ = compiled_here(key, Fingerprint.current(), lambda: content_of(name))
        assert found == content_of(name)

    def write(self, number: int) -> None:
        self._use(number)

    def read(self, number: int) -> None:
        self._use(number)

    def left(self) -> list[str]:
        self._use(1)
        return _names(self._directory, "*.tmp", "*.lock")


class ReceiptsOfFiles:
    """Receipts, and the names of first programs."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files = directory / "files"

    def prepare(self) -> None:
        self._files.mkdir(parents=True)
        for number in range(NAMES):
            path = self._files / str(number)
            path.write_bytes(content_of(f"file {number}"))
        time.sleep(2.1)  # what has just changed gets no receipt

    def write(self, number: int) -> None:
        from prejit.runtime.machine.kept_files import Receipts, remember_first_programs

        os.environ["PREJIT_RUNTIME_CACHE"] = str(self._directory / "cache")
        receipts = Receipts(self._files)
        for name in random.sample(range(NAMES), 3):
            expected = hashlib.sha256(content_of(f"file {name}")).hexdigest()
            assert receipts.digest_of(self._files / str(name)) == f"sha256:{expected}"
        receipts.save()
        remember_first_programs("sha256:0", [f"p{number}"] * 100)

    def read(self, number: int) -> None:
        from prejit.runtime.machine.kept_files import first_programs

        os.environ["PREJIT_RUNTIME_CACHE"] = str(self._directory / "cache")
        names = first_programs("sha256:0")
        assert len(set(names)) <= 1
        assert len(names) in (0, 100)
        for path in (self._directory / "cache").glob("receipts/v1/*.json"):
            assert json.loads(path.read_bytes()), "a receipt that counts for nothing"

    def left(self) -> list[str]:
        from prejit.runtime.machine.kept_files import Receipts

        for path in self._files.iterdir():  # whose receipts end
            path.touch()
            os.utime(path, (0, 0))
        time.sleep(2.1)
        os.environ["PREJIT_RUNTIME_CACHE"] = str(self._directory / "cache")
        receipts = Receipts(self._files)
        for path in self._files.iterdir():
            receipts.digest_of(path)
        receipts.save()
        self.write(0)
        return _names(self._directory, "*.tmp")


class ChannelStates:
    """What was accepted of a channel last: it never goes back."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._key = directory / "key.pem"
        self._newest = 0

    def prepare(self) -> None:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        self._directory.mkdir()
        public = ec.generate_private_key(ec.SECP256R1()).public_key()
        form = serialization.PublicFormat.SubjectPublicKeyInfo
        self._key.write_bytes(public.public_bytes(serialization.Encoding.PEM, form))

    def write(self, number: int) -> None:
        from prejit.runtime.trust.channel import Accepted, KeySet
        from prejit.runtime.trust.channel_following import ChannelState
        from prejit.runtime.trust.public_keys import read_key

        os.environ["XDG_STATE_HOME"] = str(self._directory / "state")
        os.umask(0o002)
        state = ChannelState("/etc/trust.toml", "stable")
        with state.locked():
            kept = state.read()
            if kept is None:
                kept = Accepted(KeySet(0, (read_key(self._key.read_bytes(), "key"),), 1))
            assert kept.version >= self._newest
            self._newest = kept.version + 1
            digest = hashlib.sha256(str(self._newest).encode()).hexdigest()
            state.write(kept._replace(version=self._newest, release_digest=f"sha256:{digest}"))

    def read(self, number: int) -> None:
        from prejit.runtime.trust.channel_following import ChannelState

        os.environ["XDG_STATE_HOME"] = str(self._directory / "state")
        if (kept := ChannelState("/etc/trust.toml", "stable").read()) is not None:
            assert kept.version >= self._newest, "an older release came back"
            digest = hashlib.sha256(str(kept.version).encode()).hexdigest()
            assert kept.release_digest == f"sha256:{digest}"
            self._newest = kept.version

    def left(self) -> list[str]:
        self.write(0)
        return _names(self._directory, "*.tmp")


class BundleDirectory:
    """A bundle that builds replace and to which signatures are attached, and the files unpacked from it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._bundle = directory / "bundle"

    def prepare(self) -> None:
        self._directory.mkdir()
        self._write_bundle(0)

    def _write_bundle(self, version: int) -> None:
        from prejit.compiler.pipeline.layout_writing import write_layout
        from prejit.compiler.pipeline.pack.bundle_files import assemble
        from prejit.compiler.recording.recording_run import RecordedTarget, packed
        from prejit.runtime.machine.fingerprint import Fingerprint, Requirement

        files = {file.entry.file: file for file in self._files(version)}
        here = Fingerprint.current()
        needs = Requirement("cpu", here.architecture, here.cpu_features, here.jaxlib)
        target = RecordedTarget(needs, {"jax": "1"}, files)
        write_layout(self._bundle, *assemble("race", [packed(target, "race")]))

    def _files(self, version: int) -> Iterator[RecordedFile]:
        import zstandard

        from prejit.compiler.recording.recording_run import RecordedFile
        from prejit.runtime.base.files import digest_of
        from prejit.runtime.format.bundle_schema import RecordedProgram, Segment

        for number in range(3):
            name = f"jit_{version}_{number}"
            raw = content_of(name)
            frame = zstandard.ZstdCompressor(write_checksum=True).compress(raw)
            segment = Segment(0, len(frame), digest_of(frame), len(raw), digest_of(raw))
            file = f"{name}-{hashlib.sha256(name.encode()).hexdigest()}-cache"
            yield RecordedFile(RecordedProgram(name, file, segment, {}, {}), frame)

    def write(self, number: int) -> None:
        from prejit.compiler.pipeline.layout_writing import EMPTY, Part, attach
        from prejit.runtime.errors import UsageError
        from prejit.runtime.format.blobs import read_whole
        from prejit.runtime.recorded import recorded_bundle

        os.environ["PREJIT_RUNTIME_CACHE"] = str(self._directory / "cache")
        if number % 3 == 0:
            self._write_bundle(random.randrange(NAMES))
        elif number % 3 == 1:
            subject = read_whole(self._bundle, lambda layout, root: root.subject)
            assert subject is not None
            note = Part("text/plain", str(random.randrange(3)).encode())
            with contextlib.suppress(UsageError):  # it was replaced meanwhile
                attach(self._bundle, subject, "text/plain", EMPTY, [note], {})
        else:
            root = self._directory / "cache" / "recorded" / "v1"
            for directory in root.glob("[0-9a-f]*"):
                with contextlib.suppress(FileNotFoundError):
                    if random.random() < 0.2:
                        os.utime(directory, (0, time.time() - 31 * 86400))
            recorded_bundle.open_recorded(self._bundle)

    def read(self, number: int) -> None:
        from prejit.runtime.format.blobs import check_blobs, read_whole
        from prejit.runtime.format.layout import Layout
        from prejit.runtime.format.opening import match, read_manifests
        from prejit.runtime.format.root import Root
        from prejit.runtime.machine.fingerprint import Fingerprint
        from prejit.runtime.recorded.recorded_bundle import open_recorded

        os.environ["PREJIT_RUNTIME_CACHE"] = str(self._directory / "cache")

        def check(layout: Layout, root: Root) -> None:
            targets = match(root, Fingerprint.current())
            check_blobs(layout, read_manifests(layout, targets).values(), None)

        read_whole(self._bundle, check)
        found = open_recorded(self._bundle)
        assert found.directory is not None
        versions = {program.name.split("_")[1] for program in found.programs}
        assert len(versions) == 1, "a mixture of two bundles"
        for program in found.programs:
            with contextlib.suppress(FileNotFoundError):  # made old by a writer, then removed
                content = (found.directory / program.file).read_bytes()
                assert content == content_of(program.name)

    def left(self) -> list[str]:
        from prejit.runtime.recorded.recorded_bundle import open_recorded

        os.environ["PREJIT_RUNTIME_CACHE"] = str(self._directory / "cache")
        for directory in (self._directory / "cache" / "recorded" / "v1").glob("[0-9a-f]*"):
            os.utime(directory, (0, 0))
        self._write_bundle(NAMES)  # a new one, which has to be unpacked
        open_recorded(self._bundle)
        cache = sorted((self._directory / "cache" / "recorded" / "v1").iterdir())
        files = sorted((self._bundle / "blobs" / "sha256").iterdir())
        needed = (
            4  # the index, a manifest, a config and a layer: nothing is attached to the new one
        )
        return [
            *_names(self._bundle, "*.tmp"),
            *(f"in the cache: {path.name}" for path in cache[1:]),
            *(f"in the bundle: {path.name}" for path in files[needed:]),
        ]


CACHES: Mapping[str, type[Cache]] = {
    "the build cache": BuildCache,
    "programs compiled here": CompiledHere,
    "receipts": ReceiptsOfFiles,
    "the state of a channel": ChannelStates,
    "a bundle's directory": BundleDirectory,
}


@dataclass(frozen=True)
class Lap:
    """What one process of a race does.

    Attributes:
        cache: its name in `CACHES`.
        directory: of the cache.
        writes: whether it writes; if not, it reads.
        slot: its place in the file of counters.
        rounds: how many rounds all processes with this slot do together.
        counters: the file of counters: the rounds that are done, 8 bytes for each slot.
        errors: where the process writes what went wrong.
    """

    cache: str
    directory: str
    writes: bool
    slot: int
    rounds: int
    counters: str
    errors: str


def run_lap(lap: Lap) -> None:
    """Do the rounds that are left. A successor of a killed process goes on where that one was killed."""
    random.seed()
    cache = CACHES[lap.cache](Path(lap.directory))
    with open(lap.counters, "r+b") as file, mmap.mmap(file.fileno(), 0) as counters:
        done = memoryview(counters).cast("q")
        while done[lap.slot] < lap.rounds:
            try:
                (cache.write if lap.writes else cache.read)(done[lap.slot])
            except Exception:
                with open(lap.errors, "a") as errors:
                    errors.write(json.dumps(traceback.format_exc()) + "\n")
            done[lap.slot] += 1
        done.release()


@dataclass(frozen=True)
class Race:
    """How a race ended.

    Attributes:
        rounds: that each process did.
        kills: of writers.
        errors: wrong reads and false rejections.
        left: what the next use left there.
        seconds: wall time.
    """

    rounds: int
    kills: int
    errors: tuple[str, ...]
    left: tuple[str, ...]
    seconds: float


def race(name: str, directory: Path, *, rounds: int, writers: int, seed: int) -> Race:
    """Let processes write and read one cache, and kill writers at random moments.

    Args:
        name: the cache's name in `CACHES`.
        directory: an empty directory.
        rounds: how often each process writes or reads.
        writers: how many processes write; as many read.
        seed: of the moments.
    """
    pick = random.Random(seed)
    context = processes.fork_server()
    cache = CACHES[name](directory / "cache")
    cache.prepare()
    counters, errors = directory / "counters", directory / "errors"
    counters.write_bytes(bytes(8 * 2 * writers))
    errors.touch()
    both = (str(counters), str(errors))
    laps = [
        Lap(name, str(directory / "cache"), slot < writers, slot, rounds, *both)
        for slot in range(2 * writers)
    ]

    def start(lap: Lap) -> ForkServerProcess:
        process = context.Process(target=run_lap, args=(lap,), daemon=True)
        process.start()
        return process

    def done(slot: int) -> int:
        return int.from_bytes(counters.read_bytes()[8 * slot : 8 * slot + 8], sys.byteorder)

    started, kills = time.monotonic(), 0
    running, begun = [start(lap) for lap in laps], [0] * writers
    while any(process.is_alive() for process in running):
        assert time.monotonic() - started < _LIMIT_SECONDS, "it hangs"
        time.sleep(pick.uniform(0, _KILL_SECONDS))
        slot = pick.randrange(writers)
        # A slow machine would kill each before it has done anything.
        if running[slot].is_alive() and done(slot) > begun[slot]:
            running[slot].kill()
            running[slot].join()
            kills += running[slot].exitcode == -signal.SIGKILL
            begun[slot] = done(slot)
            running[slot] = start(laps[slot])
    seconds = time.monotonic() - started
    ended = [process.exitcode for process in running]
    assert not any(ended), f"processes ended with {ended}"
    found = tuple(json.loads(line) for line in errors.read_text().splitlines())
    return Race(rounds, kills, found, tuple(cache.left()), seconds)


# --- loads of a bundle that is replaced -------------------------------------------------------------------


@dataclass(frozen=True)
class Loads:
    """What one process loads.

    Attributes:
        paths: the directories; each load takes the next.
        count: how many loads.
        right: the values; each load has to give one of them.
        cache: the runtime's cache.
        into: the file of the figures.
    """

    paths: tuple[str, ...]
    count: int
    right: tuple[float, ...]
    cache: str
    into: str


def load_often(loads: Loads) -> int:
    """Load bundles, call all programs of each, and write what they gave."""
    counts: dict[str, int] = {}
    errors = []
    for path, _ in zip(itertools.cycle(loads.paths), range(loads.count), strict=False):
        try:
            found = faults.value_of(Path(path), Path(loads.cache))
            assert found in loads.right, f"{path}: {found}"
            counts[str(found)] = counts.get(str(found), 0) + 1
        except Exception:
            errors.append(traceback.format_exc())
    Path(loads.into).write_text(json.dumps({"counts": counts, "errors": errors}))
    return 0


@dataclass(frozen=True)
class Replacing:
    """Where a process replaces bundles until it is killed.

    Attributes:
        sources: whole bundles, which are put in place in turn.
        direct: the directory that is written into, and exchanged for others.
        link: a symbolic link that is turned to others.
        counts: the file of how often each was done.
    """

    sources: tuple[str, ...]
    direct: str
    link: str
    counts: str


def replace_often(replacing: Replacing) -> int:
    """Replace bundles in each of the ways of `WAYS`, in turn, for ever."""
    counts = dict.fromkeys((way.__name__ for way in WAYS), 0)
    for number, source in enumerate(itertools.cycle(replacing.sources)):
        way = WAYS[number // len(replacing.sources) % len(WAYS)]
        way(Path(source), Path(replacing.link if way is link else replacing.direct), number)
        counts[way.__name__] += 1
        at = Path(f"{replacing.counts}.new")
        at.write_text(json.dumps(counts))
        at.replace(replacing.counts)
    return 0


def rebuild(source: Path, path: Path, number: int) -> None:
    """Write a bundle as a build does."""
    from tests.layouts import blobs_of, index_file

    from prejit.compiler.pipeline.layout_writing import write_layout

    blobs: dict[str, bytes | Path] = {**blobs_of(source)}
    write_layout(path, index_file(source).read_bytes(), blobs)


def annotate(source: Path, path: Path, number: int) -> None:
    """Attach something, as `prejit sign` does."""
    from prejit.compiler.pipeline.layout_writing import EMPTY, Part, attach
    from prejit.runtime.format.blobs import read_whole

    subject = read_whole(path, lambda layout, root: root.subject)
    assert subject is not None
    note = Part("text/plain", str(number % 5).encode())
    attach(path, subject, "text/plain", EMPTY, [note], {})


def exchange(source: Path, path: Path, number: int) -> None:
    """Exchange the directory for another one, and delete the old one."""
    new = path.with_name(f"{path.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    shutil.copytree(source, new)
    call = ctypes.CDLL(None, use_errno=True).renameat2
    at_cwd = -100
    if call(at_cwd, os.fsencode(new), at_cwd, os.fsencode(path), _EXCHANGE):
        raise OSError(ctypes.get_errno(), "renameat2")
    shutil.rmtree(new)


def pull(source: Path, path: Path, number: int) -> None:
    """Write as a client of a registry does: blobs by rename, then the index, then stale blobs go."""
    for file in [*(source / "blobs" / "sha256").iterdir(), source / "index.json"]:
        to = path / file.relative_to(source)
        part = to.with_name(f".{to.name}.part")
        shutil.copyfile(file, part)
        part.replace(to)
    kept = {file.name for file in (source / "blobs" / "sha256").iterdir()}
    for file in (path / "blobs" / "sha256").iterdir():
        if file.name not in kept:
            file.unlink()


def link(source: Path, path: Path, number: int) -> None:
    """Turn a link to a new copy, and delete the old copy."""
    copy = path.with_name(f"{path.name}.{number}")
    shutil.copytree(source, copy)
    before = os.readlink(path) if path.is_symlink() else None
    new = path.with_name(f"{path.name}.link")
    new.unlink(missing_ok=True)
    new.symlink_to(copy)
    new.replace(path)
    if before is not None:
        shutil.rmtree(before)


WAYS: Sequence[Callable[[Path, Path, int], None]] = (rebuild, annotate, exchange, pull, link)
"""How a bundle is replaced."""
