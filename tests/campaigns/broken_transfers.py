"""Break transfers of a small bundle at random, and look at what they left; then let each go on unbroken."""

import json
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tests.fake_registry import FakeRegistry, referrers_index
from tests.layouts import copy_with_layers

from prejit.runtime.format.layout import Layout
from prejit.runtime.format.root import read_root
from prejit.runtime.ship.reference import parse_reference
from prejit.runtime.ship.shipping import ship

from . import broken_answers, processes
from .transfer_processes import (
    ARRIVE,
    COPY,
    DIRECTORY,
    HTTP,
    INTO_REGISTRY,
    INTO_STORE,
    PULL,
    PUSH,
    PUSH_TAR,
    TAR,
    Job,
    transfer,
)

WEIGHTS_BYTES = 300_000
ANSWER_SECONDS, CLEAN_ANSWER_SECONDS = 0.3, 10.0
"""Time limits of an answer, while something breaks and when nothing does."""
LIMIT_SECONDS = 30.0  # longest time of a process. One that takes longer hangs
USER = "me:secret"
WAYS = {PULL: 30, ARRIVE: 10, HTTP: 10, DIRECTORY: 8, TAR: 7, PUSH: 20, PUSH_TAR: 8, COPY: 7}
"""All ways, and how many of 100 cases each gets."""

# ---------------------------------------------------------------------- the bundle


@dataclass(frozen=True)
class Version:
    """A version of the bundle: its directory and tar, the bundle's digest, and its blobs."""

    path: Path
    tar: Path
    digest: str
    blobs: Mapping[str, bytes]


def make_version(golden, path, seed):
    """Make a version of the bundle from a golden one. All have the same weights and other programs."""
    from prejit.compiler.pipeline.layout_writing import Part, attach
    from prejit.runtime.format.names import (
        EXECUTABLES_MEDIA_TYPE,
        PARTS_MEDIA_TYPE,
        WEIGHTS_MEDIA_TYPE,
    )

    layers = {
        WEIGHTS_MEDIA_TYPE: random.Random(0).randbytes(WEIGHTS_BYTES),
        EXECUTABLES_MEDIA_TYPE: random.Random(seed).randbytes(20_000),
    }
    copy_with_layers(golden, path, layers)
    with Layout(path) as layout:
        root = read_root(layout)
    assert root.subject is not None
    parts = Part(PARTS_MEDIA_TYPE, b'{"bomFormat":"CycloneDX"}')
    attach(path, root.subject, PARTS_MEDIA_TYPE, [parts], {})
    tar = path.with_suffix(".tar")
    ship(parse_reference(str(path)), parse_reference(str(tar)))
    files = (path / "blobs" / "sha256").iterdir()
    return Version(
        path, tar, root.digest, {f"sha256:{each.name}": each.read_bytes() for each in files}
    )


# ---------------------------------------------------------------------- faults

KILLED, STOPPED, FULL, LIMITED = "kill -9", "ctrl-C", "a full disk", "a limit of file sizes"
MOVED_TAG, UNLISTED = "a tag that moves", "an index that lists what is not there"
REFERRERS, ABROAD, ASKED_ABROAD = "lying referrers", "a redirect abroad", "a login asked for abroad"
LOOP, STORM, LOST, UPLOADS = (
    "a redirect loop",
    "a storm of 429 and 5xx",
    "a lost blob",
    "absurd uploads",
)
EVERYWHERE = (*broken_answers.OF_CONTENT, *broken_answers.OF_ANY, KILLED, STOPPED, STORM, LOOP)
OF_DISKS = (FULL, LIMITED)
FAULTS = {
    PULL: (*EVERYWHERE, *OF_DISKS, MOVED_TAG, UNLISTED, REFERRERS, ABROAD, ASKED_ABROAD),
    ARRIVE: (*EVERYWHERE, *OF_DISKS, MOVED_TAG, UNLISTED, ABROAD),
    HTTP: (*EVERYWHERE, *OF_DISKS, MOVED_TAG, ABROAD),
    DIRECTORY: (*EVERYWHERE, *OF_DISKS, MOVED_TAG, UNLISTED, REFERRERS, ABROAD),
    TAR: (*EVERYWHERE, *OF_DISKS, MOVED_TAG, ABROAD),
    PUSH: (*broken_answers.OF_ANY, KILLED, STOPPED, STORM, LOOP, LOST, UPLOADS, REFERRERS, ABROAD),
    PUSH_TAR: (*broken_answers.OF_ANY, KILLED, STOPPED, STORM, LOOP, LOST, UPLOADS, ABROAD),
    COPY: (*EVERYWHERE, LOST, UPLOADS, REFERRERS),
}
"""The faults of each way."""


