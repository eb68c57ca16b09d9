"""Processes that write and read one cache at once, some of them killed."""

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
from functools import partial

import zstandard
from tests.layouts import blobs_of, index_file

from prejit.compiler.garbage import collect
from prejit.compiler.pipeline.pack.bundle_files import assemble
from prejit.compiler.pipeline.pack.bundle_writing import Part, attach, write_layout
from prejit.compiler.recording.jax_cache_packing import RecordedFile, RecordedTarget, packed
from prejit.compiler.store.build_cache_key import Key
from prejit.compiler.store.directory_store import DirectoryStore
from prejit.runtime.base.files import digest_of
from prejit.runtime.errors import UsageError
from prejit.runtime.format.blobs import check_blobs, read_whole
from prejit.runtime.format.bundle_schema import RecordedProgram, Segment
from prejit.runtime.format.opening import match, read_manifests
from prejit.runtime.machine.fingerprint import Fingerprint, Requirement
from prejit.runtime.machine.kept_files import (
    SETTLED_SECONDS,
    Receipts,
    first_programs,
    remember_first_programs,
)
from prejit.runtime.programs.local_compiler import PortableKey, compiled_here
from prejit.runtime.recorded.recorded_bundle import open_recorded

from . import faults, processes

PROCESSES = 16  # so many write, and as many read
NAMES = 8  # so many things a cache holds at once, at most: few, so that processes meet
_LIMIT_SECONDS = 3600
_KILL_SECONDS = 0.2  # a writer is killed after at most this time


class Cache:
    """A shared directory, whose `read` raises AssertionError where it finds something wrong."""

    def __init__(self, directory):
        self._directory = directory
        self._cache = directory / "cache"
        os.environ["PREJIT_RUNTIME_CACHE"] = str(self._cache)

    def prepare(self):
        self._directory.mkdir()

    def left(self):
        """Return what is left there that nobody wants, after one more use by a single process."""
        self.write(1)
        return _names(self._directory, "*.tmp", "*.lock")


def content_of(name):
    """Return the only right content of a name: some kilobytes that no other name has."""
    return random.Random(name).randbytes(3000)


def _names(directory, *patterns):
    found = [path for pattern in (patterns or ("*.tmp",)) for path in directory.rglob(pattern)]
    return sorted(str(path.relative_to(directory)) for path in found)


class BuildCache(Cache):
    """The build's store: results that several builds make at once, while `prejit gc` runs."""

    def __init__(self, directory):
        super().__init__(directory)
        self._log = directory / "made"

    def prepare(self):
        super().prepare()
        self._log.touch()

    def _key(self, number):
        # New results appear all the time. Each is wanted in 40 rounds of every process.
        name = f"result {number // 5 + random.randrange(NAMES)}"
        return name, content_of(name), Key("compile", name, (("source", name),))

    def write(self, number):
        name, content, key = self._key(number)
        store = DirectoryStore.open(self._cache)
        with store.making(key) as mine:
            assert mine
            if store.get(key, verify=True) is None:
                digest = store.put_blob(content)
                store.put(key, {"name": name}, blobs=[digest])
                with self._log.open("a") as log:
                    log.write(f"{name}\n")
            assert store.read_blob(digest_of(content)) == content
        if number % 10 == 0:
            collect(self._cache, days=1)

    def read(self, number):
        name, content, key = self._key(number)
        store = DirectoryStore.open(self._cache)
        if (found := store.get(key)) is not None:
            assert found == {"name": name}
            assert store.read_blob(digest_of(content)) == content

    def left(self):
        made = self._log.read_text().splitlines()
        twice = {name for name in made if made.count(name) > 1}
        temporary = (DirectoryStore.open(self._cache).root / "v1" / "temp").iterdir()
        return [*map(str, temporary), *(f"made twice: {name}" for name in sorted(twice))]


class CompiledHere(Cache):
    """Programs that this machine compiled: more than the cache may hold, so that it drops old ones."""

    def write(self, number):
        os.environ["PREJIT_COMPILE_CACHE_BYTES"] = "20000"
        name = f"program {number // 20 + random.randrange(NAMES)}"
        key = PortableKey(digest_of(name.encode()), ("cpu",), "cpu", None)
        found, _ = compiled_here(key, Fingerprint.current(), lambda: content_of(name))
        assert found == content_of(name)

    read = write


