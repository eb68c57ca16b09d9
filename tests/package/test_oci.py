"""Clients that know nothing of prejit take a bundle for what it is: an OCI image layout."""

import hashlib
import json
import shutil
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from oras.layout.layout import Layout
from tests.layouts import blob, index_of

from prejit.runtime import RejectError, load

NAME = "org.opencontainers.image.ref.name"
TARGETS = ("cpu-host", "cpu-x86-64-v3")
X = np.linspace(-1, 1, 2 * 16, dtype=np.float32).reshape(2, 16)
MODEL = Path(__file__).parents[1] / "format" / "v1" / "decoder"
"""A bundle with tokenizer and chat templates."""


def sha256(content):
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def named_in(layout):
    """The entries of a layout's `index.json`, by name."""
    found = json.loads((layout / "index.json").read_bytes())["manifests"]
    return {each.get("annotations", {}).get(NAME, ""): each for each in found}


def blobs_of(layout, target):
    """The digests of everything that a target's manifest leads to."""
    at = named_in(layout)[target]
    manifest = json.loads(blob(layout, at["digest"]).read_bytes())
    return [each["digest"] for each in (at, manifest["config"], *manifest["layers"])]


def test_oras_validates_the_layout_and_finds_every_blob(bundle_dir):
    layout = Layout(str(bundle_dir))
    for target in TARGETS:
        assert set(layout.get_ordered_blobs(tag=target)) == {*blobs_of(bundle_dir, target)}
    *others, last = layout.get_ordered_blobs(tag="example")
    assert last == load(bundle_dir).digest
    assert {*others} == {digest for target in TARGETS for digest in blobs_of(bundle_dir, target)}
    for digest in (*others, last):
        assert sha256(Path(layout.digest_to_blob_path(digest)).read_bytes()) == digest
    everything = (bundle_dir / "blobs" / "sha256").iterdir()
    assert {*others, last} == {f"sha256:{path.name}" for path in everything}
    assert not [path for path in bundle_dir.rglob("*") if path.is_symlink()]
    found = Layout(str(MODEL)).get_ordered_blobs(tag="cpu-x86-64-v2")
    assert set(found) == {*blobs_of(MODEL, "cpu-x86-64-v2")}
    assert len(found) == 8, "manifest, config and six layers"


# What the OCI image specification 1.1 demands, in the words of JSON Schema: descriptor.md, manifest.md,
# image-index.md, annotations.md, image-layout.md.
MEDIA_TYPE = {
    "type": "string",
    "pattern": "^[A-Za-z0-9][A-Za-z0-9!#$&^_.+-]{0,126}/[A-Za-z0-9][A-Za-z0-9!#$&^_.+-]{0,126}$",
}
REF_NAME = r"^[A-Za-z0-9]+((--|[-._:@+])[A-Za-z0-9]+)*(/[A-Za-z0-9]+((--|[-._:@+])[A-Za-z0-9]+)*)*$"
ANNOTATIONS = {
    "type": "object",
    "propertyNames": {"minLength": 1},
    "properties": {"org.opencontainers.image.ref.name": {"pattern": REF_NAME}},
    "additionalProperties": {"type": "string"},
}


def with_all(required, **optional):
    """A schema of objects that have these members and may have others."""
    optional = {"artifactType": MEDIA_TYPE, "annotations": ANNOTATIONS, **optional}
    return {"type": "object", "required": [*required], "properties": required | optional}


def document(kind, **members):
    media_type = {"const": f"application/vnd.oci.image.{kind}.v1+json"}
    return with_all({"schemaVersion": {"const": 2}, "mediaType": media_type, **members})


DESCRIPTOR = with_all(
    {
        "mediaType": MEDIA_TYPE,
        "digest": {"type": "string", "pattern": "^sha256:[a-f0-9]{64}$"},
        "size": {"type": "integer", "minimum": 0, "maximum": 2**63 - 1},
    },
    platform=with_all({"architecture": {"enum": ["amd64", "arm64"]}, "os": {"const": "linux"}}),
)
INDEX = document("index", manifests={"type": "array", "items": DESCRIPTOR})
LAYERS = {"type": "array", "minItems": 1, "items": DESCRIPTOR}
MANIFEST = document("manifest", config=DESCRIPTOR, layers=LAYERS)


@pytest.mark.parametrize("path", [None, MODEL], ids=["functions", "model"])
def test_index_and_manifests_are_as_the_specification_says(bundle_dir, path):
    bundle_dir = path or bundle_dir
    root = json.loads((bundle_dir / "index.json").read_bytes())
    index = index_of(bundle_dir)
    for content in (root, index):
        jsonschema.validate(content, INDEX)
    for descriptor in index["manifests"]:
        manifest = json.loads(blob(bundle_dir, descriptor["digest"]).read_bytes())
        jsonschema.validate(manifest, MANIFEST)
        assert manifest["artifactType"] == descriptor["artifactType"]
        # An artifact names its type, or has a config that is not the empty one: ours has both.
        assert manifest["config"]["mediaType"] != "application/vnd.oci.empty.v1+json"
    layout = json.loads((bundle_dir / "oci-layout").read_bytes())
    assert layout == {"imageLayoutVersion": "1.0.0"}
    assert {path.name for path in bundle_dir.iterdir()} == {"blobs", "index.json", "oci-layout"}


def copy_of(layout, to, *targets, indent=None, others=()):
    """A copy of some targets as skopeo makes it: the blobs, and an index of the tool's own."""
    (to / "blobs" / "sha256").mkdir(parents=True, exist_ok=True)
    manifests = [*others]
    for name in targets:
        kept = {key: named_in(layout)[name][key] for key in ("mediaType", "digest", "size")}
        manifests.append({**kept, "annotations": {NAME: f"{name}-copy"}})
        for digest in blobs_of(layout, name):
            shutil.copyfile(blob(layout, digest), blob(to, digest))
    written = {"schemaVersion": 2, "manifests": manifests}
    (to / "index.json").write_text(json.dumps(written, indent=indent))
    (to / "oci-layout").write_text(json.dumps({"imageLayoutVersion": "1.0.0"}, indent=indent))
    return to


def test_a_copy_of_one_target_is_a_bundle_of_that_target(bundle_dir, tmp_path, ran):
    last = set()
    for indent in (None, 2):
        copy = copy_of(bundle_dir, tmp_path / f"{indent}", "cpu-x86-64-v3", indent=indent)
        said = ran("verify", copy).out
        assert "ok: 1 targets" in said
        last.add(said.splitlines()[-1])
    assert len(last) == 1, "one digest"
    both = copy_of(bundle_dir, tmp_path / "both", *TARGETS)
    assert load(both, on_mismatch="error").target == "cpu-host"


def test_a_copy_is_checked_as_a_bundle_is(bundle_dir, make_recipe, tmp_path):
    for digest in blobs_of(bundle_dir, "cpu-host"):
        copy = copy_of(bundle_dir, tmp_path / digest[-9:], "cpu-host")
        damaged = blob(copy, digest)
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
        with pytest.raises(RejectError):
            load(copy)
    mixed = copy_of(bundle_dir, tmp_path / "mixed", "cpu-host")
    other = make_recipe(name="other").write(tmp_path / "other")
    copy_of(other, mixed, "cpu-x86-64-v3", others=named_in(mixed).values())
    with pytest.raises(RejectError, match=r"targets of one bundle, found \w+ of format"):
        load(mixed)
