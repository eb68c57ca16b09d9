"""Servers, honest clients and a Prometheus of a drill, and ways to break files, disks and versions."""

import contextlib
import json
import os
import shutil
import struct
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from tests.integration.test_serve import Process
from tests.prometheus_server import Prometheus
from tests.waiting import wait_for

from prejit.runtime.format.names import WEIGHTS_MEDIA_TYPE

from .campaign import setting
from .drill_records import keep
from .honest_clients import start

CLIENTS = 2
FETCH = "prejit copy SOURCE FRESH"


class Stage:
    """The servers, the clients and the Prometheus of one drill: `watch`, and its last `alert`."""

    def __init__(self, name, directory, source, answers):
        self._name, self.directory, self.source, self.answers = name, directory, source, answers
        self.bundle = Path(shutil.copytree(source, directory / "bundle", symlinks=True))
        self.admin = directory / "admin"
        self.watch = None
        self._alert, self._seconds = "", 0
        self._servers = []
        self._clients = []

    def serve(self, *arguments, **options):
        """Start a server; without arguments, of the bundle."""
        self._servers.append(Process(*(arguments or (self.bundle,)), **options))
        return self._servers[-1]

    def begin_watch(self, *, ready=True):
        """Start a Prometheus that scrapes the servers once they are ready, and has scraped all."""
        for each in self._servers if ready else ():
            each.wait_until_ready()
        ports = {each.port for each in self._servers}
        self.watch = Prometheus(self.directory / "watch", sorted(ports))
        up = len(ports)
        wait_for(lambda: self.watch.value("up") == up, what="Prometheus does not reach all")

    def load(self, server, count=CLIENTS):
        self._clients.append(start(server, count))
        return self._clients[-1]

    def alert(self, name, seconds=120):
        """Wait for an alert, which is that of the drill."""
        self._alert, self._seconds = name, self.watch.wait_for_alert(name, seconds)

    def follow(self, command, *, status=0, alert=None, **words):
        """Run a command of the alert's runbook, which ends with a status."""
        done = self.watch.follow(alert or self._alert, command, **words)
        assert done.returncode == status, done.stdout + done.stderr
        return done

    def fetched(self):
        """Return a sound copy of the bundle, as the alert's runbook gets it."""
        fresh = self.directory / "fresh"
        self.follow(FETCH, SOURCE=self.source, FRESH=fresh)
        return fresh

    def end_alert(self):
        self.watch.wait_for_end(self._alert)

    def check(self, *clients):
        """End clients that saw no failure and no wrong answer. Return the number of their requests."""
        for each in clients:
            each.end()
            assert not each.failures, each.failures[:5]
            assert each.texts <= self.answers
        return sum(each.requests for each in clients)

    def record(self, failure, clients, metric="", recovery=""):
        """Show what was broken, what clients saw, what moved and ended it; keep it if all drills run."""
        found = {"failure": failure, "clients": clients, "metric": metric, "alert": self._alert}
        found |= {"seconds": self._seconds, "recovery": recovery}
        print(found)
        if setting("DRILLS", 0):
            keep(self._name, found)

    def close(self):
        for clients in self._clients:
            clients.end()
        for server in self._servers:
            server.kill()
        if self.watch is not None:
            self.watch.close()


def weights_file(bundle):
    """Return the file of the weights of a bundle that has one target."""
    files = bundle / "blobs" / "sha256"
    [digest] = {
        str(layer["digest"]).removeprefix("sha256:")
        for file in files.iterdir()
        if file.read_bytes()[:1] == b"{"
        for layer in json.loads(file.read_bytes()).get("layers", ())
        if layer["mediaType"] == WEIGHTS_MEDIA_TYPE
    }
    return files / digest


def damage(file):
    """Change bytes of a file in place, as a broken disk or a careless copy does."""
    file.chmod(0o644)
    with file.open("r+b") as opened:
        size = file.stat().st_size
        for at in range(size // 8, size - 4, max(4, size // 512 // 4 * 4)):
            opened.seek(at)
            opened.write(struct.pack("<f", -2.0))


def another_jaxlib():
    """Return the version and the directory of a jaxlib that is not ours. Skip the test without one."""
    root = Path(os.environ.get("PREJIT_TEST_ENVIRONMENTS", "."))
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for found in sorted(root.glob(f"v1/*/lib/{python}/site-packages/jaxlib-*.dist-info")):
        other = found.name.removeprefix("jaxlib-").removesuffix(".dist-info")
        if other != version("jaxlib"):
            return other, found.parent
    pytest.skip("PREJIT_TEST_ENVIRONMENTS has no environment with another jaxlib")


@contextlib.contextmanager
def small_disk(at):
    """Mount a file system of 256 KB in a directory. Skip the test where that is not allowed."""
    at.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "drill", at], check=False)
    if done.returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        yield at
    finally:
        subprocess.run(["umount", "--lazy", at], check=True)
