"""Nothing of a bundle is loaded before every policy allows it, however the bundle came there.

A policy can demand a signed provenance, with builder, source and materials, and a signed list of parts.
"""

import json
import shutil

import numpy as np
import pytest
from tests.layouts import GOLDEN, blob, entries_of, index_of, subject_of, write_root
from tests.signers import key_table, signer, write_policy

from prejit.compiler.pipeline.pack.bundle_writing import Part, attach
from prejit.compiler.signing.bundle_signing import sign
from prejit.compiler.signing.channels import release_bundle, rotate_keys
from prejit.runtime import load
from prejit.runtime.__main__ import main
from prejit.runtime.base import process_facts
from prejit.runtime.base.files import digest_of
from prejit.runtime.errors import PolicyError, RejectError, UntrustedError, UntrustedWarning
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.names import PARTS_MEDIA_TYPE, SIGNATURE_MEDIA_TYPE
from prejit.runtime.format.referrers import referrers
from prejit.runtime.format.root import read_root
from prejit.runtime.recorded.recorded_bundle import open_recorded
from prejit.runtime.trust.decision import Description, missing_descriptions
from prejit.runtime.trust.policy import ProvenanceRule, Rule, TrustedKey
from prejit.runtime.trust.signed_statements import PROVENANCE_PREDICATE, SignedSubject, Statement

X = np.ones((2, 16), np.float32)
KEYS = key_table("a") + key_table("b")


def rule(text='keys = ["a"]', names='["example"]'):
    return f"[[rules]]\nnames = {names}\n{text}\n"


@pytest.fixture
def policy(tmp_path):
    return write_policy(tmp_path / "trust.toml", KEYS, rule())


def case_of(bundle, policy):
    with pytest.raises(UntrustedError) as raised:
        load(bundle, trust=policy)
    assert raised.value.exit_code == 5
    return raised.value.case


def runs(bundle, policy):
    load(bundle, trust=policy).close()


def released(file, bundle, key="a"):
    return release_bundle(file, bundle, "stable", [signer(key)], 1)


def rotated(file, to, *by):
    for name in to:
        file.with_name(name).write_text(signer(name).public.pem)
    keys = [file.with_name(name) for name in to]
    rotate_keys(file, "stable", keys, 1, [signer(name) for name in by], 1)


def signatures(bundle, digest=None):
    with Layout(bundle) as layout:
        return referrers(layout, read_root(layout), digest)


def test_no_stripped_and_no_unsigned_bundle_is_opened(bundle_dir, policy):
    before = entries_of(bundle_dir)
    signed = sign(bundle_dir, signer("a"))
    assert (signed.digest, signed.added) == (subject_of(bundle_dir).digest, 3)  # and two targets
    runs(bundle_dir, policy)
    write_root(bundle_dir, before)
    assert case_of(bundle_dir, policy) == "unsigned"
    for target in index_of(bundle_dir)["manifests"]:
        manifest = json.loads(blob(bundle_dir, target["digest"]).read_bytes())
        for at in (manifest["config"], *manifest["layers"]):
            blob(bundle_dir, at["digest"]).unlink(missing_ok=True)
    assert case_of(bundle_dir, policy) == "unsigned"
    with pytest.raises(RejectError, match="expected a file"):  # they are really gone
        load(bundle_dir)


def test_no_policy_loosens_another_and_a_missing_one_is_an_error(bundle_dir, tmp_path, monkeypatch):
    write_policy(process_facts.SYSTEM_POLICY, KEYS, rule())
    loose = write_policy(tmp_path / "loose.toml", rule('level = "skip"', '["*"]'))
    monkeypatch.setenv("PREJIT_TRUST", str(loose))
    for given in (None, loose):
        assert case_of(bundle_dir, given) == "unsigned"
    sign(bundle_dir, signer("a"))
    runs(bundle_dir, loose)
    with pytest.raises(PolicyError, match="cannot read"):
        load(bundle_dir, trust=tmp_path / "gone.toml")
    process_facts.SYSTEM_POLICY.unlink()
    process_facts.SYSTEM_POLICY.symlink_to("nowhere")
    with pytest.raises(PolicyError, match="cannot read"):
        load(bundle_dir)


