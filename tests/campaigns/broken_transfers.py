"""Break transfers of a small bundle at random, and look at what they left; then let each go on unbroken."""

import json
import os
import random
import signal
import subprocess
import threading
import time
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from types import SimpleNamespace

from tests.fake_registry import referrers_index
from tests.layouts import copy_with_layers

from prejit.runtime.format.layout import Layout
from prejit.runtime.format.root import read_root
from prejit.runtime.ship.reference import parse_reference
from prejit.runtime.ship.shipping import ship

from . import broken_answers, processes
from . import transfer_processes as ways

WEIGHTS_BYTES = 300_000
ANSWER_SECONDS, CLEAN_ANSWER_SECONDS = 0.3, 10.0
"""Time limits of an answer, while something breaks and when nothing does."""
LIMIT_SECONDS = 30.0  # longest time of a process. One that takes longer hangs
USER = "me:secret"
WAYS = {
    **{ways.PULL: 30, ways.ARRIVE: 10, ways.HTTP: 10, ways.DIRECTORY: 8, ways.TAR: 7},
    **{ways.PUSH: 20, ways.PUSH_TAR: 8, ways.COPY: 7},
}


def make_version(golden, path, seed):
    """Make a version of the bundle from a golden one. All have the same weights and other programs."""
    from prejit.compiler.pipeline.pack.bundle_writing import Part, attach
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
    blobs = {f"sha256:{each.name}": each.read_bytes() for each in files}
    return SimpleNamespace(path=path, tar=tar, digest=root.digest, blobs=blobs)


KILLED, STOPPED, FULL, LIMITED = "kill -9", "ctrl-C", "a full disk", "a limit of file sizes"
MOVED_TAG, UNLISTED = "a tag that moves", "an index that lists what is not there"
REFERRERS, ABROAD, ASKED_ABROAD = "lying referrers", "a redirect abroad", "a login asked for abroad"
LOOP, STORM, LOST = "a redirect loop", "a storm of 429 and 5xx", "a lost blob"
UPLOADS = "absurd uploads"
ANYWHERE = (*broken_answers.OF_ANY, KILLED, STOPPED, STORM, LOOP)
IN_PULLS = (*broken_answers.OF_CONTENT, *ANYWHERE, FULL, LIMITED, MOVED_TAG, ABROAD)
IN_PUSHES = (*ANYWHERE, LOST, UPLOADS)
FAULTS = {
    ways.PULL: (*IN_PULLS, UNLISTED, REFERRERS, ASKED_ABROAD),
    ways.ARRIVE: (*IN_PULLS, UNLISTED),
    ways.HTTP: IN_PULLS,
    ways.DIRECTORY: (*IN_PULLS, UNLISTED, REFERRERS),
    ways.TAR: IN_PULLS,
    ways.PUSH: (*IN_PUSHES, REFERRERS, ABROAD),
    ways.PUSH_TAR: (*IN_PUSHES, ABROAD),
    ways.COPY: (*IN_PUSHES, *broken_answers.OF_CONTENT, REFERRERS),
}


class Breaking:
    """Breaks some requests to a repository: `make` gives what happens instead; None: nothing."""

    def __init__(self, name, methods, part, first, times, make):
        self.name, self.methods, self.part = name, methods, part
        self.first, self.times, self.make = first, times, make
        self.happened = self._seen = 0
        self._lock = threading.Lock()

    def __call__(self, method, path):
        if self.name not in path or method not in self.methods or self.part not in path:
            return None
        with self._lock:
            number, self._seen = self._seen, self._seen + 1
            if not self.first <= number < self.first + self.times:
                return None
            self.happened += 1
        return self.make(method, path)


