"""`index.json` of a layout, as prejit and as other tools write it: which bundle it holds."""

import contextlib
import json
import random
from dataclasses import replace

import pytest
from tests.extent import examples
from tests.layouts import INDEX, blob, change_root, entries_of, index_file, write_root

from prejit.runtime.base.files import digest_of
from prejit.runtime.base.typed_json import to_json
from prejit.runtime.errors import RejectError
from prejit.runtime.format.audit import audit
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.names import ARTIFACT_TYPE, MANIFEST_MEDIA_TYPE, REF_NAME
from prejit.runtime.format.root import read_root
from prejit.runtime.loader import load

ZEROS = "sha256:" + "0" * 64


def root_of(path):
    with Layout(path) as layout:
        return read_root(layout)


def rejected(path, complaint):
    with pytest.raises(RejectError, match=complaint) as caught:
        root_of(path)
    return caught.value


def names(root):
    return [(at.annotations or {})[REF_NAME] for at in root.bundle.manifests]


def test_a_bundle_is_named_by_the_digest_of_its_index(bundle_dir):
    root = root_of(bundle_dir)
    content = index_file(bundle_dir).read_bytes()
    assert root.digest == digest_of(content) == load(bundle_dir).digest
    assert (root.subject.digest, root.subject.size) == (root.digest, len(content))
    assert root.path == str(index_file(bundle_dir))
    assert names(root) == ["cpu-host", "cpu-x86-64-v3"]
    listed = [at["annotations"][REF_NAME] for at in entries_of(bundle_dir)[1:]]
    assert listed == names(root), "tools copy a target by its name"
    assert root.others == ()
    (bundle_dir / "index.json").write_bytes(content)
    root = root_of(bundle_dir)
    assert (root.digest, root.subject) == (digest_of(content), None)


def with_keys_of_others(path, found):
    found = [{**each, "urls": [], "data": "e30=", "x": 1.5} for each in found]
    root = {"schemaVersion": 2, "manifests": found, "annotations": {"a": "b"}, "subject": None}
    (path / "index.json").write_text(json.dumps(root, indent=2))
    (path / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}\n')


def with_strangers(path, found):
    """Entries that are not prejit's, and whose blobs are not here."""
    stranger = {"mediaType": MANIFEST_MEDIA_TYPE, "digest": ZEROS, "size": 5}
    other = {"mediaType": "text/plain", "digest": "sha256:" + "1" * 64, "size": 1 << 60}
    huge = {"mediaType": INDEX, "digest": "sha256:" + "2" * 64, "size": 1 << 40}
    typed = {**stranger, "artifactType": "application/vnd.cyclonedx+json"}
    write_root(path, [typed, *found, stranger, other, huge])


def as_skopeo(path, found):
    write_root(path, [{k: each[k] for k in ("mediaType", "digest", "size")} for each in found])


@pytest.mark.parametrize(
    "write",
    [
        as_skopeo,
        with_keys_of_others,
        with_strangers,
        lambda path, found: write_root(path, found[:1]),
    ],
)
def test_whoever_writes_it_it_is_the_same(write, bundle_dir):
    before = root_of(bundle_dir)
    write(bundle_dir, entries_of(bundle_dir))
    after = root_of(bundle_dir)
    assert (after.digest, after.bundle) == (before.digest, before.bundle)
    assert load(bundle_dir).digest == before.digest
    if write is with_strangers:
        with pytest.raises(RejectError, match="No such file"):
            audit(bundle_dir, lambda *_: None)
    else:
        assert audit(bundle_dir, lambda *_: None).digest == before.digest