class ReceiptsOfFiles(Cache):
    def __init__(self, directory):
        super().__init__(directory)
        self._files = directory / "files"

    def prepare(self):
        self._files.mkdir(parents=True)
        for number in range(NAMES):
            (self._files / str(number)).write_bytes(content_of(f"file {number}"))
        time.sleep(SETTLED_SECONDS + 0.1)  # what has just changed gets no receipt

    def write(self, number):
        receipts = Receipts(self._files)
        for name in random.sample(range(NAMES), 3):
            expected = digest_of(content_of(f"file {name}"))
            assert receipts.digest_of(self._files / str(name)) == expected
        receipts.save()
        remember_first_programs("sha256:0", [f"p{number}"] * 100)

    def read(self, number):
        names = first_programs("sha256:0")
        assert len(set(names)) <= 1
        assert len(names) in (0, 100)
        for path in self._cache.glob("receipts/v1/*.json"):
            assert json.loads(path.read_bytes()), "a receipt that counts for nothing"

    def left(self):
        for path in self._files.iterdir():  # whose receipts end
            path.touch()
            os.utime(path, (0, 0))
        time.sleep(SETTLED_SECONDS + 0.1)
        receipts = Receipts(self._files)
        for path in self._files.iterdir():
            receipts.digest_of(path)
        receipts.save()
        self.write(0)
        return _names(self._directory)


class ChannelStates(Cache):
    """What was accepted of a channel last: it never goes back."""

    def __init__(self, directory):
        from prejit.runtime.trust.channel_following import ChannelState  # needs cryptography

        super().__init__(directory)
        os.environ["XDG_STATE_HOME"] = str(directory / "state")
        self._key = directory / "key.pem"
        self._state = ChannelState("/etc/trust.toml", "stable")
        self._newest = 0

    def prepare(self):
        from tests.signers import signer

        super().prepare()
        self._key.write_text(signer("channel").public.pem)

    def write(self, number):
        from prejit.runtime.trust.channel import Accepted, KeySet
        from prejit.runtime.trust.public_keys import read_key

        os.umask(0o002)
        with self._state.locked():
            kept = self._state.read()
            if kept is None:
                kept = Accepted(KeySet(0, (read_key(self._key.read_bytes(), "key"),), 1))
            assert kept.version >= self._newest
            self._newest = kept.version + 1
            digest = digest_of(str(self._newest).encode())
            self._state.write(kept._replace(version=self._newest, release_digest=digest))

    def read(self, number):
        if (kept := self._state.read()) is not None:
            assert kept.version >= self._newest, "an older release came back"
            assert kept.release_digest == digest_of(str(kept.version).encode())
            self._newest = kept.version

    def left(self):
        self.write(0)
        return _names(self._directory)


class BundleDirectory(Cache):
    """A bundle that builds replace and to which signatures are attached, and the files unpacked from it."""

    def __init__(self, directory):
        super().__init__(directory)
        self._bundle = directory / "bundle"
        self._unpacked = self._cache / "recorded" / "v1"

    def prepare(self):
        super().prepare()
        self._write_bundle(0)

    def _write_bundle(self, version):
        files = {file.entry.file: file for file in self._files(version)}
        here = Fingerprint.current()
        needs = Requirement("cpu", here.architecture, here.cpu_features, here.jaxlib)
        target = RecordedTarget(needs, {"jax": "1"}, files)
        write_layout(self._bundle, *assemble("race", [packed(target, "race")]))

    def _files(self, version):
        for number in range(3):
            name = f"jit_{version}_{number}"
            raw = content_of(name)
            frame = zstandard.ZstdCompressor(write_checksum=True).compress(raw)
            segment = Segment(0, len(frame), digest_of(frame), len(raw), digest_of(raw))
            file = f"{name}-{hashlib.sha256(name.encode()).hexdigest()}-cache"
            yield RecordedFile(RecordedProgram(name, file, segment, {}, {}), frame)

    def write(self, number):
        if number % 3 == 0:
            self._write_bundle(random.randrange(NAMES))
        elif number % 3 == 1:
            with contextlib.suppress(UsageError):  # it was replaced meanwhile
                attach_note(self._bundle, random.randrange(3))
        else:
            for directory in self._unpacked.glob("[0-9a-f]*"):
                with contextlib.suppress(FileNotFoundError):
                    if random.random() < 0.2:
                        os.utime(directory, (0, time.time() - 31 * 86400))
            open_recorded(self._bundle)

    def read(self, number):
        def check(layout, root):
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

    def left(self):
        for directory in self._unpacked.glob("[0-9a-f]*"):
            os.utime(directory, (0, 0))
        self._write_bundle(NAMES)  # a new one, which has to be unpacked
        open_recorded(self._bundle)
        cache = sorted(self._unpacked.iterdir())
        files = sorted((self._bundle / "blobs" / "sha256").iterdir())
        needed = 4  # index, manifest, config and a layer: nothing is attached to the new one
        return [
            *_names(self._bundle),
            *(f"in the cache: {path.name}" for path in cache[1:]),
            *(f"in the bundle: {path.name}" for path in files[needed:]),
        ]


