"""A bundle moves between all kinds of places with all its bytes, and only what is missing moves."""

import contextlib
import hashlib
import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.fake_registry import fake_registry
from tests.layouts import write_root
from tests.store_servers import google_settings
from tests.unit.compiler.sharing.fixtures import S3_SETTINGS, s3_store

from prejit.compiler.pipeline.pack.bundle_writing import Part, attach
from prejit.runtime.errors import PrejitError, StoreError, UsageError
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.names import MANIFEST_MEDIA_TYPE, PARTS_MEDIA_TYPE, SIGNATURE_MEDIA_TYPE
from prejit.runtime.format.root import read_root
from prejit.runtime.ship.pulling import Wanted, pull
from prejit.runtime.ship.reference import parse_reference

from .conftest import GOLDEN, audited, keep, moved, place_at


@pytest.fixture
def fleet(tmp_path):
    """A bundle of four targets, to which something is attached, and two things to that."""
    path = tmp_path / "fleet"
    shutil.copytree(GOLDEN / "fleet", path)
    with Layout(path) as layout:
        subject = read_root(layout).subject
    parts = Part(PARTS_MEDIA_TYPE, b'{"bomFormat":"CycloneDX"}')
    at = attach(path, subject, PARTS_MEDIA_TYPE, [parts], {})
    for signature in (f'{{"mediaType":"{SIGNATURE_MEDIA_TYPE}"{end}' for end in ("}", " }")):
        part = Part(SIGNATURE_MEDIA_TYPE, signature.encode())
        attach(path, at, SIGNATURE_MEDIA_TYPE, [part], {})
    return path


def content(path):
    return {str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*") if f.is_file()}


@pytest.mark.parametrize("has_referrers", [True, False])
def test_a_registry_has_all_bytes_and_mounts_blobs_elsewhere(has_referrers, fleet, tmp_path):
    with fake_registry(has_referrers=has_referrers, page_entries=1) as registry:
        first = moved(fleet, f"oci://{registry.host}/a:v1")
        assert first.present_bytes == 0
        uploads = registry.count("PUT", "/uploads/")
        second = moved(fleet, f"oci://{registry.host}/a:v1")
        assert second.digest == first.digest
        assert second.moved_bytes + second.present_bytes == first.moved_bytes
        third = moved(f"oci://{registry.host}/a:v1", f"oci://{registry.host}/b:v2")
        assert registry.count("PUT", "/uploads/") == uploads
        assert third.mounted_bytes > 0
        if has_referrers:  # else there are indexes of referrers as well
            assert third.moved_bytes == sum(map(len, set(registry.manifests.values())))
        moved(f"oci://{registry.host}/b:v2", tmp_path / "back")
    assert content(tmp_path / "back") == content(fleet)
    assert audited(tmp_path / "back").attached_count == 3


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_a_bucket_keeps_versions_under_tags_and_blobs_once(scheme, fleet, tmp_path, monkeypatch):
    with s3_store() as endpoint:
        of_s3 = S3_SETTINGS | {"AWS_ENDPOINT": endpoint}
        for name, value in (of_s3 if scheme == "s3" else google_settings(endpoint)).items():
            monkeypatch.setenv(name, value)
        at = f"{scheme}://bucket/models/fleet"
        moved(fleet, f"{at}:v1")
        assert moved(fleet, f"{at}:v2").moved_bytes < 20_000
        moved(fleet, at)
        tags = place_at(at).tags()
        assert [each.tag for each in tags] == ["", "v1", "v2"]
        assert len({each.digest for each in tags}) == 1
        moved(f"{at}:v1", tmp_path / "back")
        moved(f"{at}@{tags[0].digest}", tmp_path / "named")
        place_at(at).remove("v1")
        with pytest.raises(StoreError, match="not found"):
            moved(f"{at}:v1", tmp_path / "gone")
    assert content(tmp_path / "back") == content(tmp_path / "named") == content(fleet)


def test_a_tar_for_sites_without_a_network_and_some_targets(fleet, tmp_path):
    moved(fleet, tmp_path / "one.tar")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: moved(fleet, tmp_path / "two.tar"), range(8)))
    assert (tmp_path / "one.tar").read_bytes() == (tmp_path / "two.tar").read_bytes()
    assert {each.name for each in tmp_path.glob("*.tar*")} == {"one.tar", "two.tar"}
    moved(tmp_path / "one.tar", tmp_path / "back")
    assert content(tmp_path / "back") == content(fleet)
    (tmp_path / "not.tar").write_bytes(b"no tar")
    for name in ("not.tar", "none.tar"):
        with pytest.raises(StoreError, match=name):
            moved(tmp_path / name, tmp_path / "other")
    moved(GOLDEN / "call", tmp_path / "some")  # another bundle takes its place
    moved(fleet, tmp_path / "some", "cuda-l4", "cpu-x86-64-v3")
    assert audited(tmp_path / "some").target_count == 2
    with pytest.raises(UsageError, match=r"expected one of the targets .*cuda-l4"):
        moved(fleet, tmp_path / "none", "cuda-l5")
    with fake_registry() as registry:
        at = f"oci://{registry.host}/one"
        moved(fleet, f"{at}:l4", "cuda-l4")
        moved(f"{at}:l4", tmp_path / "one")
        with pytest.raises(UsageError, match="one target or all"):
            moved(fleet, f"{at}:two", "cuda-l4", "cpu-x86-64-v3")
    assert audited(tmp_path / "one").target_count == 1