def test_a_pull_of_one_target_keeps_the_name_of_the_bundle(bundle_dir):
    """The index has both targets, index.json one, and only its files are there."""
    digest = load(bundle_dir).digest
    bundle, *targets = entries_of(bundle_dir)
    [gone] = [each for each in targets if each["annotations"][REF_NAME] == "cpu-host"]
    manifest = json.loads(blob(bundle_dir, gone["digest"]).read_bytes())
    blob(bundle_dir, manifest["config"]["digest"]).unlink()
    blob(bundle_dir, gone["digest"]).unlink()
    for listed in ([bundle, *targets], [bundle]):  # what is listed and not here is damage
        write_root(bundle_dir, listed)
        with pytest.raises(RejectError, match="No such file"):
            load(bundle_dir)
    write_root(bundle_dir, [bundle, *(each for each in targets if each is not gone)])
    assert names(root_of(bundle_dir)) == ["cpu-x86-64-v3"]
    loaded = load(bundle_dir, on_mismatch="error")
    assert (loaded.digest, loaded.target) == (digest, "cpu-x86-64-v3")
    with pytest.raises(RejectError, match="expected files of the bundle alone"):
        audit(bundle_dir, lambda *_: None)
    for at in manifest["layers"]:
        if at["mediaType"].endswith("executables.v1+zstd"):  # targets share all others
            blob(bundle_dir, at["digest"]).unlink()
    found = audit(bundle_dir, lambda *_: None)
    assert (found.digest, found.target_count) == (digest, 1)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda root: root.update(schemaVersion=1), "expected an OCI image index"),
        (lambda root: root.update(manifests=[]), "expected 1 to 2048 entries, found 0"),
        (lambda r: r.update(manifests=r["manifests"][:1] * 2049), "1 to 2048 entries, found 2049"),
        (lambda root: root.update(manifests=[[]]), r"expected media type, .*, found \[\]"),
        (lambda root: root["manifests"][0].update(digest="sha512:0"), "sha256 digest"),
        (lambda root: root["manifests"][0].update(size=-1), "and size"),
        (lambda root: root["manifests"][0].update(size=5), "expected 5 bytes, found"),
        (lambda root: root["manifests"][0].update(size=1 << 62), "expected at most 4194304 bytes"),
        (lambda root: root["manifests"][0].update(digest=ZEROS), "expected a file, found"),
        (lambda root: root["manifests"][0].update(annotations={"a": 1}), "expected annotations"),
        (lambda root: root["manifests"][1].update(size=5), "media type and size of the bundle"),
        (lambda root: root["manifests"][1].update(mediaType=INDEX), "expected one bundle, found 2"),
        (lambda root: root["manifests"][1].update(digest=ZEROS), "expected targets of the bundle"),
    ],
)
def test_an_index_json_that_leads_to_no_bundle_is_rejected(change, complaint, bundle_dir):
    change_root(bundle_dir, change)
    rejected(bundle_dir, complaint)


def test_two_bundles_or_another_format_are_rejected(bundle_dir, make_recipe, tmp_path, recipe):
    other = make_recipe(score_scale=2.0).write(tmp_path / "other")
    for file in (other / "blobs" / "sha256").iterdir():
        (bundle_dir / "blobs" / "sha256" / file.name).write_bytes(file.read_bytes())
    write_root(bundle_dir, [*entries_of(bundle_dir)[:1], *entries_of(other)[:1]])
    error = rejected(bundle_dir, "expected one bundle, found 2: sha256:")
    assert "a directory of its own" in (error.hint or "")
    newer = recipe.only("cpu-host").configured(lambda config: replace(config, format=2))
    path = newer.write(tmp_path / "b")
    write_root(path, entries_of(path)[1:])
    assert "upgrade" in (rejected(path, "expected bundle format 1, found '2'").hint or "")


def test_entries_of_others_are_no_bundle_and_not_read_without_end(bundle_dir):
    """Each may be an index of 1 MiB, so that reading all would take gigabytes."""

    def added(media_type, content):
        blob(bundle_dir, digest_of(content)).write_bytes(content)
        return {"mediaType": media_type, "digest": digest_of(content), "size": len(content)}

    large = [added(INDEX, b"%d" % number + b" " * ((1 << 20) - 1)) for number in range(5)]
    write_root(bundle_dir, [*large, *entries_of(bundle_dir)])
    rejected(bundle_dir, "expected at most 4194304 bytes of indexes")
    other = to_json({"schemaVersion": 2, "mediaType": MANIFEST_MEDIA_TYPE})
    write_root(bundle_dir, [added(MANIFEST_MEDIA_TYPE, other)])
    rejected(bundle_dir, f"expected an entry of {ARTIFACT_TYPE}, found none")


def test_a_changed_byte_of_index_json_changes_no_bundle(bundle_dir):
    """It is rejected, or the same bundle is read: what is in it leads to checked bytes or to nothing."""
    before, file = root_of(bundle_dir), bundle_dir / "index.json"
    content, generator, harmless = file.read_bytes(), random.Random(1), 0
    for at in range(0, len(content), examples(3, 1)):
        for changed in {content[at] ^ 1 << generator.randrange(8), generator.randrange(256)}:
            file.write_bytes(content[:at] + bytes([changed]) + content[at + 1 :])
            with contextlib.suppress(RejectError):
                after = root_of(bundle_dir)
                assert (after.digest, after.bundle) == (before.digest, before.bundle)
                harmless += 1
    assert harmless, "names in it have no meaning"
