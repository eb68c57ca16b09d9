"""Checks 1 to 6, of what OCI's files say: a bundle that only one check keeps out.

What is forged here has right digests everywhere, as whoever builds bundles could make it.
"""

import dataclasses
import functools
import json

import pytest
from tests.layouts import blob, index_file, index_of, write_files

from prejit.runtime.base.files import digest_of
from prejit.runtime.base.typed_json import to_json
from prejit.runtime.errors import RejectError
from prejit.runtime.format import limits
from prejit.runtime.format.bundle_schema import Descriptor
from prejit.runtime.format.checks import oci
from prejit.runtime.format.checks.oci import NEWER_FORMAT_HINT, check_descriptor
from prejit.runtime.format.names import (
    BUNDLE_FORMAT,
    BUNDLE_NAME,
    CHAT_MEDIA_TYPE,
    FORMAT_VERSION,
    PORTABLE_MEDIA_TYPE,
    REF_NAME,
    REQUIREMENT,
    WEIGHTS_MEDIA_TYPE,
)

from .forging import PATH, reject

NEXT = str(FORMAT_VERSION + 1)


def with_index(recipe, path, change):
    index, blobs = recipe.assemble()
    plain = json.loads(index)
    change(plain)
    return write_files(path, to_json(plain), blobs)


def test_1_another_layout_version_is_rejected(bundle_dir):
    for content in (b"", b"{}", b'{"imageLayoutVersion":"1.0.1"}', b"1" * 4096):
        (bundle_dir / "oci-layout").write_bytes(content)
        assert reject(bundle_dir, "expected").path == str(bundle_dir / "oci-layout")


def test_2_another_format_says_which_side_is_older(recipe):
    """It is named even where the index has keys of that format."""
    plain = json.loads(recipe.assemble()[0])
    for written in (NEXT, "", "01", "²", "٢", "9" * 5000):
        plain["annotations"][BUNDLE_FORMAT] = written
        for beside in ({}, {"subject": {"new": 1.5}}):
            with pytest.raises(RejectError, match="expected bundle format 1, found") as caught:
                oci.check_index(to_json({**plain, **beside}), PATH)
            assert (caught.value.hint == NEWER_FORMAT_HINT) == (written == NEXT)


def annotated(name, value, *, of_target=False):
    """Change an annotation of the index or of its first target; None: it is missing."""

    def change(index):
        annotations = (index["manifests"][0] if of_target else index)["annotations"]
        annotations.update({name: value})
        if value is None:
            del annotations[name]

    return change


of_target = functools.partial(annotated, of_target=True)


def updated(**changes):
    return lambda plain: plain.update(changes)


def endless(index):
    [first, *_] = index["manifests"]
    index["manifests"] = [
        {**first, "annotations": {**first["annotations"], REF_NAME: f"t{name}"}}
        for name in range(limits.MAX_TARGETS + 1)
    ]


def at_first(**changes):
    return lambda index: index["manifests"][0].update(changes)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (annotated(BUNDLE_NAME, None), f"expected {BUNDLE_NAME}"),
        (annotated(BUNDLE_FORMAT, None), "dev.prejit.format.*found"),
        (endless, f"at most {limits.MAX_TARGETS}, found {limits.MAX_TARGETS + 1}"),
        (updated(manifests=[]), "at least one target"),
        (updated(schemaVersion=1), "OCI image index"),
        (updated(extra="key"), "unknown key 'extra'"),
        (at_first(urls=["http://elsewhere"]), "unknown key 'urls'"),
        (lambda i: i["manifests"].append(i["manifests"][0]), "each target once"),
        # 3. A target without name or requirement.
        (of_target(REF_NAME, None), "on each target"),
        (of_target(REQUIREMENT, None), "on each target"),
        (of_target(REQUIREMENT, "{}"), "expected the key"),
        (of_target(REQUIREMENT, "\udc80"), "expected JSON"),
        (of_target(REQUIREMENT, '{"jaxlib":"é"}'), "expected the key"),
        # 4. A descriptor that names no such blob.
        (at_first(mediaType="text/plain"), "expected media type"),
        (at_first(digest="sha256:../../../../etc/passwd"), "expected a sha256 digest"),
        (at_first(size=limits.MAX_MANIFEST_BYTES + 1), "expected at most 65536 bytes"),
        (at_first(size=1), "expected 1 bytes, found"),
    ],
)
def test_2_to_4_a_wrong_index(change, complaint, recipe, tmp_path):
    path = with_index(recipe, tmp_path / "b", change)
    error = reject(path, complaint)
    assert complaint.endswith("bytes, found") or error.path == str(index_file(path))