def test_recorded_bundles_are_checked_and_audit_warns_and_runs(bundle_dir, tmp_path, monkeypatch):
    audit = write_policy(tmp_path / "audit.toml", KEYS, rule('level = "audit"\nkeys = ["a"]'))
    with pytest.warns(UntrustedWarning, match=r"reports about target cpu-\S+ \(unsigned\)"):
        runs(bundle_dir, audit)
    bundle = shutil.copytree(GOLDEN / "recorded", tmp_path / "recorded")
    name = index_of(bundle)["annotations"]["dev.prejit.name"]
    policy = write_policy(tmp_path / "t.toml", KEYS, rule(names=json.dumps([name])))
    monkeypatch.setenv("PREJIT_TRUST", str(policy))
    with pytest.raises(UntrustedError):
        open_recorded(bundle)
    sign(bundle, signer("a"))
    open_recorded(bundle)


def one_target(bundle, to, *, signed):
    """Copy the first target as a tool does, with or without what refers to it."""
    shutil.copytree(bundle, to)
    target = index_of(bundle)["manifests"][0]
    kept = [entry for entry in entries_of(bundle) if entry["digest"] == target["digest"]]
    if signed:
        found = {each.descriptor.digest for each in signatures(bundle, target["digest"])}
        assert found
        kept += [entry for entry in entries_of(bundle) if entry["digest"] in found]
    write_root(to, kept)
    return to


def test_a_signature_goes_with_a_target_and_to_no_other(bundle_dir, tmp_path, policy, make_recipe):
    sign(bundle_dir, signer("a"))
    runs(one_target(bundle_dir, tmp_path / "signed", signed=True), policy)
    assert case_of(one_target(bundle_dir, tmp_path / "bare", signed=False), policy) == "unsigned"
    sign(bundle_dir, signer("a"))
    forged = make_recipe(score_scale=2.0).write(tmp_path / "forged")
    for each in signatures(bundle_dir):
        content = blob(bundle_dir, each.layers[0].digest).read_bytes()
        with Layout(forged) as layout:
            root = read_root(layout)
        for subject in (root.subject, *root.bundle.manifests):
            part = Part(SIGNATURE_MEDIA_TYPE, content)
            attach(forged, subject, SIGNATURE_MEDIA_TYPE, [part], {})
    assert case_of(forged, policy) == "other-subject"


def test_a_damaged_signature_does_not_count_and_a_manifest_is_damage(bundle_dir, policy):
    sign(bundle_dir, signer("a"))
    damaged = signatures(bundle_dir)
    for at in (*(each.layers[0] for each in damaged), damaged[0].descriptor):
        file = blob(bundle_dir, at.digest)
        file.write_bytes(file.read_bytes()[:-1] + b" ")
        if at is damaged[-1].layers[0]:
            assert case_of(bundle_dir, policy) == "referrer-damaged"
    with pytest.raises(RejectError) as raised:
        load(bundle_dir, trust=policy)
    assert not isinstance(raised.value, UntrustedError)


def test_what_is_attached_as_a_signature_and_is_none_is_ignored(bundle_dir, policy):
    signed = shutil.copytree(bundle_dir, bundle_dir.with_name("signed"))
    sign(signed, signer("a"))
    for case, *parts in (
        ("referrer-layers", Part("text/plain", b"x")),
        ("referrer-layers", Part(SIGNATURE_MEDIA_TYPE, b"x"), Part(SIGNATURE_MEDIA_TYPE, b"y")),
        ("bundle-json", Part(SIGNATURE_MEDIA_TYPE, b"x")),
        ("bundle-json-size", Part(SIGNATURE_MEDIA_TYPE, bytes(2 << 20))),
    ):
        copy = shutil.copytree(bundle_dir, bundle_dir.with_name(f"{len(parts)}-{case}"))
        for path in (copy, signed):
            attach(path, subject_of(path), SIGNATURE_MEDIA_TYPE, parts, {})
        assert case_of(copy, policy) == case
        runs(signed, policy)


