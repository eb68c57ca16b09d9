"""The store of a machine holds each blob once, gets what the machine needs, and nothing not allowed."""

import os
import shutil
from urllib.parse import urlsplit

import pytest
from tests.fake_registry import fake_registry
from tests.signers import key_table, signer, write_policy

from prejit.compiler.signing.bundle_signing import sign
from prejit.runtime import load, loader
from prejit.runtime.__main__ import main
from prejit.runtime.errors import RejectError, StoreError, UntrustedError
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.ship import object_repository, repository
from prejit.runtime.ship.pulling import OFFLINE, Wanted, pull
from prejit.runtime.ship.reference import parse_reference

from .conftest import GOLDEN, audited, moved

HERE = Fingerprint.current()


def pulled(registry, store, name, **wanted):
    return pull(parse_reference(f"oci://{registry.host}/{name}"), store, Wanted(**wanted))


@pytest.fixture
def signed(tmp_path):
    path = shutil.copytree(GOLDEN / "call", tmp_path / "signed")
    sign(path, signer("a"))
    return path


def test_only_the_target_of_this_machine_is_fetched_then_others_beside_it(registry, store):
    for wanted, is_moved, count in (
        ({"machine": HERE}, True, 1),
        ({"machine": HERE}, False, 1),
        ({"names": ("cuda-l4",)}, True, 2),
        ({}, True, 6),
    ):
        found = pulled(registry, store, "fleet:v1", **wanted)
        assert (found.moved is not None) == is_moved
        assert audited(found.path).target_count == count
    assert (store.path / ".partial").is_dir()
    assert not list((store.path / ".partial").iterdir())


def test_a_digest_that_is_here_asks_nobody_and_a_tag_always_does(registry, store, monkeypatch):
    digest = pulled(registry, store, "call:v1", machine=HERE).digest
    registry.seen.clear()
    assert pulled(registry, store, f"call@{digest}", machine=HERE).moved is None
    assert not registry.seen
    registry.fault = lambda method, path: 404
    with pytest.raises(StoreError, match="not found"):
        pulled(registry, store, "call:v1", machine=HERE)
    monkeypatch.setenv(OFFLINE, "1")
    assert pulled(registry, store, "call:v1", machine=HERE).digest == digest
    with pytest.raises(StoreError, match="does not hold a bundle of this reference"):
        pulled(registry, store, "call:v2", machine=HERE)


def test_a_policy_decides_before_the_weights_are_fetched(registry, store, signed, tmp_path):
    at = f"oci://{registry.host}/signed:v1"
    moved(signed, at)
    rule = '[[rules]]\nnames = ["*"]\nkeys = ["a"]\n'
    policy = write_policy(tmp_path / "trust.toml", key_table("a"), rule)
    registry.seen.clear()
    with pytest.raises(UntrustedError) as raised:
        load(f"oci://{registry.host}/call:v1", trust=policy)
    assert raised.value.case == "unsigned"
    assert registry.count("GET", "/blobs/") == 0
    assert not store.bundles()
    assert not store.remembered(parse_reference(f"oci://{registry.host}/call:v1"))
    with load(at, trust=policy) as loaded:
        assert loaded.digest


def test_a_policy_decides_about_what_is_here_and_signatures_arrive_later(
    registry, store, signed, tmp_path, monkeypatch
):
    at = f"oci://{registry.host}/call"
    rule = '[[rules]]\nnames = ["*"]\nkeys = ["a"]\n'
    policy = write_policy(tmp_path / "trust.toml", key_table("a"), rule)
    digest = pulled(registry, store, "call:v1").digest

    def allowed(reference):
        return pull(parse_reference(reference), store, Wanted(), [str(policy)])

    for offline, reference in (("0", f"{at}@{digest}"), ("1", f"{at}@{digest}"), ("1", f"{at}:v1")):
        monkeypatch.setenv(OFFLINE, offline)
        with pytest.raises(UntrustedError):
            allowed(reference)
    monkeypatch.setenv(OFFLINE, "0")
    moved(signed, f"{at}:v1")
    assert allowed(f"{at}@{digest}").digest == digest
    with load(f"{at}@{digest}", trust=policy) as loaded:
        assert loaded.digest == digest


def test_making_room_removes_the_last_used_and_what_killed_transfers_left(registry, store):
    found = {name: pulled(registry, store, f"{name}:v1") for name in ("call", "decoder", "fleet")}
    for age, name in enumerate(found):
        os.utime(found[name].path / "index.json", (1e9 + age, 1e9 + age))
    (store.path / ".partial" / ("a" * 64)).write_bytes(b"half")
    (store.path / "blobs" / "sha256" / ("b" * 64)).write_bytes(b"of no bundle")
    store.pin(found["call"].digest, is_pinned=True)
    assert store.collect(1 << 40, 1e10, dry_run=True).files == 2
    assert store.collect(1 << 40, 1e10).files == 2
    keep = sum(each.size for each in store.bundles() if each.digest != found["decoder"].digest)
    assert store.collect(keep, 1e10).bundles == 1
    left = {each.digest for each in store.bundles()}
    assert left == {found["call"].digest, found["fleet"].digest}
    for each in store.bundles():
        audited(store.directory(each.digest))
    assert store.collect(0, 0).bundles == 1
    assert [each.digest for each in store.bundles()] == [found["call"].digest]