@dataclass
class Place:
    """The servers of a worker, and its directory."""

    registry: FakeRegistry
    abroad: FakeRegistry
    scratch: Path
    env: Mapping[str, str]
    can_mount: bool


@dataclass
class Breaking:
    """Breaks requests to a repository: `FakeRegistry.fault`, while it is on."""

    name: str
    methods: tuple[str, ...]
    part: str
    first: int
    times: int
    make: Callable[[str, str], Any]
    happened: int = 0
    _seen: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, method, path):
        if self.name not in path or method not in self.methods or self.part not in path:
            return None
        with self._lock:
            number, self._seen = self._seen, self._seen + 1
            if not self.first <= number < self.first + self.times:
                return None
            self.happened += 1
        return self.make(method, path)


@dataclass
class Case:
    """A transfer that breaks, then goes on."""

    number: int
    way: str
    fault: str
    versions: tuple[Version, Version]
    place: Place
    rng: random.Random = field(init=False)
    name: str = field(init=False)
    at: Path = field(init=False)
    pids: list[int] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    broken: int = 0
    wanted: Version = field(init=False)
    _is_clean: bool = True
    _gone: tuple[tuple[str, str], bytes, bytes | None] | None = None

    def __post_init__(self):
        self.rng = random.Random(self.number)
        self.name = f"case{self.number}x"
        self.at = self.place.scratch / self.name
        self.wanted = self.versions[0]

    # -------------------------------------------------------------- what is there before

    def prepare(self):
        """Make the directory, and put both versions where they are pulled from."""
        (self.at / "disk").mkdir(parents=True)
        if self.way in INTO_REGISTRY:
            if self.way == COPY:
                self._hold(self.versions[0], f"{self.name}/from", "v1")
            elif self.rng.random() < 0.3:  # an older one is there
                self._hold(self.versions[1], self.name, "v0")
            return
        for version, tag in zip(self.versions, ("v1", "v2"), strict=True):
            self._hold(version, self.name, tag)
        if (
            self.fault != FULL and self.rng.random() < 0.2 and self.way in INTO_STORE
        ):  # an older one is there
            [end] = self.attempt(1, source=self.source("v2"))
            assert not end, end

    def _hold(self, version, name, tag):
        """Put a version into the registry, the other host and the web server."""
        for held in (self.place.registry, self.place.abroad):
            for digest, content in version.blobs.items():
                plain = json.loads(content) if content[:1] == b"{" else {}
                if "schemaVersion" in plain:
                    held.manifests[name, digest] = content
                held.blobs[name, digest] = content
                held.files[f"/{name}/blobs/sha256/{digest[7:]}"] = content
            held.manifests[name, tag] = version.blobs[version.digest]
            if not held.has_referrers:
                fallback = version.digest.replace(":", "-")
                held.manifests[name, fallback] = referrers_index(held, name, version.digest)
            held.files[f"/{name}/tags/{tag}.json"] = (version.path / "index.json").read_bytes()

    def _move_tag(self):
        held = self.place.registry
        held.manifests[self.name, "v1"] = held.manifests[self.name, "v2"]
        held.files[f"/{self.name}/tags/v1.json"] = held.files[f"/{self.name}/tags/v2.json"]
        self.wanted = self.versions[1]

    def source(self, tag="v1"):
        host = self.place.registry.host
        if self.way in (PUSH, PUSH_TAR):
            return str(self.versions[0].path if self.way == PUSH else self.versions[0].tar)
        scheme = "http" if self.way == HTTP else "oci"
        return f"{scheme}://{host}/{self.name}{'/from' if self.way == COPY else ''}:{tag}"

    @property
    def target(self):
        """The place to which a pull writes."""
        return self.at / (
            "out.tar" if self.way == TAR else "disk/store" if self.way in INTO_STORE else "out"
        )

    # -------------------------------------------------------------- attempts

    def attempt(self, count, *, source="", file_bytes=0, after=None):
        """Transfer in some processes at once. Return how each ended: empty, or the class of its error."""
        into = f"oci://{self.place.registry.host}/{self.name}:v1"
        outcomes = [self.at / f"outcome{number}" for number in range(count)]
        started = []
        self.pids.clear()
        for outcome in outcomes:
            outcome.unlink(missing_ok=True)
            target = into if self.way in INTO_REGISTRY else str(self.target)
            env = {**self.place.env, "PREJIT_RUNTIME_CACHE": str(self.at / "cache")}
            answer = CLEAN_ANSWER_SECONDS if self._is_clean else ANSWER_SECONDS
            job = Job(self.way, source or self.source(), target, outcome, env, answer, file_bytes)
            started.append(processes.start(transfer, job))
            self.pids.append(started[-1].pid or 0)
        if after is not None:
            time.sleep(after[1])
            self.signal(after[0])
        end = time.monotonic() + LIMIT_SECONDS
        found = []
        for process, outcome in zip(started, outcomes, strict=True):
            wait([process.sentinel], max(0.0, end - time.monotonic()))
            with processes.one_reader:
                hangs = process.exitcode is None
                if hangs:
                    process.kill()
                process.join()
            found.append("a hang" if hangs else self._end(outcome))
        time.sleep(0.01)
        # Answers to the dead end, too, so that nothing moves any more.
        while self.place.registry.connections and time.monotonic() < end:
            time.sleep(0.005)
        return found

    def signal(self, number):
        """Send a signal to the processes of the attempt."""
        for pid in self.pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def _end(self, outcome):
        try:
            end = json.loads(outcome.read_text())
        except (FileNotFoundError, ValueError):
            return "killed"
        return str(
            end["error"] if end["is_ours"] else f"a traceback: {end['error']}: {end['text']}"
        )

    def break_it(self):
        """Do one or two attempts that break."""
        for _ in range(self.rng.choice((1, 1, 2))):
            breaking, after, file_bytes = self._breaking(), None, 0
            if self.fault in (KILLED, STOPPED) and self.rng.random() < 0.5:
                breaking.times = 0
                number = signal.SIGKILL if self.fault == KILLED else signal.SIGINT
                after = (number, self.rng.uniform(0.0, 0.15))
            if self.fault == LIMITED:
                file_bytes = self.rng.randrange(WEIGHTS_BYTES)
            self.place.registry.fault, self._is_clean = breaking, False
            count = self.rng.choice((1, 1, 1, 2, 3))
            try:
                self.ends += self.attempt(count, file_bytes=file_bytes, after=after)
            finally:
                self.place.registry.fault, self._is_clean = lambda method, path: None, True
                self.broken += breaking.happened
            self._restore()

    def _breaking(self):
        """Return what breaks requests of the next attempt."""
        rng, fault = self.rng, self.fault
        first, times = rng.choice((0, 0, 1, 2, 5)), rng.choice((1, 2, 4, 4, 10**6, 10**6))
        part = rng.choice(("", "/blobs/", "/blobs/", "/manifests/", "/referrers/"))
        if self.way == HTTP:
            part = rng.choice(("", "/blobs/", "/blobs/", "/tags/"))
        methods = ("GET",)
        if self.way in INTO_REGISTRY:
            methods = rng.choice((("PUT",), ("POST",), ("HEAD",), ("GET", "HEAD", "POST", "PUT")))
            part = ""
        make = self._answers(fault)
        if fault == UPLOADS:
            methods, part = ("POST",), "/uploads/"
        if fault == LOST:
            methods, part = ("PUT",), "/uploads/"
        if fault == REFERRERS:
            part = "/referrers/"
        if fault == STORM:
            first, times, part = 0, 10**6, ""
        if fault in (KILLED, STOPPED):
            first, times = rng.randrange(12), 1
        if fault in (FULL, LIMITED, UNLISTED):
            times = 0
        return Breaking(self.name, methods, part, first, times, make)

    def _answers(self, fault):
        rng, place = self.rng, self.place
        if fault in (KILLED, STOPPED):
            return lambda method, path: self._kill_within
        if fault == MOVED_TAG:
            return lambda method, path: self._move_tag()
        if fault == REFERRERS:
            lie = broken_answers.lying_referrers(rng)
            return lambda method, path: lie
        if fault == ABROAD:
            return lambda method, path: (307, {"location": f"http://{_foreign(place)}{path}"})
        if fault == ASKED_ABROAD:
            return lambda method, path: (307, {"location": f"http://{_foreign(place)}/deny{path}"})
        if fault == LOOP:
            return lambda method, path: (307, {"location": path})
        if fault == LOST:
            return lambda method, path: 201
        if fault == UPLOADS:
            return lambda method, path: (
                202,
                {"location": rng.choice(broken_answers.ABSURD_PLACES)},
            )
        if fault == STORM:
            share = rng.uniform(0.1, 0.9)
            return lambda method, path: broken_answers.busy(rng) if rng.random() < share else None
        if fault in (FULL, LIMITED, UNLISTED):
            return lambda method, path: None
        answer = (broken_answers.OF_CONTENT | broken_answers.OF_ANY)[fault](rng)
        return lambda method, path: answer

    def _kill_within(self, handler, content, start):
        """Send a part of an answer, then the signal."""
        part = (content or b"")[start:]
        status = 404 if content is None else 206 if start else 200
        sent = part[: int(len(part) * self.rng.random())]
        broken_answers.send(handler, sent, status, length=len(part))
        handler.wfile.flush()
        time.sleep(self.rng.choice((0.0, 0.005)))
        self.signal(signal.SIGKILL if self.fault == KILLED else signal.SIGINT)

    # -------------------------------------------------------------- disks and missing blobs

    @contextmanager
    def disk(self):
        """Let the target be on a small disk, or take a blob from the registry, until `_restore`."""
        path = self.at / "disk"
        if self.fault == UNLISTED:
            held = self.place.registry
            near = [key for key in sorted(held.blobs) if key[0] == self.name]
            gone = self.rng.choice(near)
            self._gone = (gone, held.blobs.pop(gone), held.manifests.pop(gone, None))
        is_small = self.fault == FULL and self.place.can_mount and self.way in INTO_STORE
        if not is_small:
            yield
            return
        size = self.rng.randrange(4096, WEIGHTS_BYTES + 60_000)
        inodes = self.rng.choice((0, 0, self.rng.randrange(4, 20)))
        self._mount("tmpfs", "-t", "tmpfs", "-o", f"size={size},nr_inodes={inodes},mode=777")
        try:
            yield
        finally:
            subprocess.run(["umount", "--lazy", str(path)], check=True)

    def _mount(self, *words):
        device, *options = words
        subprocess.run(["mount", *options, device, str(self.at / "disk")], check=True)

    def _restore(self):
        """Give the disk room and the registry its blob again."""
        if self.fault == FULL and self.place.can_mount and self.way in INTO_STORE:
            self._mount("tmpfs", "-o", "remount,size=16m,nr_inodes=0")
        if self.fault == UNLISTED and self._gone is not None:
            key, content, manifest = self._gone
            self.place.registry.blobs[key] = content
            if manifest is not None:
                self.place.registry.manifests[key] = manifest
            self._gone = None


def _foreign(place):
    return place.abroad.host.replace("127.0.0.1", "localhost")