def test_3_index_and_configs_say_the_same(recipe, tmp_path):
    """Else a policy for one name would let another bundle run."""
    path = with_index(recipe.only("cpu-host"), tmp_path / "b", annotated(BUNDLE_NAME, "trusted"))
    reject(path, "expected bundle 'trusted', as the index, found 'example'")

    # The first fits this machine; by its name the loader would run the second.
    def renamed(config):
        features = ("no-such-feature", *config.requirement.cpu_features)
        needs = dataclasses.replace(config.requirement, cpu_features=features)
        return dataclasses.replace(config, target="cpu-host", requirement=needs)

    foreign = recipe.only("cpu-x86-64-v3").configured(renamed)
    targets = (*recipe.only("cpu-host").targets, *foreign.targets)
    reject(dataclasses.replace(recipe, targets=targets).write(tmp_path / "b"), "each target once")
    # Or a registry that shows the index would choose a machine on which the code dies.
    needs = json.loads(index_of(path)["manifests"][0]["annotations"][REQUIREMENT])
    unneeding = to_json({**needs, "cpu_features": []}).decode()
    for change in (of_target(REQUIREMENT, unneeding), of_target(REF_NAME, "cpu-x86-64-v2")):
        path = with_index(recipe.only("cpu-host"), tmp_path / "b", change)
        reject(path, "with the requirement of the index")


def test_a_cap_holds_at_its_edge_and_messages_are_short():
    digest = digest_of(b"")
    for size in (0, 10):
        check_descriptor(Descriptor("a", digest, size), "a", 10, PATH)
    for size in (11, -1, 1 << 64):
        with pytest.raises(RejectError, match=f"expected at most 10 bytes, found {size}"):
            check_descriptor(Descriptor("a", digest, size), "a", 10, PATH)
    error = RejectError("index.json", f"expected a type, found {'x' * 100_000}")
    assert len(str(error)) < 2_100
    assert str(error).endswith("xxx...")


def test_5_a_digest_is_checked_before_the_bytes_are_parsed(recipe, tmp_path):
    """Or the error would be one of their JSON."""
    path = recipe.only("cpu-host").write(tmp_path / "b")
    manifest = blob(path, index_of(path)["manifests"][0]["digest"])
    config = blob(path, json.loads(manifest.read_bytes())["config"]["digest"])
    for file in (manifest, config):
        content = file.read_bytes()
        file.write_bytes(b"[" + content[1:])
        assert reject(path, f"expected sha256:{file.name}, found sha256:").path == str(file)
        file.write_bytes(content)


def layer_of(manifest, media_type):
    return next(layer for layer in manifest["layers"] if layer["mediaType"] == media_type)


LARGE_CHAT = {"mediaType": CHAT_MEDIA_TYPE, "size": limits.MAX_CHAT_BYTES + 1}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (updated(schemaVersion=1), "OCI image manifest"),
        (updated(subject={}), "unknown key 'subject'"),
        (lambda m: m["config"].update(mediaType="text/plain"), "expected media type"),
        (lambda m: m["config"].update(size=limits.MAX_CONFIG_BYTES + 1), "expected at most"),
        (lambda m: m["layers"][0].update(mediaType="application/x-sh"), "unexpected layer"),
        (lambda m: m["layers"].remove(layer_of(m, PORTABLE_MEDIA_TYPE)), "layer .*stablehlo"),
        (lambda m: m["layers"][1].update(digest="sha256:x"), "expected a sha256 digest"),
        (lambda m: m["layers"][0].update(LARGE_CHAT), "at most 4194304 bytes, found 4194305"),
        (lambda m: layer_of(m, WEIGHTS_MEDIA_TYPE).update(size=(1 << 50) + 1), f"most {1 << 50} "),
    ],
)
def test_6_a_wrong_manifest(change, complaint, recipe, tmp_path):
    index, blobs = recipe.only("cpu-host").assemble()
    plain = json.loads(index)
    [descriptor] = plain["manifests"]
    manifest = json.loads(blobs.pop(descriptor["digest"]))
    change(manifest)
    content = to_json(manifest)
    descriptor |= {"digest": digest_of(content), "size": len(content)}
    blobs[descriptor["digest"]] = content
    path = write_files(tmp_path / "b", to_json(plain), blobs)
    assert reject(path, complaint).path == str(blob(path, descriptor["digest"]))