def test_signatures_without_end_are_not_all_read(bundle_dir, policy):
    sign(bundle_dir, signer("a"))
    found = entries_of(bundle_dir)
    [mine] = [each.descriptor.digest for each in signatures(bundle_dir, found[0]["digest"])]
    entry = next(entry for entry in found if entry["digest"] == mine)
    kept = [entry for entry in found if entry["artifactType"] != SIGNATURE_MEDIA_TYPE]
    junk = [{**entry, "digest": f"sha256:{number:064x}"} for number in range(256)]
    write_root(bundle_dir, [*kept, entry, *junk[1:]])
    with pytest.raises(RejectError, match="expected a file"):  # they are listed and not there
        load(bundle_dir, trust=policy)
    small = json.dumps({"schemaVersion": 2, "mediaType": entry["mediaType"]}).encode()
    for number, each in enumerate(junk):
        content = small + b" " * number
        each["digest"], each["size"] = digest_of(content), len(content)
        blob(bundle_dir, each["digest"]).write_bytes(content)
    write_root(bundle_dir, [*kept, entry, *junk])
    runs(bundle_dir, policy)
    write_root(bundle_dir, [*kept, *junk, entry])
    assert case_of(bundle_dir, policy) == "unsigned"


def test_a_channel_goes_forward_and_never_down(bundle_dir, make_recipe, tmp_path):
    newer = make_recipe(score_scale=2.0).write(tmp_path / "newer")
    policy, file = channel_policy(tmp_path / "trust.toml"), tmp_path / "stable.json"
    assert case_of(bundle_dir, policy) == "channel-missing"
    assert released(file, bundle_dir) == 1
    first = file.read_bytes()
    runs(bundle_dir, policy)
    assert case_of(newer, policy) == "channel-other"
    assert released(file, newer) == 2
    runs(newer, policy)
    assert case_of(bundle_dir, policy) == "channel-other"
    file.write_bytes(first)  # replayed
    assert {case_of(each, policy) for each in (bundle_dir, newer)} == {"channel-rollback"}
    assert (released(file, newer), released(file, bundle_dir)) == (2, 3)
    runs(bundle_dir, policy)  # back, by a higher version


def channel_policy(path, keys='["a"]', more=""):
    path.parent.mkdir(exist_ok=True)
    stable = path.parents[1] if path.parent.name == "moved" else path.parent
    return write_policy(
        path,
        KEYS,
        rule('channel = "stable"'),
        f'[channels.stable]\nfile = "{stable / "stable.json"}"\nkeys = {keys}\n{more}',
    )


@pytest.mark.parametrize(
    ("place", "keys"), [("moved/c10.toml", '["a"]'), ("trust.toml", '["b", "a"]')]
)
def test_a_policy_that_is_renamed_moved_or_edited_goes_not_back(bundle_dir, tmp_path, place, keys):
    file, contents = tmp_path / "stable.json", []
    policy = channel_policy(tmp_path / "trust.toml")
    other = channel_policy(tmp_path / place, keys)
    for change in (
        lambda: released(file, bundle_dir),
        lambda: released(file, bundle_dir),
        lambda: rotated(file, ["b"], "a", "b"),
        lambda: released(file, bundle_dir, "b"),
    ):
        change()
        contents.append(file.read_bytes())
    for newest in (1, 3):  # a release, then a rotation and a release of its keys
        file.write_bytes(contents[newest])
        channel_policy(policy)
        runs(bundle_dir, policy)
        channel_policy(other, keys)
        for older in contents[:newest]:
            file.write_bytes(older)
            assert case_of(bundle_dir, other) in ("channel-rollback", "channel-signature")
        file.write_bytes(contents[newest])
        runs(bundle_dir, other)


def test_a_stolen_key_rotates_nothing_under_a_renamed_one(bundle_dir, tmp_path):
    """The thief of the first key signs other keys of the version that the machine has accepted."""
    file = tmp_path / "stable.json"
    released(file, bundle_dir)
    first = file.read_bytes()
    rotated(file, ["b"], "a", "b")
    runs(bundle_dir, channel_policy(tmp_path / "trust.toml"))
    file.write_bytes(first)
    rotated(file, ["thief"], "a", "thief")
    for _ in range(3):
        released(file, bundle_dir, "thief")
    assert case_of(bundle_dir, channel_policy(tmp_path / "c10.toml")) == "channel-two-keys"


