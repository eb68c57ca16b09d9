"""A build replaces an older bundle of its own name and nothing else, and a killed writer harms none."""

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
from tests.layouts import GOLDEN, INDEX, blob, subject_of, write_root
from tests.threads import in_threads

from prejit.compiler import build
from prejit.compiler.manifest.manifest import Manifest, Program
from prejit.compiler.pipeline.pack import bundle_writing as writing
from prejit.compiler.pipeline.pack.bundle_files import assemble
from prejit.compiler.pipeline.pack.bundle_writing import (
    Part,
    attach,
    check_place,
    remove_abandoned,
    write_layout,
)
from prejit.compiler.recording.jax_cache_packing import RecordedTarget, packed
from prejit.runtime.base.files import digest_of
from prejit.runtime.errors import RejectError, StoreError, UsageError
from prejit.runtime.format import limits
from prejit.runtime.format.audit import audit
from prejit.runtime.format.bundle_schema import Descriptor
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.referrers import referrers
from prejit.runtime.format.root import read_root
from prejit.runtime.loader import load
from prejit.runtime.machine.fingerprint import Requirement

NAME = "chunks"


def built(path):
    shutil.copytree(GOLDEN / NAME, path)


def recorded(path):
    target = RecordedTarget(Requirement("cpu", "x86_64", (), "1.2.3"), {}, {})
    write_layout(path, *assemble(NAME, [packed(target, NAME)]))


def foreign(path):
    built(path)
    (path / "index.json").write_text('{"schemaVersion": 2, "manifests": []}')


def other_files(path):
    path.mkdir()
    (path / "mine.txt").write_text("mine")


def contents(path):
    return {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}


@pytest.mark.parametrize(
    ("put", "name", "found"),
    [
        (built, "other", f"the bundle {NAME!r}"),
        (recorded, NAME, "a recording of `prejit record`"),
        (foreign, NAME, "what another tool wrote"),
        (other_files, NAME, "'mine.txt'"),
    ],
)
def test_what_no_build_wrote_stays(put, name, found, tmp_path):
    put(tmp_path / name)
    before = contents(tmp_path)
    programs = [Program("p", fn=abs, args=["float32[3]"])]
    manifest = Manifest(name, programs=programs, targets=["cpu-host"])
    with pytest.raises(UsageError, match=f"{name}: expected no bundle .*found {found}") as raised:
        build(manifest, tmp_path, cache=tmp_path.with_name("cache"), quiet=True)
    assert "-o DIR" in raised.value.hint
    assert contents(tmp_path) == before


def test_a_bundle_is_no_directory_of_bundles(tmp_path):
    built(tmp_path / NAME)
    with pytest.raises(UsageError, match=r"expected a directory of bundles .* found a bundle"):
        check_place(NAME, tmp_path / NAME)


def test_an_older_bundle_may_be_replaced(tmp_path):
    check_place(NAME, tmp_path)
    built(tmp_path / NAME)
    check_place(NAME, tmp_path)
    for damaged in ("", '{"manifests": [', '{"manifests": [1]}'):
        (tmp_path / NAME / "index.json").write_text(damaged)
        check_place(NAME, tmp_path)


TYPE = "application/vnd.example+json"
NOTES = {"org.example.note": "a note"}
MANIFEST = "application/vnd.oci.image.manifest.v1+json"


def targets_of(path):
    with Layout(path) as layout:
        found = read_root(layout).bundle.manifests
    return {(at.annotations or {})["org.opencontainers.image.ref.name"]: at for at in found}


def attached(path, digest=None):
    with Layout(path) as layout:
        return referrers(layout, read_root(layout), digest)


def described(at):
    return {"mediaType": at.mediaType, "digest": at.digest, "size": at.size}


def attach_text(path, subject, text="signed"):
    return attach(path, subject, TYPE, [Part(TYPE, text.encode())], NOTES)


