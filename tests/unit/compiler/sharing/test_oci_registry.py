"""Results in an OCI registry: its layers keep what they need, and its login is that of docker."""

from __future__ import annotations

import base64
import json
import os
import socket
from pathlib import Path

import pytest
from tests.unit.compiler.sharing.fixtures import registry

from prejit.compiler.sharing.objects import ANSWER_SECONDS
from prejit.compiler.sharing.oci_registry import Repository
from prejit.compiler.sharing.remote import RemoteError
from prejit.compiler.sharing.shared_result import SharedResult, decode, encode
from prejit.compiler.store.build_cache_key import Key
from prejit.runtime.base.files import digest_of

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
    assert decode(result, KEY, ()) == RESULT_OF_KEY


def test_a_registry_takes_dockers_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_registry_may_be_slow_and_one_that_is_gone_is_told(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        with pytest.raises(RemoteError, match="oci://127"):
            Repository(f"oci://127.0.0.1:{taken.getsockname()[1]}/x").read(AC, 1)
    with registry(upload_seconds=1.5 * ANSWER_SECONDS) as host:
        Repository(f"oci://{host}/store").write(CAS, CONTENT)
    with registry(refused=3) as host:
        round_trip(Repository(f"oci://{host}/store"), tmp_path)
    with registry(refused=4) as host:
        place = Repository(f"oci://{host}/store")
        with pytest.raises(RemoteError, match="400"):
            place.write(AC, encode(RESULT_OF_KEY, None))
