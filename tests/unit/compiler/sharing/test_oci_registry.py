"""Results in an OCI registry: its layers keep what they need, and its login is that of docker."""

import base64
import json
import os

import pytest
from tests.fake_registry import fake_registry

from prejit.compiler.sharing.objects import ANSWER_SECONDS
from prejit.compiler.sharing.oci_registry import RegistryStore
from prejit.compiler.sharing.remote import RemoteError
from prejit.compiler.sharing.shared_result import SharedResult, encode
from prejit.compiler.store.build_cache_key import Key
from prejit.runtime.base.files import digest_of

CONTENT = os.urandom(5 << 20)
KEY = Key("compile", "demo/decode", (("stablehlo", "x"),))
RESULT = encode(SharedResult(KEY, {"size": 3}, {digest_of(CONTENT): len(CONTENT)}), None)
AC, CAS = f"ac/{'a' * 64}", f"cas/{digest_of(CONTENT).removeprefix('sha256:')}"


def test_the_login_of_docker_is_used(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with fake_registry(user="me:secret", is_basic=True) as registry:
        url = f"oci://{registry.host}/store"
        with pytest.raises(RemoteError):
            RegistryStore(url).read(AC, 1000)
        (tmp_path / ".docker").mkdir()
        login = {"auths": {registry.host: {"auth": base64.b64encode(b"me:secret").decode()}}}
        (tmp_path / ".docker" / "config.json").write_text(json.dumps(login))
        place = RegistryStore(url)
        place.write(CAS, CONTENT)
        place.write(AC, RESULT)
        assert place.read(AC, 10_000) == RESULT


def test_a_slow_blob_is_waited_for_and_a_manifest_that_finds_half_of_it_is_sent_again():
    """A registry on a file system answers 400 while another machine writes the same blob."""

    def slow(method, path):
        return 1.5 * ANSWER_SECONDS if method == "PUT" and "/uploads/" in path else None

    with fake_registry(fault=slow) as registry:
        RegistryStore(f"oci://{registry.host}/store").write(CAS, CONTENT)
    left = [400] * 3

    def refuses(method, path):
        return left.pop() if method == "PUT" and "/manifests/" in path and left else None

    with fake_registry(fault=refuses) as registry:
        place = RegistryStore(f"oci://{registry.host}/store")
        place.write(CAS, CONTENT)
        place.write(AC, RESULT)
        assert place.read(AC, 10_000) == RESULT
        left += [400] * 4
        with pytest.raises(RemoteError, match="400"):
            place.write(AC, RESULT)