def test_a_bundle_of_the_store_or_with_blobs_beside_its_index_moves_on(fleet, store, tmp_path):
    with fake_registry() as registry:
        at = f"oci://{registry.host}/fleet:v1"
        moved(fleet, at)
        held = pull(parse_reference(at), store, Wanted()).path
    moved(held, tmp_path / "copy")
    flat = tmp_path / "flat"
    shutil.copytree(fleet / "blobs" / "sha256", flat)
    for name in ("index.json", "oci-layout"):
        shutil.copy(fleet / name, flat)
    moved(flat, tmp_path / "copy.tar")
    moved(tmp_path / "copy.tar", tmp_path / "back")
    assert content(tmp_path / "copy") == content(tmp_path / "back") == content(fleet)


def test_images_of_another_tool_are_not_removed(fleet, tmp_path):
    there, image = tmp_path / "images", b'{"schemaVersion":2}'
    blob = there / "blobs" / "sha256" / hashlib.sha256(image).hexdigest()
    blob.parent.mkdir(parents=True)
    blob.write_bytes(image)
    (there / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
    digest = f"sha256:{blob.name}"
    write_root(there, [{"mediaType": MANIFEST_MEDIA_TYPE, "digest": digest, "size": len(image)}])
    index = (there / "index.json").read_text()
    with fake_registry() as registry:
        moved(fleet, f"oci://{registry.host}/fleet:v1")
        for source in (fleet, f"oci://{registry.host}/fleet:v1"):
            with pytest.raises(UsageError, match=r"images: .* what another tool wrote"):
                moved(source, there)
    assert blob.read_bytes() == image
    assert (there / "index.json").read_text() == index
    (there / "index.json").write_text('{"pages": []}')  # of a web site
    with pytest.raises(UsageError, match=r"images: .* what another tool wrote"):
        moved(fleet, there)
    write_root(there, [])
    moved(fleet, there)
    moved(GOLDEN / "call", there)  # a bundle in place of another
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "mine.txt").touch()
    with pytest.raises(UsageError, match=r"work: .* found 'mine.txt'; nothing was changed"):
        moved(fleet, tmp_path / "work")
    (there / "index.json").unlink()
    os.mkfifo(there / "index.json")  # nobody waits for its writer
    moved(fleet, there)


