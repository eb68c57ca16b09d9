"""A bundle arrives whole in the forms that platforms mount, and its layers depend on its blobs alone."""

import io
import json
import shutil
import tarfile
from dataclasses import replace

import pytest
from tests.fake_registry import fake_registry

from prejit.runtime.errors import RejectError, UsageError
from prejit.runtime.format.bundle_schema import Descriptor
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.referrers import reached
from prejit.runtime.format.root import read_root
from prejit.runtime.ship import mounted_forms
from prejit.runtime.ship.mounted_forms import IMAGE, MODELPACK, form_of

from .conftest import GOLDEN, audited, moved, place_at


@pytest.fixture(autouse=True)
def small_layers(monkeypatch):
    monkeypatch.setattr(mounted_forms, "_OWN_LAYER_BYTES", 1000)


def formed(bundle, form, architectures=()):
    files = place_at(str(bundle)).open("", "")
    root = read_root(files)
    targets = list(root.bundle.manifests)
    for i, architecture in enumerate(architectures):
        targets[i] = replace(targets[i], platform={"architecture": architecture, "os": "linux"})
    return form_of(form, files, root, targets)


def content_of(source, at):
    whole = b"".join(source.pieces(Descriptor(at["mediaType"], at["digest"], at["size"]), 0))
    assert len(whole) == at["size"]
    return whole


def documents(shipment):
    return {each.at.digest: json.loads(each.content) for each in shipment.documents}


def unpacked(source, manifest, into):
    for layer in manifest["layers"]:
        with tarfile.open(fileobj=io.BytesIO(content_of(source, layer)), mode="r:") as tar:
            assert {(each.uid, each.gid, each.mtime) for each in tar} == {(0, 0, 0)}
            tar.extractall(into, filter="fully_trusted")
    return into / "models"


@pytest.mark.parametrize("most", [100, 3, 0])
@pytest.mark.parametrize("name", ["fleet", "call", "decoder"])
def test_the_layers_of_an_image_are_the_bundle(name, most, tmp_path, monkeypatch):
    monkeypatch.setattr(mounted_forms, "_MOST_LAYERS", most)
    source, shipment = formed(GOLDEN / name, IMAGE)
    [manifest] = documents(shipment).values()
    assert len(manifest["layers"]) <= most + 1
    config = json.loads(content_of(source, manifest["config"]))
    assert config["rootfs"]["diff_ids"] == [each["digest"] for each in manifest["layers"]]
    assert (config["architecture"], config["os"]) == ("amd64", "linux")
    assert len(config["history"]) == len(manifest["layers"])
    models = unpacked(source, manifest, tmp_path)
    assert audited(models) == audited(GOLDEN / name)


def test_a_layer_depends_on_its_blob_alone_and_a_transfer_goes_on_in_its_middle():
    source, shipment = formed(GOLDEN / "decoder", IMAGE)
    [manifest] = documents(shipment).values()
    first = manifest["layers"][0]
    # No Python and no release of prejit may change it: registries and nodes hold it by this name.
    digest = "sha256:f5c24252084986dcdd11314906d93fcb4d46543c8ae4023241ba8718fa8bf0f7"
    assert first["digest"] == digest
    with tarfile.open(fileobj=io.BytesIO(content_of(source, first)), mode="r:") as tar:
        *folders, _ = tar.getnames()
    assert folders == ["models", "models/blobs", "models/blobs/sha256"]
    at = next(each for each in shipment.blobs if each.size > 40_000)
    whole = b"".join(source.pieces(at, 0))
    for start in (1, 1535, 1536, 2047, 2048, 2049, len(whole) - 1024, len(whole) - 1, len(whole)):
        assert b"".join(source.pieces(at, start)) == whole[start:]
    head = mounted_forms._head("blobs/sha256/" + "a" * 64, 9 << 30)
    with tarfile.open(fileobj=io.BytesIO(head + bytes(1024)), mode="r:") as tar:
        member = tar.next()
    assert (member.size, member.mtime, member.mode) == (9 << 30, 0, 0o444)