def test_what_is_attached_later_arrives_within_a_limit(registry, store, signed, monkeypatch):
    first = pulled(registry, store, "call:v1")
    moved(signed, f"oci://{registry.host}/call:v1")
    with monkeypatch.context() as patch:
        patch.setattr(repository, "_MAX_ATTACHED_BYTES", 1)
        with pytest.raises(RejectError, match="at most 1 bytes of what is attached"):
            pulled(registry, store, "call:v1")
    again = pulled(registry, store, "call:v1")
    assert again.digest == first.digest
    found = audited(again.path)
    assert found.attached_count > audited(GOLDEN / "call").attached_count
    assert pulled(registry, store, "call:v1").moved is None


def test_a_link_in_the_store_leads_nowhere(registry, store, tmp_path):
    (tmp_path / "home" / "alice").mkdir(parents=True)
    for name in ("bundles", "blobs", ".partial"):
        pulled(registry, store, "call:v1", machine=HERE)
        shutil.rmtree(store.path / name, ignore_errors=True)
        (store.path / name).symlink_to(tmp_path / "home")
        with pytest.raises(StoreError, match="expected a directory"):
            store.collect(0, 0)
        assert (tmp_path / "home" / "alice").is_dir()
        shutil.rmtree(store.path)


def test_a_pull_writes_to_no_url_and_only_digests_are_pinned_and_removed(
    registry, ran, store, tmp_path, monkeypatch
):
    at = f"oci://{registry.host}/call:v1"
    refused = ran("pull", at, "-o", f"oci://{registry.host}/other:v1", status=2).err
    assert f"prejit copy {at}" in refused
    for command in ("push", "copy"):  # a docker user's reference made a directory here
        for place in (f"{registry.host}/other", "localhost/other", "ghcr.io/me/other:v1"):
            refused = ran(command, GOLDEN / "call", place, status=2).err
            assert f"give oci://{place}, or ./{place}" in refused
    assert not registry.seen
    (tmp_path / "ghcr.io").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(("push", str(GOLDEN / "call"), "ghcr.io/me/other:v1")) == 0  # somebody's directory
    found = pulled(registry, store, "call:v1", machine=HERE)
    gone = max((store.path / "blobs" / "sha256").iterdir(), key=lambda file: file.stat().st_size)
    gone.unlink()
    assert pulled(registry, store, f"call@{found.digest}", machine=HERE).moved is not None
    assert gone.is_file()
    (store.path / "bundles" / "notes").mkdir(parents=True)
    with pytest.raises(StoreError, match="expected a bundle"):
        store.pin("../notes", is_pinned=True)
    store.collect(0, 0)
    assert (store.path / "bundles" / "notes").is_dir()
    with store.writing(), pytest.raises(StoreError, match="is being fetched"):
        store.collect(0, 0)


def test_no_login_of_netrc_goes_to_a_registry_or_elsewhere(registry, store, tmp_path, monkeypatch):
    (tmp_path / ".netrc").write_text("default login me password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    with fake_registry() as other:
        other.manifests |= registry.manifests
        other.blobs |= registry.blobs
        asked = {"www_authenticate": f'Bearer realm="http://{other.host}/token",service="s"'}

        def fault(method, path):
            if "/blobs/" in path:
                return f"http://{other.host}{path}"
            return (401, asked) if "decoder" in path else None

        registry.fault = fault
        pulled(registry, store, "call:v1", machine=HERE)
        with pytest.raises(StoreError):
            pulled(registry, store, "decoder:v1", machine=HERE)
        seen = [*registry.seen, *other.seen]
    assert len(other.seen) > 1
    assert {authorization for *_, authorization in seen} == {""}


def test_a_bundle_that_is_exchanged_after_it_was_found_is_not_loaded(registry, store, monkeypatch):
    call, other = (pulled(registry, store, f"{n}:v1", machine=HERE) for n in ("call", "decoder"))
    opens = loader.read_whole

    def exchanged(path, read):
        shutil.copy(other.path / "index.json", call.path / "index.json")
        return opens(path, read)

    monkeypatch.setattr(loader, "read_whole", exchanged)
    with pytest.raises(RejectError, match=f"expected {call.digest}, found {other.digest}"):
        load(f"oci://{registry.host}/call@{call.digest}")


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
def test_a_token_goes_to_the_server_that_it_is_for(monkeypatch, given, host, is_chosen, sent):
    monkeypatch.setenv(object_repository.TOKEN, given)
    found = object_repository._authorization(urlsplit(f"https://{host}/x"), is_chosen=is_chosen)
    assert found.get("Authorization") == sent


def test_two_who_fetch_different_targets_at_once_both_find_theirs(registry, store):
    def check_room(shipment):
        del store.check_room
        assert pulled(registry, store, "fleet:v1", names=("cuda-l4",)).moved is not None

    store.check_room = check_room
    found = pulled(registry, store, "fleet:v1", machine=HERE)
    assert audited(found.path).target_count == 2
    assert pulled(registry, store, "fleet:v1", machine=HERE).moved is None