def test_a_vendor_of_the_same_name_does_not_block(bundle_dir, tmp_path):
    file = tmp_path / "stable.json"
    for _ in range(3):
        released(file, bundle_dir, "b")
    # The other vendor names our key among its own, which does not make it ours.
    rotated(file, ["a", "b"], "b")
    runs(bundle_dir, channel_policy(tmp_path / "theirs.toml", '["b"]'))
    file.unlink()
    released(file, bundle_dir)
    runs(bundle_dir, channel_policy(tmp_path / "ours.toml"))


def test_edited_policies_count_and_damage_has_a_hint(bundle_dir, tmp_path):
    policy, file = channel_policy(tmp_path / "trust.toml"), tmp_path / "stable.json"
    released(file, bundle_dir)
    for keys, more in (('["a", "b"]', "threshold = 2"), ('["b"]', "")):
        channel_policy(policy)
        runs(bundle_dir, policy)
        channel_policy(policy, keys, more)
        assert case_of(bundle_dir, policy) == "channel-signature"
    channel_policy(policy)
    whole = file.read_text()
    for damaged in (whole[:-9], whole.replace('"sig":"', '"sig":"!'), "[]"):
        file.write_text(damaged)
        with pytest.raises(UntrustedError, match=str(file)) as raised:
            load(bundle_dir, trust=policy)
        assert raised.value.case.startswith("channel-")
        assert "get the channel's file again" in (raised.value.hint or "")


def test_the_command_line_ends_with_status_5(bundle_dir, policy, tmp_path, ran, monkeypatch):
    monkeypatch.setenv("PREJIT_TRUST", "")  # --trust adds to it, for the rest of the process
    np.save(tmp_path / "x.npy", X)
    call = ("call", bundle_dir, "score", "--arg", f"x={tmp_path / 'x.npy'}", "-o", tmp_path / "out")
    verify = ("verify", bundle_dir, "--trust")
    said = ran(*call, "--trust", policy, status=5).err
    assert "error[untrusted]" in said
    assert "does not let target" in said
    with monkeypatch.context() as patch:
        patch.setenv("PREJIT_TRUST", str(policy))
        ran(*call, status=5)
    assert "error[policy]" in ran(*verify, tmp_path / "gone", status=5).err
    ran(*verify, policy, status=5)
    digest = sign(bundle_dir, signer("a")).digest
    ran(*call, "--trust", policy)
    assert "lets it run, signed by a" in ran(*verify, policy).out
    other = write_policy(tmp_path / "other.toml", KEYS, rule())
    monkeypatch.setenv("PREJIT_TRUST", str(other))
    found = json.loads(ran(*verify, policy, "--json").out)["policy"]
    assert {each["policy"] for each in found} == {str(policy), str(other)}
    assert [each["signers"] for each in found] == [["a"]] * 4
    write_policy(other, KEYS, rule(), f'[revoked]\ndigests = ["{digest}"]')
    assert f"{other} does not let target" in ran(*verify, policy, status=5).err


ANY = '[[rules]]\nnames = ["*"]\nkeys = ["a", "b"]\n'
BOTH = "sbom = true\nprovenance = {}\n"


@pytest.fixture
def described(recipe, tmp_path):
    return recipe.write_described(tmp_path / "described")


@pytest.fixture
def signed(described):
    sign(described, signer("a"))
    return described


def demanded(bundle, *demands):
    """Load under a policy that demands something. Return why that is refused; empty: it is not."""
    policy = write_policy(bundle.with_name("trust.toml"), KEYS, ANY, *demands)
    try:
        load(bundle, trust=policy).close()
    except UntrustedError as error:
        assert main(["verify", str(bundle), "--trust", str(policy)]) == 5
        return error.case
    assert main(["verify", str(bundle), "--trust", str(policy)]) == 0
    return ""


