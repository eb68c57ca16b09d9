"""What a registry, a web server or another process with the store wants, and does not get."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.fake_registry import FakeRegistry, fake_registry
from tests.signers import signer

from prejit.compiler.signing.bundle_signing import sign
from prejit.runtime import load, loader
from prejit.runtime.errors import RejectError, StoreError
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.ship import object_repository, repository
from prejit.runtime.ship.machine_store import MachineStore
from prejit.runtime.ship.pulling import Wanted, pull
from prejit.runtime.ship.reference import parse_reference

from .conftest import GOLDEN, moved

HERE = Wanted(Fingerprint.current())


@pytest.mark.parametrize("name", ["bundles", "blobs", ".partial"])
def test_a_link_in_the_store_leads_nowhere(
    registry: FakeRegistry, store: MachineStore, tmp_path: Path, name: str
) -> None:
    pull(parse_reference(f"oci://{registry.host}/call:v1"), store, HERE)
    home = tmp_path / "home"
    (home / "alice").mkdir(parents=True)
    shutil.rmtree(store.path / name, ignore_errors=True)
    (store.path / name).symlink_to(home)
    with pytest.raises(StoreError, match="expected a directory"):
        store.collect(0, 0)
    assert (home / "alice").is_dir()


def test_gc_removes_only_what_has_the_name_of_a_digest(store: MachineStore) -> None:
    (store.path / "bundles" / "notes").mkdir(parents=True)
    store.collect(0, 0)
    assert (store.path / "bundles" / "notes").is_dir()


def test_no_login_of_netrc_goes_to_a_registry_or_to_where_it_points(
    registry: FakeRegistry, store: MachineStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".netrc").write_text("default login me password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    with fake_registry() as other:
        other.manifests |= registry.manifests
        other.blobs |= registry.blobs
        asked = {"www_authenticate": f'Bearer realm="http://{other.host}/token",service="s"'}

        def fault(method: str, path: str) -> Any:
            if "/blobs/" in path:
                return f"http://{other.host}{path}"
            return (401, asked) if "decoder" in path else None

        registry.fault = fault
        pull(parse_reference(f"oci://{registry.host}/call:v1"), store, HERE)
        with pytest.raises(StoreError):
            pull(parse_reference(f"oci://{registry.host}/decoder:v1"), store, HERE)
        seen = [*registry.seen, *other.seen]
    assert len(other.seen) > 1
    assert {authorization for *_, authorization in seen} == {""}


def test_a_bundle_that_is_exchanged_after_it_was_found_is_not_loaded(
    registry: FakeRegistry, store: MachineStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, other = (
        pull(parse_reference(f"oci://{registry.host}/{name}:v1"), store, HERE)
        for name in ("call", "decoder")
    )
    opens: Callable[..., Any] = loader.read_whole

    def exchanged(path: Path, read: Any) -> Any:
        shutil.copy(other.path / "index.json", call.path / "index.json")
        return opens(path, read)

    monkeypatch.setattr(loader, "read_whole", exchanged)
    with pytest.raises(RejectError, match=f"expected {call.digest}, found {other.digest}"):
        load(f"oci://{registry.host}/call@{call.digest}")


def test_what_is_attached_has_a_limit(
    registry: FakeRegistry, store: MachineStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(GOLDEN / "call", tmp_path / "call")
    sign(tmp_path / "call", signer("a"))
    at = parse_reference(f"oci://{registry.host}/signed:v1")
    moved(tmp_path / "call", at)
    monkeypatch.setattr(repository, "_MAX_ATTACHED_BYTES", 1)
    with pytest.raises(RejectError, match="at most 1 bytes of what is attached"):
        pull(at, store, HERE)


@pytest.mark.parametrize(
    ("given", "host", "is_chosen", "sent"),
    [
        ("secret", "cache.example", True, "Bearer secret"),
        ("secret", "public.example", False, None),
        ("a.example=x= b.example:1=y", "a.example", False, "Bearer x="),
        ("a.example=x= b.example:1=y", "b.example:1", False, "Bearer y"),
        ("a.example=x=", "public.example", False, None),
    ],
)
def test_a_token_goes_to_the_server_that_it_is_for(
    monkeypatch: pytest.MonkeyPatch, given: str, host: str, is_chosen: bool, sent: str | None
) -> None:
    monkeypatch.setenv(object_repository.TOKEN, given)
    found = object_repository._authorization(urlsplit(f"https://{host}/x"), is_chosen=is_chosen)
    assert found.get("Authorization") == sent


def test_a_bundle_that_lacks_a_file_is_fetched_again(
    registry: FakeRegistry, store: MachineStore
) -> None:
    found = pull(parse_reference(f"oci://{registry.host}/call:v1"), store, HERE)
    gone = max((store.path / "blobs" / "sha256").iterdir(), key=lambda file: file.stat().st_size)
    gone.unlink()
    again = pull(parse_reference(f"oci://{registry.host}/call@{found.digest}"), store, HERE)
    assert again.moved is not None
    assert gone.is_file()