class Case:
    """A transfer that breaks, then goes on."""

    def __init__(self, number, way, fault, versions, place):
        self.way, self.fault, self.versions, self.place = way, fault, versions, place
        self.rng = random.Random(number)
        self.name = f"case{number}x"
        self.at = place.scratch / self.name
        self.wanted = versions[0]
        self.pids, self.ends, self.broken = [], [], 0
        self._is_clean, self._gone = True, None
        is_full = fault == FULL and way in ways.INTO_STORE
        self._has_small_disk = is_full and place.can_mount

    def prepare(self):
        """Make the directory, and put both versions where they are pulled from."""
        (self.at / "disk").mkdir(parents=True)
        if self.way in ways.INTO_REGISTRY:
            if self.way == ways.COPY:
                self._hold(self.versions[0], f"{self.name}/from", "v1")
            elif self.rng.random() < 0.3:  # an older one is there
                self._hold(self.versions[1], self.name, "v0")
            return
        for version, tag in zip(self.versions, ("v1", "v2"), strict=True):
            self._hold(version, self.name, tag)
        has_older = self.fault != FULL and self.rng.random() < 0.2
        if has_older and self.way in ways.INTO_STORE:
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
        if self.way in (ways.PUSH, ways.PUSH_TAR):
            return str(self.versions[0].path if self.way == ways.PUSH else self.versions[0].tar)
        scheme = "http" if self.way == ways.HTTP else "oci"
        return f"{scheme}://{host}/{self.name}{'/from' if self.way == ways.COPY else ''}:{tag}"

    @property
    def target(self):
        if self.way in ways.INTO_STORE:
            return self.at / "disk" / "store"
        return self.at / ("out.tar" if self.way == ways.TAR else "out")

    def attempt(self, count, *, source="", file_bytes=0, after=None):
        """Transfer in some processes, signalled `after` some seconds. Return how each ended: empty or why."""
        into = f"oci://{self.place.registry.host}/{self.name}:v1"
        outcomes = [self.at / f"outcome{number}" for number in range(count)]
        started = []
        self.pids.clear()
        for outcome in outcomes:
            outcome.unlink(missing_ok=True)
            target = into if self.way in ways.INTO_REGISTRY else str(self.target)
            env = {**self.place.env, "PREJIT_RUNTIME_CACHE": str(self.at / "cache")}
            answer = CLEAN_ANSWER_SECONDS if self._is_clean else ANSWER_SECONDS
            job = (self.way, source or self.source(), target, outcome, env, answer, file_bytes)
            started.append(processes.start(ways.transfer, *job))
            self.pids.append(started[-1].pid or 0)
        if after is not None:
            time.sleep(after)
            self.signal()
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

    def signal(self):
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if self.fault == KILLED else signal.SIGINT)

    def _end(self, outcome):
        try:
            end = json.loads(outcome.read_text())
        except (FileNotFoundError, ValueError):
            return "killed"
        return end["error"] if end["is_ours"] else f"a traceback: {end['error']}: {end['text']}"

    def break_it(self):
        for _ in range(self.rng.choice((1, 1, 2))):
            breaking, after, file_bytes = self._breaking(), None, 0
            if self.fault in (KILLED, STOPPED) and self.rng.random() < 0.5:
                breaking.times = 0
                after = self.rng.uniform(0.0, 0.15)
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
        rng, fault = self.rng, self.fault
        first, times = rng.choice((0, 0, 1, 2, 5)), rng.choice((1, 2, 4, 4, 10**6, 10**6))
        part = rng.choice(("", "/blobs/", "/blobs/", "/manifests/", "/referrers/"))
        if self.way == ways.HTTP:
            part = rng.choice(("", "/blobs/", "/blobs/", "/tags/"))
        methods = ("GET",)
        if self.way in ways.INTO_REGISTRY:
            methods = rng.choice((("PUT",), ("POST",), ("HEAD",), ("GET", "HEAD", "POST", "PUT")))
            part = ""
        if fault == UPLOADS:
            methods, part = ("POST",), "/uploads/"
        elif fault == LOST:
            methods, part = ("PUT",), "/uploads/"
        elif fault == REFERRERS:
            part = "/referrers/"
        elif fault == STORM:
            first, times, part = 0, 10**6, ""
        elif fault in (KILLED, STOPPED):
            first, times = rng.randrange(12), 1
        elif fault in (FULL, LIMITED, UNLISTED):
            times = 0
        return Breaking(self.name, methods, part, first, times, self._answers(fault))

    def _answers(self, fault):
        rng = self.rng
        abroad = f"http://{self.place.abroad.host.replace('127.0.0.1', 'localhost')}"
        if fault == MOVED_TAG:
            return lambda method, path: self._move_tag()
        if fault in (ABROAD, ASKED_ABROAD, LOOP):
            prefix = {ABROAD: abroad, ASKED_ABROAD: f"{abroad}/deny", LOOP: ""}[fault]
            return lambda method, path: (307, {"location": f"{prefix}{path}"})
        if fault == UPLOADS:
            places = broken_answers.ABSURD_PLACES
            return lambda method, path: (202, {"location": rng.choice(places)})
        if fault == STORM:
            share = rng.uniform(0.1, 0.9)
            return lambda method, path: broken_answers.busy(rng) if rng.random() < share else None
        if fault in (KILLED, STOPPED):
            answer = self._kill_within
        elif fault in (FULL, LIMITED, UNLISTED):
            answer = None
        elif fault == LOST:
            answer = 201
        elif fault == REFERRERS:
            answer = broken_answers.lying_referrers(rng)
        else:
            answer = (broken_answers.OF_CONTENT | broken_answers.OF_ANY)[fault](rng)
        return lambda method, path: answer

    def _kill_within(self, handler, content, start):
        part = (content or b"")[start:]
        status = 404 if content is None else 206 if start else 200
        sent = part[: int(len(part) * self.rng.random())]
        broken_answers.send(handler, sent, status, length=len(part))
        handler.wfile.flush()
        time.sleep(self.rng.choice((0.0, 0.005)))
        self.signal()

    @contextmanager
    def disk(self):
        """Let the target be on a small disk, or take a blob from the registry, until `_restore`."""
        if self.fault == UNLISTED:
            held = self.place.registry
            gone = self.rng.choice([key for key in sorted(held.blobs) if key[0] == self.name])
            self._gone = (gone, held.blobs.pop(gone), held.manifests.pop(gone, None))
        if not self._has_small_disk:
            yield
            return
        size = self.rng.randrange(4096, WEIGHTS_BYTES + 60_000)
        inodes = self.rng.choice((0, 0, self.rng.randrange(4, 20)))
        self._mount("-t", "tmpfs", "-o", f"size={size},nr_inodes={inodes},mode=777")
        try:
            yield
        finally:
            subprocess.run(["umount", "--lazy", str(self.at / "disk")], check=True)

    def _mount(self, *options):
        subprocess.run(["mount", *options, "tmpfs", str(self.at / "disk")], check=True)

    def _restore(self):
        """Give the disk room and the registry its blob again."""
        if self._has_small_disk:
            self._mount("-t", "tmpfs", "-o", "remount,size=16m,nr_inodes=0")
        if self._gone is not None:
            key, content, manifest = self._gone
            self.place.registry.blobs[key] = content
            if manifest is not None:
                self.place.registry.manifests[key] = manifest
            self._gone = None
