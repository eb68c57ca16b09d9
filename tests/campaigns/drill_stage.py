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

from .honest_clients import start

CLIENTS = 2


class Stage:
    """The servers, the clients and the Prometheus of one drill."""

    def __init__(self, directory, source, answers):
        self.directory, self.source, self.answers = directory, source, answers
        self.bundle = Path(shutil.copytree(source, directory / "bundle", symlinks=True))
        self._servers = []
        self._clients = []
        self._ends = contextlib.ExitStack()

    def serve(self, *arguments, **options):
        """Start a server; without arguments, of the bundle."""
        self._servers.append(Process(*(arguments or (self.bundle,)), **options))
        return self._servers[-1]

    def watch(self):
        """Start a Prometheus that scrapes the servers, and wait until it has scraped all of them."""
        ports = {each.port for each in self._servers}
        found = Prometheus(self.directory / "watch", sorted(ports))
        self._ends.callback(found.close)
        wait_for(lambda: found.value("up") == len(ports), what="Prometheus does not reach all")
        return found

    def load(self, server, count=CLIENTS):
        """Let honest clients use a server."""
        self._clients.append(start(server, count))
        return self._clients[-1]

    def check(self, *clients, answers=None):
        """End clients that saw no failure and no wrong answer. Return the number of their requests."""
        for each in clients:
            each.end()
            assert not each.failures, each.failures[:5]
            assert each.texts <= (self.answers if answers is None else answers)
        return sum(each.requests for each in clients)

    def close(self):
        for clients in self._clients:
            clients.end()
        for server in self._servers:
            server.kill()
        self._ends.close()


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
