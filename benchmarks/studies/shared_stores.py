"""Build on two machines that share a store, in each kind of store, and break each of them in the middle.

    python -m benchmarks.studies.shared_stores            about 12 minutes on two cores

A machine is an empty directory for caches. The stores are those that are installed of nginx with WebDAV, moto
(S3; `pip install 'moto[s3,server]'` beside the compiler's packages, or in $MOTO), docker-registry and a
directory. For each: a first machine builds the demo's programs for one target; a second builds the same; the
server is killed in the middle of a first build, and back for the second; and a first build is killed itself.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.measure import progress
from benchmarks.harness.report import Table
from benchmarks.harness.results import begin, save, use_two_cores
from benchmarks.harness.workspace import RESULTS

MANIFEST = Path("manifests/demo.toml")
TARGET = "cpu-x86-64-v3"
_TRAFFIC = re.compile(r"(\d+) results read \(([\d.]+) MB\), (\d+) written \(([\d.]+) MB\)")


@dataclass(frozen=True)
class Built:
    """How a build went.

    Attributes:
        seconds: by the clock.
        compiled, cached: programs.
        digest: of the bundle.
        read, written: results that came from the store, and went there.
        read_mb, written_mb: their contents.
        notes: what it said about the store.
    """

    seconds: float
    compiled: int
    cached: int
    digest: str
    read: int = 0
    written: int = 0
    read_mb: float = 0.0
    written_mb: float = 0.0
    notes: tuple[str, ...] = ()


@dataclass
class Server:
    """A kind of store, and how to start it.

    Attributes:
        name: for people.
        url: for `--store`.
        command: starts its server; empty: it has none.
        ready: called once it answers.
        env: variables of builds that use it.
        env_server: variables of the server.
    """

    name: str
    url: str
    command: tuple[str, ...] = ()
    ready: Callable[[], object] = lambda: None
    env: Mapping[str, str] = field(default_factory=dict)
    env_server: Mapping[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        if not self.command:
            return
        self.process = subprocess.Popen(
            self.command,
            env={**os.environ, **self.env_server},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        host, port = re.search(r"([\d.]+):(\d+)", self.env.get("AWS_ENDPOINT", self.url)).groups()  # type: ignore[union-attr]
        end = time.monotonic() + 60
        while time.monotonic() < end:
            with socket.socket() as trial:
                if trial.connect_ex((host, int(port))) == 0:
                    break
            time.sleep(0.1)
        self.ready()

    def kill(self) -> None:
        """Kill the server."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


def servers(directory: Path) -> Iterator[Server]:
    """Yield the kinds of stores that this machine can run, with their files below a directory."""
    yield Server("a directory", str(directory / "shared"))
    if nginx := shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin"):
        port = _free_port()
        (directory / "www").mkdir()
        (directory / "nginx.conf").write_text(
            f"daemon off; pid {directory}/pid; error_log {directory}/error; user root; events {{}}\n"
            f"http {{ access_log off; client_max_body_size 0; client_body_temp_path {directory}/body;\n"
            f"server {{ listen 127.0.0.1:{port}; root {directory}/www;\n"
            "location / { dav_methods PUT DELETE; create_full_put_path on; } } }\n"
        )
        yield Server(
            "nginx, WebDAV",
            f"http://127.0.0.1:{port}/store",
            (nginx, "-p", str(directory), "-c", str(directory / "nginx.conf")),
        )
    if registry := shutil.which("docker-registry"):
        port = _free_port()
        (directory / "registry.yml").write_text(
            f"version: 0.1\nstorage: {{filesystem: {{rootdirectory: {directory}/registry}}}}\n"
            f"http: {{addr: '127.0.0.1:{port}'}}\n"
        )
        yield Server(
            "docker-registry",
            f"oci://127.0.0.1:{port}/team/store",
            (registry, "serve", str(directory / "registry.yml")),
        )
    env = {**os.environ, "PYTHONPATH": os.environ.get("MOTO", "")}
    has_moto = [sys.executable, "-c", "import moto.server"]
    if subprocess.run(has_moto, env=env, capture_output=True).returncode == 0:
        port = _free_port()
        endpoint = f"http://127.0.0.1:{port}"

        def make_bucket() -> None:
            urllib.request.urlopen(urllib.request.Request(f"{endpoint}/bucket", method="PUT"))

        yield Server(
            "S3 (moto; loses its files when killed)",
            "s3://bucket/store",
            (sys.executable, "-m", "moto.server", "-p", str(port)),
            make_bucket,
            {
                "AWS_ENDPOINT": endpoint,
                "AWS_ACCESS_KEY_ID": "x",
                "AWS_SECRET_ACCESS_KEY": "y",
                "AWS_REGION": "us-east-1",
            },
            {"PYTHONPATH": os.environ.get("MOTO", "")},
        )


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


