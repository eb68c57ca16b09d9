"""The kinds of shared stores that this machine can run, with servers that can be killed.

nginx and docker-registry are packages of Debian (nginx-light, docker-registry). moto, which answers as S3, is
used from the directory $MOTO: `pip install --target DIRECTORY 'moto[s3,server]'` (290 MB). Azurite, which
answers as Azure, is used from $AZURITE: `npm install --prefix DIRECTORY azurite` (190 MB), and s3rver,
another S3, from $S3RVER in the same way. No emulator of Google's storage in PyPI, npm or Debian takes files
by its XML API, which obstore speaks. It has the requests of S3, so moto answers as Google, too.
"""

from __future__ import annotations

import base64
import hmac
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from email.utils import formatdate
from pathlib import Path

import pytest
from tests.ports import free_port

_AZURITE_ACCOUNT = "devstoreaccount1"
_AZURITE_KEY = (  # the same in every Azurite
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
_REQUEST = re.compile(rb'"(?:GET|HEAD|PUT|POST|PATCH|DELETE) ')
"""A text that the log of every server has once for each request."""


@dataclass
class Server:
    name: str
    url: str
    files: Path | None
    log: Path | None = None
    command: tuple[str, ...] = ()
    ready: Callable[[], object] = lambda: None
    env: Mapping[str, str] = field(default_factory=dict)
    env_server: Mapping[str, str] = field(default_factory=dict)
    _process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        if self.log is None:
            return
        env = {**os.environ, **self.env_server}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command, env=env, stdout=log, stderr=log, start_new_session=True
            )
        found = re.search(r"([\d.]+):(\d+)", " ".join((*self.env.values(), self.url)))
        assert found is not None
        end = time.monotonic() + 60
        while time.monotonic() < end:
            with socket.socket() as trial:
                if trial.connect_ex((found[1], int(found[2]))) == 0:
                    break
            time.sleep(0.1)
        self.ready()

    def kill(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """Let the server hang: it takes connections and answers nothing, until it is killed."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Let a server answer again that hangs."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGCONT)

    def empty(self) -> None:
        """Delete all files; a server is started again."""
        self.kill()
        if self.files is not None:
            shutil.rmtree(self.files, ignore_errors=True)
            self.files.mkdir()
        self.start()

    def requests(self) -> int:
        return 0 if self.log is None else len(_REQUEST.findall(self.log.read_bytes()))


def directory_store(directory: Path) -> Server:
    return Server("a directory", str(directory / "shared"), directory / "shared")


def nginx(directory: Path) -> Server | None:
    """Return nginx with WebDAV; None: it is not installed."""
    program = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        return None
    port = free_port()
    files = directory / "www"
    files.mkdir()
    user = "user root;" if os.geteuid() == 0 else ""  # else its workers could not read our files
    (directory / "nginx.conf").write_text(
        f"daemon off; pid {directory}/pid; error_log {directory}/error; {user} events {{}}\n"
        f"http {{ access_log {directory}/nginx.log; client_max_body_size 0;\n"
        f"client_body_temp_path {directory}/body;\n"
        f"server {{ listen 127.0.0.1:{port}; root {files};\n"
        "location / { dav_methods PUT DELETE; create_full_put_path on; } } }\n"
    )
    command = (program, "-p", str(directory), "-c", str(directory / "nginx.conf"))
    url = f"http://127.0.0.1:{port}/store"
    return Server("nginx, WebDAV", url, files, directory / "nginx.log", command)


def docker_registry(
    directory: Path, *, address: str = "127.0.0.1", http: str = "", more: str = ""
) -> Server | None:
    """Return an OCI registry; None: docker-registry is not installed."""
    program = shutil.which("docker-registry")
    if program is None:
        return None
    port = free_port()
    files = directory / f"registry-{port}"
    settings = directory / f"registry-{port}.yml"
    settings.write_text(
        "version: 0.1\n"
        f"storage: {{filesystem: {{rootdirectory: {files}}}, delete: {{enabled: true}}}}\n"
        f"http: {{addr: '{address}:{port}'{http and f', {http}'}}}\n{more}"
    )
    command = (program, "serve", str(settings))
    url = f"oci://{address}:{port}/team/store"
    return Server("docker-registry", url, files, directory / f"registry-{port}.log", command)


@contextmanager
def running(server: Server | None, name: str = "docker-registry") -> Iterator[Server]:
    """Run a server. Skip the test where it is None."""
    if server is None:
        pytest.skip(f"{name} is not installed: see tests/store_servers.py")
    server.start()
    try:
        yield server
    finally:
        server.kill()


def _aws_settings(endpoint: str, key: str, secret: str) -> dict[str, str]:
    found = {"AWS_ENDPOINT": endpoint, "AWS_REGION": "us-east-1"}
    return found | {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret}


def moto(directory: Path) -> Server | None:
    """Return an S3 in memory; None: moto is not there."""
    paths = {"PYTHONPATH": os.environ.get("MOTO", "")}
    has_moto = [sys.executable, "-c", "import moto.server"]
    if subprocess.run(has_moto, env={**os.environ, **paths}, capture_output=True).returncode:
        return None
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"

    def make_bucket() -> None:
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/bucket", method="PUT"))

    return Server(
        "S3 (moto; loses its files when killed)",
        "s3://bucket/store",
        None,
        directory / "moto.log",
        (sys.executable, "-m", "moto.server", "-p", str(port)),
        make_bucket,
        _aws_settings(endpoint, "x", "y"),
        paths,
    )


def google_settings(endpoint: str) -> dict[str, str]:
    """Return the environment variables of a client of Google's XML API at another place."""
    return {"GOOGLE_BASE_URL": endpoint, "GOOGLE_BEARER_TOKEN": "x"}


def moto_as_google(directory: Path) -> Server | None:
    """Return Google's storage in memory, as far as it has the requests of S3; None: moto is not there."""
    server = moto(directory)
    if server is None:
        return None
    settings = google_settings(server.env["AWS_ENDPOINT"])
    name = "Google's XML API (moto; loses its files when killed)"
    return replace(server, name=name, url="gs://bucket/store", env=settings)


def azurite(directory: Path) -> Server | None:
    """Return an Azure in memory; None: Azurite is not there."""
    program = Path(os.environ.get("AZURITE", ""), "node_modules", ".bin", "azurite-blob")
    if not program.is_file():
        return None
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"

    def make_container() -> None:
        # Azure's Shared Key: the method, eleven headers that are not there, ours, and the resource.
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
        ours = [f"{name}:{value}" for name, value in headers.items()]
        resource = f"/{_AZURITE_ACCOUNT}/{_AZURITE_ACCOUNT}/bucket"
        text = "\n".join(["PUT", *[""] * 11, *ours, resource, "restype:container"])
        mac = hmac.digest(base64.b64decode(_AZURITE_KEY), text.encode(), "sha256")
        signature = base64.b64encode(mac).decode("ascii")
        headers["Authorization"] = f"SharedKey {_AZURITE_ACCOUNT}:{signature}"
        url = f"{endpoint}/{_AZURITE_ACCOUNT}/bucket?restype=container"
        urllib.request.urlopen(urllib.request.Request(url, headers=headers, method="PUT"))

    command = (str(program), "--blobPort", str(port), "--inMemoryPersistence", "--disableTelemetry")
    return Server(
        "Azure (Azurite; loses its files when killed)",
        "az://bucket/store",
        None,
        directory / "azurite.log",
        (*command, "--skipApiVersionCheck"),
        make_container,
        {"AZURE_STORAGE_USE_EMULATOR": "true", "AZURITE_BLOB_STORAGE_URL": endpoint},
    )


def s3rver(directory: Path) -> Server | None:
    """Return an S3 on disk; None: s3rver is not there."""
    program = Path(os.environ.get("S3RVER", ""), "node_modules", ".bin", "s3rver")
    if not program.is_file():
        return None
    port = free_port()
    files = directory / "s3rver"
    files.mkdir()
    where = ("-d", str(files), "-a", "127.0.0.1", "-p", str(port), "--no-vhost-buckets")
    return Server(
        "S3 (s3rver)",
        "s3://bucket/store",
        files,
        directory / "s3rver.log",
        (str(program), *where, "--configure-bucket", "bucket"),
        env=_aws_settings(f"http://127.0.0.1:{port}", "S3RVER", "S3RVER"),
    )


KINDS: tuple[Callable[[Path], Server | None], ...]
KINDS = (directory_store, nginx, docker_registry, moto, azurite, s3rver)
"""All kinds; each gives None where this machine cannot run it."""
