"""Results in an OCI registry: its layers keep what they need, and its login is that of docker."""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest
from tests.ports import free_port
from tests.unit.compiler.sharing.fixtures import registry

from prejit.compiler.sharing.registry import Repository
from prejit.compiler.sharing.remote import RemoteError
from prejit.compiler.sharing.shared_result import SharedResult, decode, encode
from prejit.compiler.store.key import Key
from prejit.runtime.base.digests import digest_of

CONTENT = os.urandom(5 << 20)
KEY = Key("compile", "demo/decode", (("stablehlo", "x"),))
RESULT_OF_KEY = SharedResult(KEY, {"size": 3}, {digest_of(CONTENT): len(CONTENT)})
AC, CAS = f"ac/{'a' * 64}", f"cas/{digest_of(CONTENT).removeprefix('sha256:')}"


def round_trip(place: Repository, tmp_path: Path) -> None:
    assert place.read(AC, 1000) is None
    assert not place.has(CAS)
    got = bytearray()
    assert not place.download(CAS, got.extend)
    file = tmp_path / "content"
    file.write_bytes(CONTENT)
    with file.open("rb") as content:
        place.write(CAS, content)
    place.write(AC, encode(RESULT_OF_KEY, None))
    assert place.has(CAS)
    assert place.download(CAS, got.extend)
    assert got == CONTENT
    result = place.read(AC, 10_000)
    assert result is not None
    assert decode(result, KEY, ()) == RESULT_OF_KEY


def test_a_registry_holds_results_and_contents(tmp_path: Path) -> None:
    with registry() as host:
        round_trip(Repository(f"oci://{host}/team/store"), tmp_path)


def test_the_login_of_docker_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with registry("me:secret") as host:
        with pytest.raises(RemoteError):
            Repository(f"oci://{host}/store").read(AC, 1000)
        pair = base64.b64encode(b"me:secret").decode()
        (tmp_path / ".docker").mkdir()
        (tmp_path / ".docker" / "config.json").write_text(
            json.dumps({"auths": {host: {"auth": pair}}})
        )
        round_trip(Repository(f"oci://{host}/store"), tmp_path)


def test_a_registry_that_is_not_there_is_an_error_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        with pytest.raises(RemoteError, match="oci://127"):
            Repository(f"oci://127.0.0.1:{taken.getsockname()[1]}/x").read(AC, 1)


@pytest.mark.skipif(not shutil.which("docker-registry"), reason="docker-registry is not installed")
def test_a_real_registry_holds_results_and_contents(tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "config.yml").write_text(
        f"version: 0.1\nstorage: {{filesystem: {{rootdirectory: {tmp_path}/data}}}}\n"
        f"http: {{addr: '127.0.0.1:{port}'}}\n"
    )
    command = ["docker-registry", "serve", str(tmp_path / "config.yml")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            end = time.monotonic() + 60
            while time.monotonic() < end:
                with socket.socket() as trial:
                    if trial.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.05)
            round_trip(Repository(f"oci://127.0.0.1:{port}/team/store"), tmp_path)
        finally:
            server.kill()
