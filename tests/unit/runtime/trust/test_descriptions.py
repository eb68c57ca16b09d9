"""A policy can demand a signed provenance, with builder, source and materials, and a signed list of parts."""

import json
import shutil

import pytest
from tests.layouts import blob, subject_of
from tests.signers import key_table, signer, write_policy

from prejit.compiler.pipeline.layout_writing import Part, attach
from prejit.compiler.signing.bundle_signing import sign
from prejit.runtime import UntrustedError, load
from prejit.runtime.__main__ import main
from prejit.runtime.base.files import digest_of
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.names import PARTS_MEDIA_TYPE
from prejit.runtime.format.root import read_root
from prejit.runtime.trust.decision import Description, _why_not_built_so, missing_descriptions
from prejit.runtime.trust.policy import ProvenanceRule, Rule, TrustedKey
from prejit.runtime.trust.signed_statements import PROVENANCE_PREDICATE, SignedSubject, Statement

KEYS = key_table("a") + key_table("b")
RULE = '[[rules]]\nnames = ["*"]\nkeys = ["a", "b"]\n'
BOTH = "sbom = true\nprovenance = {}\n"


@pytest.fixture
def described(recipe, tmp_path):
    return recipe.write_described(tmp_path / "described")


@pytest.fixture
def signed(described):
    sign(described, signer("a"))
    return described


def case_of(bundle, *demands):
    """Load under a policy that demands something. Return why that is refused; empty: it is not."""
    policy = write_policy(bundle.with_name("trust.toml"), KEYS, RULE, *demands)
    try:
        load(bundle, trust=policy).close()
    except UntrustedError as error:
        assert main(["verify", str(bundle), "--trust", str(policy)]) == 5
        return error.case
    assert main(["verify", str(bundle), "--trust", str(policy)]) == 0
    return ""


@pytest.mark.parametrize(
    ("demand", "case"),
    [
        (BOTH, ""),
        ('provenance = { builder = "urn:prejit:*" }', ""),
        ('provenance = { builder = "https://ci.example" }', "provenance"),
        ('provenance = { materials = ["pkg:pypi/jax@*", "pkg:pypi/jaxlib@*"] }', ""),
        ('provenance = { materials = ["pkg:pypi/jax@*", "sha256:0*"] }', "provenance"),
        ('provenance = { source = ["hf:acme/*"] }', "provenance"),  # it has none
        ("threshold = 2\nsbom = true", "threshold"),
    ],
)
def test_a_demand_is_not_compared_with_what_is_signed(demand, case, signed):
    assert case_of(signed, demand) == case


def test_descriptions_that_nobody_of_the_rule_signed_count(described, tmp_path):
    """They are attached, and whoever may write to the bundle can write them."""
    assert case_of(described, BOTH) == "unsigned"
    sign(described, signer("c"))
    assert case_of(described, BOTH) == "unknown-key"
    sign(described, signer("a"))
    assert case_of(described, "threshold = 1", BOTH) == ""
    assert case_of(described, "threshold = 2", BOTH) == "threshold"
    sign(described, signer("b"))
    assert case_of(described, "threshold = 2", BOTH) == ""


def test_a_bundle_without_descriptions_is_let_in_or_with_later_ones_not(bundle_dir):
    sign(bundle_dir, signer("a"))
    assert case_of(bundle_dir) == ""
    assert case_of(bundle_dir, "sbom = true") == "sbom"
    assert case_of(bundle_dir, "provenance = {}") == "provenance"
    subject = subject_of(bundle_dir)
    content = b'{"bomFormat":"CycloneDX","specVersion":"1.6"}'
    parts = [Part(PARTS_MEDIA_TYPE, content)]
    attach(bundle_dir, subject, PARTS_MEDIA_TYPE, parts, {})
    sign(bundle_dir, signer("a"))
    assert case_of(bundle_dir, "sbom = true") == ""


def test_other_descriptions_count(signed, make_recipe, tmp_path):
    other = make_recipe(name="other").write(tmp_path / "other")
    sign(other, signer("a"))
    with Layout(signed) as layout:
        theirs = [at for at in read_root(layout).others if "sigstore" in str(at.artifactType)]
    subject = subject_of(other)
    for at in theirs:
        [layer] = json.loads(blob(signed, at.digest).read_bytes())["layers"]
        part = Part(layer["mediaType"], blob(signed, layer["digest"]).read_bytes())
        attach(other, subject, layer["mediaType"], [part], {})
    assert case_of(other, "sbom = true") == "sbom"
    assert case_of(other, BOTH) == "provenance"


def test_a_load_reads_descriptions_that_no_rule_demands(signed, tmp_path):
    """A damaged list of parts is found by `prejit verify`, and by no load."""
    copy = shutil.copytree(signed, tmp_path / "copy")
    for file in (copy / "blobs" / "sha256").iterdir():
        if b"bomFormat" in file.read_bytes()[:100]:
            file.write_bytes(b"damaged")
    policy = write_policy(tmp_path / "trust.toml", KEYS, RULE)
    load(copy, trust=policy).close()


HF = "hf://acme/model@0123"
GIT = "git+https://example.com/acme"


@pytest.mark.parametrize(
    ("uris", "source", "complaint"),
    [
        ([HF], ("hf://acme/*",), ""),
        ([HF, GIT], ("hf://acme/*",), "found 'git"),
        (["pkg:pypi/jax@1"], ("*",), "found no material"),
        ([HF, "pkg:pypi/jax@1"], ("hf:*",), ""),
    ],
)
def test_a_foreign_source_passes(uris, source, complaint):
    key = TrustedKey("a", signer("a").public)
    rule = Rule(("*",), "strict", (key,), 1, provenance=ProvenanceRule("", source, ()))
    predicate = {"buildDefinition": {"resolvedDependencies": [{"uri": uri} for uri in uris]}}
    statement = Statement(PROVENANCE_PREDICATE, (SignedSubject(digest_of(b"")),), predicate)
    found = [Description(statement, frozenset({key.id}))]
    reasons = [reason.text for reason in missing_descriptions(rule, found, {key.id})]
    assert len(reasons) == bool(complaint)
    assert complaint in "".join(reasons)


def test_a_material_without_a_digest_fits_no_pattern_of_digests():
    rule = ProvenanceRule("", (), ("sha256:*",))
    material = {"uri": "pkg:pypi/jax@0.10.2"}
    predicate = {"buildDefinition": {"resolvedDependencies": [material]}}
    assert _why_not_built_so(rule, predicate) is not None
    material["digest"] = {"sha256": "0" * 64}
    assert _why_not_built_so(rule, predicate) is None