def test_each_platform_has_an_image_and_shares_the_layers_of_its_blobs(tmp_path):
    source, shipment = formed(GOLDEN / "fleet", IMAGE, ("arm64",))
    *manifests, index = documents(shipment).values()
    assert [each["platform"]["architecture"] for each in index["manifests"]] == ["arm64", "amd64"]
    assert [each["digest"] for each in index["manifests"]] == [*documents(shipment)][:-1]
    assert shipment.digest == [*documents(shipment)][-1]
    shared = [{each["digest"] for each in one["layers"]} for one in manifests]
    assert shared[0] & shared[1]
    for number, (manifest, count) in enumerate(zip(manifests, (1, 5), strict=True)):
        with Layout(unpacked(source, manifest, tmp_path / str(number))) as layout:
            root = read_root(layout)
            assert {each.digest for each in root.bundle.manifests} <= reached(layout, root)
        assert len(root.bundle.manifests) == count


@pytest.mark.parametrize("form", [IMAGE, MODELPACK])
def test_forms_are_for_registries_and_files_and_no_damaged_blob_is_pushed(form, tmp_path):
    with pytest.raises(UsageError, match=f"for the form {form}, found a bucket"):
        moved(GOLDEN / "decoder", "s3://bucket/decoder:v1", form=form)
    digest = moved(GOLDEN / "decoder", tmp_path / "form", form=form).digest
    assert moved(GOLDEN / "decoder", tmp_path / "form.tar", form=form).digest == digest
    index = json.loads((tmp_path / "form" / "index.json").read_bytes())
    assert [each["digest"] for each in index["manifests"]] == [digest]
    shutil.copytree(GOLDEN / "decoder", tmp_path / "decoder")
    blob = max((tmp_path / "decoder/blobs/sha256").iterdir(), key=lambda each: each.stat().st_size)
    blob.write_bytes(blob.read_bytes()[:-1] + b"x")
    with fake_registry() as empty:
        with pytest.raises(RejectError, match=f"expected the bytes of sha256:{blob.name}"):
            moved(tmp_path / "decoder", f"oci://{empty.host}/decoder:v1", form=form)
        assert not empty.manifests


def test_an_artifact_has_the_bundles_own_blobs_and_no_others_move(registry):
    at = f"oci://{registry.host}/call"
    uploads = registry.count("PUT", "/uploads/")
    moved(GOLDEN / "call", f"{at}:v1-pack", form=MODELPACK)
    # The config, index.json, oci-layout, and the manifests, which registries keep apart from blobs.
    assert registry.count("PUT", "/uploads/") == uploads + 3 + 5
    manifest = json.loads(registry.manifests["call", "v1-pack"])
    assert manifest["artifactType"] == "application/vnd.cncf.model.manifest.v1+json"
    config = json.loads(registry.blobs["call", manifest["config"]["digest"]])
    assert config["descriptor"] == {"name": "call"}
    assert config["modelfs"]["diffIds"] == [each["digest"] for each in manifest["layers"]]


@pytest.mark.parametrize(
    ("name", "parent"), [("fleet", "mounted"), ("call", "bundles"), ("decoder", "mounted")]
)
def test_files_side_by_side_are_the_bundle(name, parent, tmp_path):
    """As CRI-O, podman and oras lay out an artifact: its layers by their titles."""
    path = tmp_path / parent / name
    path.mkdir(parents=True)
    source, shipment = formed(GOLDEN / name, MODELPACK)
    [manifest] = documents(shipment).values()
    for layer in manifest["layers"]:
        title = layer["annotations"]["org.opencontainers.image.title"]
        assert title == layer["annotations"]["org.cncf.model.filepath"]
        (path / title).write_bytes(content_of(source, layer))
    assert audited(path) == audited(GOLDEN / name)
    blob = max(path.iterdir(), key=lambda each: each.stat().st_size)
    (path / ("a" * 64)).write_text("")
    with pytest.raises(RejectError, match="a" * 64):
        audited(path)
    (path / ("a" * 64)).unlink()
    blob.write_bytes(blob.read_bytes()[:-1] + b"x")
    with pytest.raises(RejectError, match=blob.name):
        audited(path)