def test_what_is_attached_is_found_and_as_oci_says(bundle_dir):
    bundle, target = subject_of(bundle_dir), targets_of(bundle_dir)["cpu-host"]
    before = load(bundle_dir).digest
    title = {"org.opencontainers.image.title": "signature"}
    of_bundle = attach(bundle_dir, bundle, TYPE, [Part(TYPE, b"signed", title)], NOTES)
    of_target = attach_text(bundle_dir, target)
    of_referrer = attach_text(bundle_dir, of_bundle)
    for subject, expected in ((bundle, of_bundle), (target, of_target), (of_bundle, of_referrer)):
        [found] = attached(bundle_dir, subject.digest)
        assert found.descriptor == expected
        assert (found.artifact_type, found.annotations) == (TYPE, NOTES)
    assert len(attached(bundle_dir)) == 3
    assert load(bundle_dir).digest == audit(bundle_dir, lambda *_: None).digest == before
    [first] = attached(bundle_dir, bundle.digest)
    assert blob(bundle_dir, first.layers[0].digest).read_bytes() == b"signed"
    assert blob(bundle_dir, first.config.digest).read_bytes() == b"{}"
    empty = "application/vnd.oci.empty.v1+json"
    signed = {"mediaType": TYPE, "digest": digest_of(b"signed"), "size": 6, "annotations": title}
    assert json.loads(blob(bundle_dir, of_bundle.digest).read_bytes()) == {
        **{"schemaVersion": 2, "mediaType": MANIFEST, "artifactType": TYPE, "annotations": NOTES},
        "config": {"mediaType": empty, "digest": digest_of(b"{}"), "size": 2},
        "layers": [signed],
        "subject": described(bundle),
    }
    entries = json.loads((bundle_dir / "index.json").read_bytes())["manifests"]
    [listed] = [each for each in entries if each["digest"] == of_bundle.digest]
    name = {"org.opencontainers.image.ref.name": f"attached-{of_bundle.digest[7:19]}"}
    assert (listed["artifactType"], listed["annotations"]) == (TYPE, name)


def test_attaching_again_changes_nothing_and_at_once_loses_nothing(bundle_dir):
    def inodes():
        return {file: file.stat().st_ino for file in bundle_dir.rglob("*") if file.is_file()}

    subject = subject_of(bundle_dir)
    first = attach_text(bundle_dir, subject, "0")
    before = inodes()
    assert attach_text(bundle_dir, subject, "0") == first
    assert inodes() == before
    blob(bundle_dir, first.digest).unlink()  # and mends what is gone
    attach_text(bundle_dir, subject, "0")
    assert len(attached(bundle_dir, subject.digest)) == 1
    in_threads(8, lambda number: attach_text(bundle_dir, subject, str(number)))
    found = attached(bundle_dir, subject.digest)
    texts = {blob(bundle_dir, each.layers[0].digest).read_bytes() for each in found}
    assert texts == {b"%d" % number for number in range(8)}


