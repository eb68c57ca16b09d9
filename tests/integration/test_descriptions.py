"""Every build attaches a list of parts and its provenance, which the validators of others accept."""

import base64
import json

import pytest
from tests.layouts import attached_to, blob

from prejit.runtime.format.layout import Layout
from prejit.runtime.format.root import read_root

from .test_signing_tools import TOOLS, tool

PARTS = "application/vnd.cyclonedx+json"
STATEMENT = "application/vnd.in-toto+json"
VALIDATE = """
import sys
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
found = JsonStrictValidator(SchemaVersion.V1_6).validate_str(open(sys.argv[1]).read())
assert found is None, found
"""
IN_TOTO = """
import sys
from google.protobuf import json_format
from in_toto_attestation.v1 import statement_pb2
from in_toto_attestation.v1.statement import Statement
found = json_format.Parse(open(sys.argv[1]).read(), statement_pb2.Statement())
Statement.copy_from_pb(found).validate()
assert found.predicate_type == "https://slsa.dev/provenance/v1"
"""


def attached(bundle, kind):
    [(_, file)] = attached_to(bundle, kind)
    return file


def read(bundle, kind):
    return json.loads(attached(bundle, kind).read_bytes())


def test_the_list_of_parts_names_what_compiled_the_bundle(demo):
    found = read(demo, PARTS)
    with Layout(demo) as layout:
        root = read_root(layout)
    component = found["metadata"]["component"]
    assert component["type"] == "machine-learning-model"
    assert component["hashes"] == [{"alg": "SHA-256", "content": root.digest[7:]}]
    names = {each.get("purl", "").partition("@")[0] for each in found["components"]}
    assert {"pkg:pypi/jax", "pkg:pypi/jaxlib", "pkg:pypi/prejit"} <= names
    manifest = json.loads(blob(demo, root.bundle.manifests[0].digest).read_bytes())
    listed = {each["bom-ref"] for each in found["components"]}
    assert {layer["digest"] for layer in manifest["layers"]} <= listed


def test_the_provenance_names_manifest_sources_and_versions(demo):
    found = read(demo, STATEMENT)
    with Layout(demo) as layout:
        root = read_root(layout)
    digests = {f"sha256:{each['digest']['sha256']}" for each in found["subject"]}
    assert digests == {root.digest, *(at.digest for at in root.bundle.manifests)}
    definition = found["predicate"]["buildDefinition"]
    manifest = definition["externalParameters"]["manifest"]
    assert base64.b64decode(manifest["content"]) == (demo.parent / "demo.toml").read_bytes()
    assert definition["externalParameters"]["targets"] == ["cpu-host"]
    names = {each.get("name") for each in definition["resolvedDependencies"]}
    assert any("config.json" in str(name) for name in names)
    assert found["predicate"]["runDetails"]["builder"]["id"]


@pytest.mark.thorough
@pytest.mark.skipif(not TOOLS.exists(), reason="no .venv-tools: `make .venv-tools/.ready` makes it")
def test_the_validators_of_others_accept_both(demo):
    for validate, kind in ((VALIDATE, PARTS), (IN_TOTO, STATEMENT)):
        tool("-c", validate, attached(demo, kind))