def attach_note(bundle, number):
    subject = read_whole(bundle, lambda layout, root: root.subject)
    assert subject is not None
    attach(bundle, subject, "text/plain", [Part("text/plain", str(number).encode())], {})


CACHES = {
    "the build cache": BuildCache,
    "programs compiled here": CompiledHere,
    "receipts": ReceiptsOfFiles,
    "the state of a channel": ChannelStates,
    "a bundle's directory": BundleDirectory,
}


def run_lap(name, directory, slot, rounds, *, writes):
    """Do the rounds that are left. A successor of a killed process goes on where that one was killed."""
    random.seed()
    cache = CACHES[name](directory)
    act = cache.write if writes else cache.read
    counters_file, errors_file = (directory.with_name(name) for name in ("counters", "errors"))
    with open(counters_file, "r+b") as file, mmap.mmap(file.fileno(), 0) as counters:
        done = memoryview(counters).cast("q")
        while done[slot] < rounds:
            try:
                act(done[slot])
            except Exception:
                with open(errors_file, "a") as errors:
                    errors.write(json.dumps(traceback.format_exc()) + "\n")
            done[slot] += 1
        done.release()


def race(name, directory, *, rounds, writers, seed):
    """Let processes write and read one cache, and kill writers at random moments."""
    pick = random.Random(seed)
    at = directory / "cache"
    cache = CACHES[name](at)
    cache.prepare()
    counters, errors = directory / "counters", directory / "errors"
    counters.write_bytes(bytes(8 * 2 * writers))
    errors.touch()

    def start(slot):
        lap = partial(run_lap, writes=slot < writers)
        return processes.start(lap, name, at, slot, rounds, daemon=True)

    def done(slot):
        return int.from_bytes(counters.read_bytes()[8 * slot : 8 * slot + 8], sys.byteorder)

    started, kills = time.monotonic(), 0
    running, begun = [start(slot) for slot in range(2 * writers)], [0] * writers
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
            running[slot] = start(slot)
    seconds = time.monotonic() - started
    ended = [process.exitcode for process in running]
    assert not any(ended), f"processes ended with {ended}"
    found = [json.loads(line) for line in errors.read_text().splitlines()]
    left = cache.left()
    return [*found, *left], {
        **{"writers": writers, "readers": writers, "rounds of each": rounds},
        **{"writers killed": kills, "wrong reads and false rejections": len(found)},
        **{"left over": len(left), "seconds": round(seconds)},
    }


def load_often(given):
    """Load bundles until each was replaced in each way, call their programs, and print what they gave."""
    paths, least, right, cache, counts_file = given
    counts = {}
    errors = []
    for number, path in enumerate(itertools.cycle(paths)):
        is_enough = number >= least and counts_file.exists()
        if is_enough and all(json.loads(counts_file.read_text()).values()):
            break
        try:
            found = faults.value_of(path, cache)
            assert found in right, f"{path}: {found}"
            counts[str(found)] = counts.get(str(found), 0) + 1
        except Exception:
            errors.append(traceback.format_exc())
    print(json.dumps({"counts": counts, "errors": errors}))
    return 0


def replace_often(given):
    """Replace bundles in each of the ways of `WAYS`, in turn, for ever."""
    sources, direct, turned, counts_file = given
    counts = dict.fromkeys((way.__name__ for way in WAYS), 0)
    for number, source in enumerate(itertools.cycle(sources)):
        way = WAYS[number // len(sources) % len(WAYS)]
        way(source, turned if way is link else direct, number)
        counts[way.__name__] += 1
        at = counts_file.with_name("counts.new")
        at.write_text(json.dumps(counts))
        at.replace(counts_file)
    return 0


def rebuild(source, path, number):
    write_layout(path, index_file(source).read_bytes(), blobs_of(source))


def annotate(source, path, number):
    attach_note(path, number % 5)


def exchange(source, path, number):
    new = path.with_name(f"{path.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    shutil.copytree(source, new)
    call = ctypes.CDLL(None, use_errno=True).renameat2
    at_cwd = -100
    if call(at_cwd, os.fsencode(new), at_cwd, os.fsencode(path), 2):  # RENAME_EXCHANGE
        raise OSError(ctypes.get_errno(), "renameat2")
    shutil.rmtree(new)


def pull(source, path, number):
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


def link(source, path, number):
    copy = path.with_name(f"{path.name}.{number}")
    shutil.copytree(source, copy)
    before = os.readlink(path) if path.is_symlink() else None
    new = path.with_name(f"{path.name}.link")
    new.unlink(missing_ok=True)
    new.symlink_to(copy)
    new.replace(path)
    if before is not None:
        shutil.rmtree(before)


WAYS = (rebuild, annotate, exchange, pull, link)  # how a bundle is replaced