def test_tags_lead_to_bundles_and_are_removed(fleet):
    with fake_registry(has_referrers=False) as registry:
        at = f"oci://{registry.host}/fleet"
        digest = moved(fleet, f"{at}:v1").digest
        moved(f"{at}:v1", f"{at}:stable")
        place = place_at(at)
        assert {each.tag: each.digest for each in place.tags()} == {"stable": digest, "v1": digest}
        place.remove("v1")
        assert [each.tag for each in place.tags()] == ["stable"]
        with pytest.raises(StoreError, match="v1: not found"):
            place.remove("v1")
        registry.has_tag_deletion = False
        with pytest.raises(StoreError, match="deletes no tags"):
            place.remove("stable")


@pytest.fixture
def log_in(tmp_path, monkeypatch):
    def log_in(registry):
        keep(tmp_path / "auth.json", {registry.host: "me"})
        monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "auth.json"))

    return log_in


@pytest.mark.parametrize("user", ["", "me:secret"])
def test_a_login_goes_to_the_registry_alone(user, fleet, tmp_path, log_in):
    with fake_registry(user="me:secret") as registry, fake_registry(user=user) as elsewhere:
        at = f"oci://{registry.host}/fleet:v1"
        with pytest.raises(StoreError, match="401") as raised:
            moved(fleet, at)
        assert f"docker login {registry.host}" in str(raised.value.hint)
        log_in(registry)
        moved(fleet, at)
        elsewhere.blobs |= registry.blobs
        registry.fault = lambda method, path: (
            f"http://{elsewhere.host}{path}" if method == "GET" and "/blobs/" in path else None
        )
        with pytest.raises(StoreError, match="401") if user else contextlib.nullcontext():
            moved(at, tmp_path / "back")
        assert {each[2] for each in elsewhere.seen} == {""}
    assert user or content(tmp_path / "back") == content(fleet)


def test_a_token_that_ends_during_a_push_is_asked_for_again(fleet, tmp_path, log_in):
    with fake_registry(user="me:secret") as registry:
        log_in(registry)
        asked = f'Bearer realm="http://{registry.host}/token",service="s",scope="x"'
        left = [(401, {"www_authenticate": asked})]
        registry.fault = lambda method, path: left.pop() if method == "PUT" and left else None
        moved(fleet, f"oci://{registry.host}/fleet:v1")
        assert not left
        assert registry.count("GET", "/token") == 2
        moved(f"oci://{registry.host}/fleet:v1", tmp_path / "back")
    assert content(tmp_path / "back") == content(fleet)


def test_an_upload_that_the_registry_lost_begins_again(fleet):
    with fake_registry() as registry:
        lost = [404, "hang up"]  # after a cut a registry has no upload to go on with
        registry.fault = lambda method, path: (
            lost.pop() if method == "PUT" and "/uploads/" in path and lost else None
        )
        moved(fleet, f"oci://{registry.host}/fleet:v1")
        assert not lost
        # One without any upload is an error all the same.
        registry.fault = lambda method, path: 404 if "/uploads/1" in path else None
        with pytest.raises(StoreError, match="404"):
            moved(fleet, f"oci://{registry.host}/other:v1")


def test_what_is_no_bundle_and_what_is_another(fleet, tmp_path):
    with fake_registry() as registry:
        at = f"oci://{registry.host}/fleet"
        digest = moved(fleet, f"{at}:v1").digest
        with pytest.raises(UsageError, match="expected the digest"):
            moved(fleet, f"{at}:v1@sha256:{'a' * 64}")
        registry.manifests["fleet", "image"] = b'{"config":{"mediaType":"x/image"}}'
        with pytest.raises(
            UsageError, match="expected a bundle of prejit, found x/image"
        ) as raised:
            moved(f"{at}:image", tmp_path / "a")
        assert "another tag" in str(raised.value.hint)  # the image stays, which pods mount
        with pytest.raises(StoreError, match="not found"):
            moved(f"{at}:v9", tmp_path / "b")
        # A registry that lies: another bundle's index under this digest.
        index = registry.manifests["fleet", digest]
        registry.manifests["fleet", digest] = index.replace(b"fleet", b"other")
        with pytest.raises(PrejitError, match=f"expected {digest}"):
            moved(f"{at}@{digest}", tmp_path / "c")
    assert not (tmp_path / "c").exists() or not (tmp_path / "c" / "index.json").exists()
