"""`prejit verify` reaches every file of a bundle, and names those that are not the bundle's."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cryptography", reason="cryptography comes with the extra trust")

from tests.layouts import blob, change_root, entries_of, subject_of
from tests.signers import signer

from prejit.compiler.pipeline.pack.bundle_files import DESCRIPTIONS
from prejit.compiler.pipeline.pack.bundle_writing import Part, attach, remove_abandoned
from prejit.compiler.signing.bundle_signing import sign
from prejit.runtime import RejectError, load
from prejit.runtime.__main__ import main
from prejit.runtime.base.files import digest_of
from prejit.runtime.format.audit import audit, check_index_file
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.referrers import referrers
from prejit.runtime.format.root import read_root

X = np.ones((2, 16), np.float32)
PARTS, STATEMENT = DESCRIPTIONS
SIGNATURE = "application/vnd.dev.sigstore.bundle.v0.3+json"


@pytest.fixture(scope="session")
def described(recipe, tmp_path_factory):
    """A signed bundle of two targets, with list of parts and provenance."""
    path = recipe.write_described(tmp_path_factory.mktemp("described") / "example")
    sign(path, signer("a"))
    return path


@pytest.fixture
def bundle(described, tmp_path):
    return shutil.copytree(described, tmp_path / "bundle")


def audited(path):
    return audit(path, lambda *_: None)


def attached(path, kind=""):
    with Layout(path) as layout:
        found = referrers(layout, read_root(layout))
    return [each for each in found if kind in ("", each.artifact_type)]


def rejected(path, file=None):
    with pytest.raises(RejectError) as raised:
        audited(path)
    if file is not None:
        assert raised.value.path == str(file)
    assert main(["verify", str(path)]) == RejectError.exit_code
    return raised.value


def still_loads(path):
    with load(path) as loaded:
        assert np.isfinite(loaded.call("score", x=X)).all()


def test_a_sound_bundle_is_refused_or_other_spaces_pass(bundle):
    kinds = sorted(each.artifact_type for each in attached(bundle))
    assert audited(bundle).attached_count == len(kinds)
    assert {*kinds} == {PARTS, STATEMENT, SIGNATURE}
    assert main(["verify", str(bundle)]) == 0
    for name in ("index.json", "oci-layout"):
        content = (bundle / name).read_bytes()
        (bundle / name).write_bytes(content + b"\n")
        said = str(rejected(bundle, bundle / name))
        assert name != "index.json" or "found the same JSON in other bytes" in said
        (bundle / name).write_bytes(content)
    audited(bundle)


def test_a_damaged_attached_file_is_found_by_no_load(bundle, tmp_path):
    for at in (
        *(attached(bundle, PARTS)[0].layers[0], attached(bundle, STATEMENT)[0].config),
        attached(bundle, SIGNATURE)[0].descriptor,
    ):
        file = blob(bundle, at.digest)
        content = file.read_bytes()
        (tmp_path / "elsewhere").write_bytes(content)
        for damage in (
            lambda: None,
            lambda file=file: file.symlink_to(tmp_path / "elsewhere"),
            lambda file=file, content=content: file.write_bytes(content[:-1]),
            lambda file=file, content=content: file.write_bytes(content[:-1] + b"\0"),
        ):
            file.unlink(missing_ok=True)
            damage()
            rejected(bundle, file)
        still_loads(bundle)
        file.write_bytes(content)


def test_a_file_that_nothing_leads_to_is_found_by_no_load(bundle):
    for name in ("notes.txt", "blobs/other", "blobs/sha256/short", f"blobs/sha256/{'0' * 64}"):
        file = bundle / name
        for make in (
            Path.mkdir,
            lambda file: file.symlink_to(bundle / "index.json"),
            lambda file: file.write_bytes(b"x"),
        ):
            make(file)
            assert "remove it" in str(rejected(bundle, file).hint)
            still_loads(bundle)
            file.rmdir() if make is Path.mkdir else file.unlink()
    audited(bundle)


def test_an_index_json_of_another_form_is_called_what_it_is(bundle):
    whole = (bundle / "index.json").read_bytes()
    for change, said in (
        (lambda root: root["manifests"].append(root["manifests"][-1]), "expected each entry once,"),
        (lambda root: root["manifests"].pop(), "entries', found '"),
        (lambda root: root.update(annotations={"a": "b"}), r"other values of \['annotations'\]"),
    ):
        with Layout(bundle) as layout:
            root, found = read_root(layout), attached(bundle)
            change_root(bundle, change)
            with pytest.raises(RejectError, match=said):
                check_index_file(layout, root, found)
        (bundle / "index.json").write_bytes(whole)


@pytest.mark.parametrize("kind", [PARTS, STATEMENT])
def test_a_bundle_needs_what_its_build_attached(kind, bundle):
    def detach(kind):
        kept = [at for at in entries_of(bundle) if at.get("artifactType") != kind]
        change_root(bundle, lambda root: root.update(manifests=kept))
        remove_abandoned(bundle)

    detach(SIGNATURE)
    audited(bundle)  # signatures come later, and a policy asks for them
    detach(kind)
    assert f"found no {kind}" in str(rejected(bundle, bundle / "index.json"))
    still_loads(bundle)


@pytest.mark.parametrize(
    ("kind", "content", "complaint"),
    [
        (PARTS, b"{}", "bomFormat: expected CycloneDX"),
        (PARTS, b"[" * 5000, "expected JSON"),
        (STATEMENT, b'{"_type":1}', "_type: expected https://in-toto.io"),
        (SIGNATURE, b"\xff", "expected JSON"),
    ],
)
def test_a_lying_attachment_is_rejected(kind, content, complaint, bundle):
    subject = subject_of(bundle)
    attach(bundle, subject, kind, [Part(kind, content)], {})
    assert complaint in str(rejected(bundle, blob(bundle, digest_of(content))))


def test_what_refers_to_another_bundle_is_rejected(bundle):
    at = attach(bundle, subject_of(bundle), "text/x", [Part("text/plain", b"x")], {})
    for change, complaint in (
        ({"digest": digest_of(b"y")}, "as subject, found"),
        ({"size": 1}, "subject: expected"),
    ):
        manifest = json.loads(blob(bundle, at.digest).read_bytes())
        manifest["subject"] |= change
        content = json.dumps(manifest).encode()
        digest = digest_of(content)
        copy = shutil.copytree(bundle, bundle.with_name(complaint))
        blob(copy, at.digest).unlink()
        blob(copy, digest).write_bytes(content)
        name = {"org.opencontainers.image.ref.name": f"attached-{digest[7:19]}"}
        entries = entries_of(copy)
        [entry] = [each for each in entries if each.get("artifactType") == "text/x"]
        entry |= {"digest": digest, "size": len(content), "annotations": name}
        change_root(copy, lambda root, entries=entries: root.update(manifests=entries))
        assert complaint in str(rejected(copy, blob(copy, digest)))


@pytest.mark.parametrize("damage", ["", "flipped", "gone"])
def test_a_signature_by_an_older_cosign_is_checked_as_all_else(bundle, damage):
    """Older cosigns attach by a tag, `sha256-DIGEST.sig`, and not by a subject."""

    def written(media_type, content):
        digest = digest_of(content)
        blob(bundle, digest).write_bytes(content)
        return {"mediaType": media_type, "digest": digest, "size": len(content)}

    config = written("application/vnd.oci.image.config.v1+json", b'{"os":""}')
    layer = written("application/vnd.dev.cosign.simplesigning.v1+json", b'{"critical":{}}')
    media_type = "application/vnd.oci.image.manifest.v1+json"
    manifest = {"schemaVersion": 2, "config": config, "layers": [layer]}
    tagged = written(media_type, json.dumps(manifest).encode())
    entries = [*entries_of(bundle), {**tagged, "annotations": {"tag": "sha256-0.sig"}}]
    (bundle / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": entries}))
    if not damage:
        assert audited(bundle).attached_count
        return
    file = blob(bundle, layer["digest"])
    file.unlink()
    if damage == "flipped":
        file.write_bytes(b'{"critical":[]}')
    rejected(bundle, file)
    still_loads(bundle)
