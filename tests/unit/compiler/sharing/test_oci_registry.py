"""Results in an OCI registry: its layers keep what they need, and its login is that of docker."""

from __future__ import annotations

import base64
import json
import os
import socket
from pathlib import Path

import pytest
from tests.fake_registry import fake_registry

from prejit.compiler.sharing.objects import ANSWER_SECONDS
from prejit.compiler.sharing.oci_registry import RegistryStore
from prejit.compiler.sharing.remote import RemoteError
from prejit.compiler.sharing.shared_result import SharedResult, decode, encode
from prejit.compiler.store.build_cache_key import Key
from prejit.runtime.base.files import digest_of

CONTENT = os.urandom(5 << 20)
KEY = Key("compile", "demo/decode", (("stablehlo", "x"),))
RESULT_OF_KEY = SharedResult(KEY, {"size": 3}, {digest_of(CONTENT): len(CONTENT)})
AC, CAS = f"ac/{'a' * 64}", f"cas/{digest_of(CONTENT).removeprefix('sha256:')}"


def round_trip(place: RegistryStore, tmp_path: Path) -> None:
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


def test_a_registry_holds_results_and_contents_and_the_login_of_docker_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with fake_registry(user="me:secret", is_basic=True) as registry:
        host = registry.host
        with pytest.raises(RemoteError):
            RegistryStore(f"oci://{host}/store").read(AC, 1000)
        pair = base64.b64encode(b"me:secret").decode()
        (tmp_path / ".docker").mkdir()
        (tmp_path / ".docker" / "config.json").write_text(
            json.dumps({"auths": {host: {"auth": pair}}})
        )
        round_trip(RegistryStore(f"oci://{host}/store"), tmp_path)


def test_a_registry_that_is_not_there_is_an_error_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        with pytest.raises(RemoteError, match="oci://127"):
            RegistryStore(f"oci://127.0.0.1:{taken.getsockname()[1]}/x").read(AC, 1)


def test_a_registry_may_take_time_for_a_blob_and_a_manifest_that_finds_half_of_it_is_sent_again(
    tmp_path: Path,
) -> None:
    """A registry on a file system answers 400 while another machine writes the same blob."""

    def slow(method: str, path: str) -> float | None:
        return 1.5 * ANSWER_SECONDS if method == "PUT" and "/uploads/" in path else None

    with fake_registry(fault=slow) as registry:
        RegistryStore(f"oci://{registry.host}/store").write(CAS, CONTENT)
    left = [400] * 3

    def refuses(method: str, path: str) -> int | None:
        return left.pop() if method == "PUT" and "/manifests/" in path and left else None

    with fake_registry(fault=refuses) as registry:
        place = RegistryStore(f"oci://{registry.host}/store")
        round_trip(place, tmp_path)
        left += [400] * 4
        with pytest.raises(RemoteError, match="400"):
            place.write(AC, encode(RESULT_OF_KEY, None))