def test_a_demand_is_compared_with_what_is_signed(signed):
    for demand, case in (
        (BOTH, ""),
        ('provenance = { builder = "urn:prejit:*" }', ""),
        ('provenance = { builder = "https://ci.example" }', "provenance"),
        ('provenance = { materials = ["pkg:pypi/jax@*", "pkg:pypi/jaxlib@*"] }', ""),
        ('provenance = { materials = ["pkg:pypi/jax@*", "sha256:0*"] }', "provenance"),
        ('provenance = { source = ["hf:acme/*"] }', "provenance"),  # it has none
        ("threshold = 2\nsbom = true", "threshold"),
    ):
        assert demanded(signed, demand) == case, demand


def test_descriptions_that_nobody_of_the_rule_signed_do_not_count(described):
    """They are attached, and whoever may write to the bundle can write them."""
    assert demanded(described, BOTH) == "unsigned"
    sign(described, signer("c"))
    assert demanded(described, BOTH) == "unknown-key"
    sign(described, signer("a"))
    assert demanded(described, "threshold = 1", BOTH) == ""
    assert demanded(described, "threshold = 2", BOTH) == "threshold"
    sign(described, signer("b"))
    assert demanded(described, "threshold = 2", BOTH) == ""


def test_a_bundle_lacks_descriptions_until_they_are_attached_and_signed(bundle_dir):
    sign(bundle_dir, signer("a"))
    assert demanded(bundle_dir) == ""
    assert demanded(bundle_dir, "sbom = true") == "sbom"
    assert demanded(bundle_dir, "provenance = {}") == "provenance"
    parts = [Part(PARTS_MEDIA_TYPE, b'{"bomFormat":"CycloneDX","specVersion":"1.6"}')]
    attach(bundle_dir, subject_of(bundle_dir), PARTS_MEDIA_TYPE, parts, {})
    sign(bundle_dir, signer("a"))
    assert demanded(bundle_dir, "sbom = true") == ""


def test_descriptions_of_another_bundle_do_not_count(signed, make_recipe, tmp_path):
    other = make_recipe(name="other").write(tmp_path / "other")
    sign(other, signer("a"))
    with Layout(signed) as layout:
        theirs = [at for at in read_root(layout).others if "sigstore" in str(at.artifactType)]
    subject = subject_of(other)
    for at in theirs:
        [layer] = json.loads(blob(signed, at.digest).read_bytes())["layers"]
        part = Part(layer["mediaType"], blob(signed, layer["digest"]).read_bytes())
        attach(other, subject, layer["mediaType"], [part], {})
    assert demanded(other, "sbom = true") == "sbom"
    assert demanded(other, BOTH) == "provenance"


def test_a_load_reads_no_descriptions_that_no_rule_demands(signed):
    """A damaged list of parts is found by `prejit verify`, and by no load."""
    for file in (signed / "blobs" / "sha256").iterdir():
        if b"bomFormat" in file.read_bytes()[:100]:
            file.write_bytes(b"damaged")
    load(signed, trust=write_policy(signed.with_name("trust.toml"), KEYS, ANY)).close()


HF, GIT = {"uri": "hf://acme/model@0123"}, {"uri": "git+https://example.com/acme"}
JAX = {"uri": "pkg:pypi/jax@0.10.2"}


@pytest.mark.parametrize(
    ("found", "source", "materials", "complaint"),
    [
        ([HF], ("hf://acme/*",), (), ""),
        ([HF, GIT], ("hf://acme/*",), (), "found 'git"),
        ([JAX], ("*",), (), "found no material"),
        ([HF, JAX], ("hf:*",), (), ""),
        ([JAX], (), ("sha256:*",), "sha256:"),  # it has no digest
        ([{**JAX, "digest": {"sha256": "0" * 64}}], (), ("sha256:*",), ""),
    ],
)
def test_every_source_and_material_must_be_of_the_rule(found, source, materials, complaint):
    key = TrustedKey("a", signer("a").public)
    demanded = ProvenanceRule("", source, materials)
    rule = Rule(("*",), "strict", (key,), 1, provenance=demanded)
    predicate = {"buildDefinition": {"resolvedDependencies": found}}
    statement = Statement(PROVENANCE_PREDICATE, (SignedSubject(digest_of(b"")),), predicate)
    described = [Description(statement, frozenset({key.id}))]
    reasons = [reason.text for reason in missing_descriptions(rule, described, {key.id})]
    assert len(reasons) == bool(complaint)
    assert complaint in "".join(reasons)