class Machines:
    """Machines that share one store."""

    def __init__(self, server: Server, directory: Path) -> None:
        self._server = server
        self._directory = directory
        self._count = 0

    def start(self) -> subprocess.Popen[str]:
        """Start a build on a new machine."""
        self._count += 1
        home = self._directory / f"machine{self._count}"
        command = [sys.executable, "-m", "prejit.runtime", "build", str(MANIFEST), "--json"]
        command += [
            "--target",
            TARGET,
            "-o",
            str(home / "artifacts"),
            "--cache",
            str(home / "cache"),
        ]
        return subprocess.Popen(
            [*command, "--store", self._server.url],
            env={**os.environ, **self._server.env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self, build: subprocess.Popen[str], started: float) -> Built:
        """Wait for a build."""
        output, errors = build.communicate()
        seconds = time.perf_counter() - started
        if build.returncode:
            raise SystemExit(errors)
        (found,) = json.loads(output)
        lines = [
            line
            for line in errors.splitlines()
            if "this build goes on" in line or "not used" in line
        ]
        traffic = _TRAFFIC.search(errors)
        read, read_mb, written, written_mb = traffic.groups() if traffic else ("0", "0", "0", "0")
        return Built(
            seconds,
            found["compiled"],
            found["cached"],
            found["digest"],
            int(read),
            int(written),
            float(read_mb),
            float(written_mb),
            tuple(lines),
        )

    def build(self) -> Built:
        """Build on a new machine."""
        started = time.perf_counter()
        return self.finish(self.start(), started)

    def build_until(
        self, share: float, seconds: float, act: Callable[[Any], object]
    ) -> Built | None:
        """Build on a new machine, and do something after a share of the time of a build."""
        started = time.perf_counter()
        build = self.start()
        time.sleep(share * seconds)
        act(build)
        if build.poll() == -signal.SIGKILL:
            build.communicate()
            return None
        return self.finish(build, started)


def study(server: Server, root: Path, directory: Path) -> dict[str, Any]:
    """Return how the builds went that use one kind of store.

    Args:
        server: the store.
        root: directory of the files of all stores.
        directory: directory of the machines that use this one.
    """
    machines = Machines(server, directory)
    server.start()
    progress(f"{server.name}: first machine")
    first = machines.build()
    progress(f"{server.name}: second machine")
    second = machines.build()
    found: dict[str, Built | None] = {"first": first, "second": second}
    _empty(server, root)
    if server.command:
        progress(f"{server.name}: the server is killed during a build")
        found["server killed"] = machines.build_until(0.5, first.seconds, lambda _: server.kill())
        server.start()
        found["after that"] = machines.build()
        _empty(server, root)
    progress(f"{server.name}: a build is killed")
    machines.build_until(0.5, first.seconds, _kill)
    found["after a killed build"] = machines.build()
    server.kill()
    built = {name: each for name, each in found.items() if each is not None}
    digests = {each.digest for each in built.values()}
    if len(digests) != 1:
        raise SystemExit(f"{server.name}: the bundles differ: {digests}")
    return {name: vars(each) for name, each in built.items()}


def _kill(build: subprocess.Popen[str]) -> None:
    build.kill()
    build.wait()


def _empty(server: Server, directory: Path) -> None:
    """Empty the store."""
    server.kill()
    for name in ("shared", "www", "registry"):
        if (directory / name).exists():
            shutil.rmtree(directory / name)
            (directory / name).mkdir()
    server.start()


@contextmanager
def _scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="shared-stores-") as directory:
        os.chmod(directory, 0o755)  # nginx's workers read it
        yield Path(directory)


def main() -> None:
    """Measure every kind of store, and write the figures."""
    use_two_cores()
    facts = begin(1, manifest=str(MANIFEST), target=TARGET)
    found: dict[str, dict[str, Any]] = {}
    with _scratch() as root:
        for server in servers(root):
            with tempfile.TemporaryDirectory(dir=root) as directory:
                found[server.name] = study(server, root, Path(directory))
    rows = []
    for name, builds in found.items():
        for which, each in builds.items():
            rows.append(
                (
                    name,
                    which,
                    f"{each['seconds']:.1f}",
                    f"{each['compiled']}",
                    f"{each['read']} ({each['read_mb']:.1f} MB)",
                    f"{each['written']} ({each['written_mb']:.1f} MB)",
                )
            )
    head = ("store", "build", "seconds", "compiled", "read", "written")
    note = "All bundles of a store have one digest. `first` fills an empty store; every machine begins empty."
    page = f"# Machines that share a store\n\n{Table('Builds', head, rows, note).markdown()}"
    save(RESULTS, f"{facts['date'][:10]}-shared-stores", {**facts, "stores": found}, page)


if __name__ == "__main__":
    main()
