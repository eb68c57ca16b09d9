"""Every build attaches a list of parts and its provenance, which the validators of others accept."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.layouts import blob

from prejit.runtime.format.layout import Layout
from prejit.runtime.format.referrers import referrers
from prejit.runtime.format.root import read_root

from .conftest import ROOT, Run
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
with_tools = pytest.mark.skipif(
    not TOOLS.exists(), reason="no .venv-tools: `make .venv-tools/.ready` makes it"
)


def attached(bundle: Path, kind: str) -> Path:
    """The only thing of a kind that is attached to a bundle."""
    with Layout(bundle) as layout:
        root = read_root(layout)
        found = [
            each for each in referrers(layout, root, root.digest) if each.artifact_type == kind
        ]
    (referrer,) = found
    (at,) = referrer.layers
    return blob(bundle, at.digest)


def read(bundle: Path, kind: str) -> Any:
    return json.loads(attached(bundle, kind).read_bytes())


def test_the_list_of_parts_names_what_compiled_the_bundle(demo: Path) -> None:
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


def test_the_provenance_names_manifest_sources_and_versions(demo: Path) -> None:
    found = read(demo, STATEMENT)
    with Layout(demo) as layout:
        root = read_root(layout)
    digests = {f"sha256:{each['digest']['sha256']}" for each in found["subject"]}
    assert digests == {root.digest, *(at.digest for at in root.bundle.manifests)}
    definition = found["predicate"]["buildDefinition"]
    manifest = definition["externalParameters"]["manifest"]
    assert base64.b64decode(manifest["content"]) == (ROOT / "manifests" / "demo.toml").read_bytes()
    assert definition["externalParameters"]["targets"] == ["cpu-host"]
    names = {each.get("name") for each in definition["resolvedDependencies"]}
    assert any("config.json" in str(name) for name in names)
    assert found["predicate"]["runDetails"]["builder"]["id"]


def test_equal_builds_attach_equal_bytes_and_a_second_one_attaches_nothing(
    demo: Path, run: Run, tmp_path: Path
) -> None:
    options = ("-o", tmp_path, "--target", "cpu-host")
    run("build", ROOT / "manifests" / "demo.toml", *options, quick=True)
    again = (tmp_path / "demo" / "index.json").read_bytes()
    assert again == (demo / "index.json").read_bytes()
    run("build", ROOT / "manifests" / "demo.toml", *options, quick=True)
    assert (tmp_path / "demo" / "index.json").read_bytes() == again


def test_the_next_build_mends_a_damaged_description(demo: Path, run: Run, tmp_path: Path) -> None:
    bundle = shutil.copytree(demo, tmp_path / "demo")
    whole = (bundle / "index.json").read_bytes()
    with Layout(bundle) as layout:
        root = read_root(layout)
        manifests = [each.descriptor.digest for each in referrers(layout, root, root.digest)]
    for file in (attached(bundle, PARTS), blob(bundle, manifests[0])):
        content = file.read_bytes()
        file.write_bytes(content[:-1] + b" ")
        options = ("-o", tmp_path, "--target", "cpu-host")
        run("build", ROOT / "manifests" / "demo.toml", *options, quick=True)
        assert file.read_bytes() == content
        assert (bundle / "index.json").read_bytes() == whole


@with_tools
def test_the_validator_of_cyclonedx_accepts_the_list(demo: Path) -> None:
    done = tool("-c", VALIDATE, attached(demo, PARTS))
    assert done.returncode == 0, done.stderr


@with_tools
def test_the_library_of_in_toto_accepts_the_provenance(demo: Path) -> None:
    done = tool("-c", IN_TOTO, attached(demo, STATEMENT))
    assert done.returncode == 0, done.stderr


def test_signing_signs_the_provenance_too(demo: Path, tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="cryptography comes with the extra trust")
    from tests.signers import signer

    from prejit.compiler.signing.bundle_signing import sign
    from prejit.runtime.format.names import SIGNATURE_MEDIA_TYPE
    from prejit.runtime.trust.signed_statements import (
        PROVENANCE_PREDICATE,
        read_bundle,
        read_statement,
    )

    bundle = shutil.copytree(demo, tmp_path / "demo")
    assert sign(bundle, signer("a")).added == 4  # the index, a target, the parts, the provenance
    assert sign(bundle, signer("a")).added == 0
    with Layout(bundle) as layout:
        root = read_root(layout)
        found = [
            layout.read_blob(each.layers[0])
            for each in referrers(layout, root, root.digest)
            if each.artifact_type == SIGNATURE_MEDIA_TYPE
            and each.annotations["dev.sigstore.bundle.predicateType"] == PROVENANCE_PREDICATE
        ]
    (content,) = found
    assert read_statement(read_bundle(content).payload, PROVENANCE_PREDICATE).about(root.digest)