def test_whoever_is_killed_attaches_all_or_nothing(bundle_dir, tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    digest, outcomes = load(bundle_dir).digest, list[int]()
    for limit in range(100):
        path, steps = Path(shutil.copytree(bundle_dir, tmp_path / str(limit))), iter(range(limit))

        def stepping(real, steps=steps):
            def step(*args, **kwargs):
                if next(steps, None) is None:
                    raise Killed
                return real(*args, **kwargs)

            return step

        with monkeypatch.context() as patch, suppress(Killed):
            for name in ("replace", "fsync", "unlink"):
                patch.setattr(os, name, stepping(getattr(os, name)))
            attach_text(path, subject_of(bundle_dir))
        outcomes.append(len(attached(path)))
        assert load(path).digest == digest
        attach_text(path, subject_of(path), "another")  # whoever writes next removes what is left
        remove_abandoned(path)
        assert audit(path, lambda *_: None).digest == digest
        if next(steps, None) is not None:
            break
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {0, 1}


def test_a_full_disk_loses_nothing(bundle_dir, monkeypatch):
    subject = subject_of(bundle_dir)
    attach_text(bundle_dir, subject)
    write = writing.write_file

    def failing(path, content):
        if path.name == "index.json":
            raise OSError(28, "No space left on device")
        write(path, content)

    monkeypatch.setattr(writing, "write_file", failing)
    with pytest.raises(StoreError, match="No space left"):
        attach_text(bundle_dir, subject, "another")
    assert len(attached(bundle_dir)) == 1
    assert load(bundle_dir).call("tick") == 7


def test_what_is_gone_gets_nothing(bundle_dir, recipe, make_recipe):
    subject = subject_of(bundle_dir)
    stranger = Descriptor(subject.mediaType, digest_of(b""), 0)
    with pytest.raises(UsageError, match="expected the bundle or one of its targets, found no"):
        attach_text(bundle_dir, stranger)
    text = {"a": "x" * limits.MAX_MANIFEST_BYTES}
    with pytest.raises(UsageError, match="expected a manifest of at most 65536 bytes"):
        attach(bundle_dir, subject, TYPE, [Part(TYPE, b"")], text)
    assert attached(bundle_dir) == ()
    attach_text(bundle_dir, subject)
    [found] = attached(bundle_dir)
    blob(bundle_dir, found.layers[0].digest).unlink()
    write_layout(bundle_dir, *recipe.assemble())
    assert attached(bundle_dir) == ()
    write_layout(bundle_dir, *make_recipe(score_scale=2.0).assemble())
    with pytest.raises(UsageError, match=f"found no {subject.digest}"):
        attach_text(bundle_dir, subject)


def test_an_index_json_of_another_tool_keeps_what_it_has(bundle_dir):
    file = bundle_dir / "index.json"
    root = json.loads(file.read_bytes())
    root["annotations"] = {"org.example": "kept"}
    root["manifests"][0]["urls"] = ["kept"]
    file.write_text(json.dumps(root, indent=1))
    attach_text(bundle_dir, subject_of(bundle_dir))
    after = json.loads(file.read_bytes())
    assert after["annotations"] == root["annotations"]
    assert after["manifests"][:-1] == root["manifests"]


def test_another_bundle_keeps_what_refers_to_its_target(bundle_dir, recipe):
    """Its signature is right: the target is the same."""
    attach_text(bundle_dir, subject_of(bundle_dir), "bundle")
    kept = attach_text(bundle_dir, targets_of(bundle_dir)["cpu-host"], "host")
    of_kept = attach_text(bundle_dir, kept)
    attach_text(bundle_dir, targets_of(bundle_dir)["cpu-x86-64-v3"], "v3")
    index, blobs = recipe.only("cpu-host").assemble()
    write_layout(bundle_dir, index, blobs)
    found = attached(bundle_dir)
    assert {each.descriptor.digest for each in found} == {kept.digest, of_kept.digest}
    files = {file.name for file in (bundle_dir / "blobs" / "sha256").iterdir()}
    parts = [at for each in found for at in (each.descriptor, each.config, *each.layers)]
    digests = (*blobs, digest_of(index), *(at.digest for at in parts))
    assert files == {each.removeprefix("sha256:") for each in digests}


def listed(path, subject, fields=(), content=None, **changes):
    """Attach a manifest with other fields, or any bytes, and list it in `index.json` whatever it says."""
    config = {"mediaType": TYPE, "digest": digest_of(b"{}"), "size": 2}
    plain = {"schemaVersion": 2, "config": config, "layers": [], "subject": subject}
    content = json.dumps(plain | dict(fields)).encode() if content is None else content
    blob(path, digest_of(content)).write_bytes(content)
    at = {"mediaType": MANIFEST, "digest": digest_of(content), "size": len(content)}
    root = json.loads((path / "index.json").read_bytes())
    write_root(path, [*root["manifests"], {**at, "artifactType": TYPE, **changes}])


def test_other_entries_are_passed(bundle_dir):
    subject = described(subject_of(bundle_dir))
    index = (bundle_dir / "index.json").read_bytes()
    for refers, changes in (
        (subject, {"mediaType": INDEX}),
        (subject, {"size": limits.MAX_MANIFEST_BYTES + 1}),
        (None, {}),
    ):
        listed(bundle_dir, refers, **changes)
        assert attached(bundle_dir) == ()
    assert load(bundle_dir).call("tick") == 7
    (bundle_dir / "index.json").write_bytes(index)
    listed(bundle_dir, subject)  # without an artifact type it has that of its config
    [found] = attached(bundle_dir)
    assert (found.artifact_type, found.annotations) == (TYPE, {})


def test_a_damaged_referrer_is_rejected_where_it_is_read_and_loads(bundle_dir):
    subject, index = described(subject_of(bundle_dir)), (bundle_dir / "index.json").read_bytes()
    for fields, content, complaint in (
        ({"layers": None}, None, "expected a manifest with layers"),
        ({"artifactType": 5}, None, "expected a manifest with layers"),
        ({"annotations": {"a": 5}}, None, "expected annotations as text"),
        ({"subject": "sha256:0"}, None, "expected media type, sha256 digest and size"),
        *(({}, damaged, "expected") for damaged in (b"[]", b"[" * 60000, b"\xff")),
    ):
        listed(bundle_dir, subject, fields, content)
        with pytest.raises(RejectError, match=complaint):
            attached(bundle_dir)
        assert load(bundle_dir).call("tick") == 7
        (bundle_dir / "index.json").write_bytes(index)
