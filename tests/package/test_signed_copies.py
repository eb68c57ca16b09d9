"""Signed bundles and targets that other tools copied run under a policy, once their signatures are there too.

skopeo and the Python package oras do not know OCI's referrers: they copy signatures by their names.
"""

import json
import shutil
import subprocess

import pytest

pytest.importorskip("cryptography", reason="cryptography comes with the extra trust")

from oras.layout.layout import Layout, NewLayoutFromRegistry
from oras.provider import Registry
from tests.layouts import blob
from tests.signers import key_table, signer, write_policy
from tests.store_servers import docker_registry, running

from prejit.compiler.signing.bundle_signing import sign
from prejit.runtime import UntrustedError, load
from prejit.runtime.__main__ import main
from prejit.runtime.format.referrers import ATTACHED
from prejit.runtime.trust.enforcing import verify_policies

from .test_oci import named_in

TARGET = "cpu-host"
with_skopeo = pytest.mark.skipif(
    shutil.which("skopeo") is None, reason="skopeo is not installed (Debian has it)"
)


@pytest.fixture
def policy(tmp_path):
    rule = '[[rules]]\nnames = ["*"]\nkeys = ["a"]\n'
    return str(write_policy(tmp_path / "trust.toml", key_table("a"), rule))


@pytest.fixture
def signed(bundle_dir):
    sign(bundle_dir, signer("a"))
    return bundle_dir


@pytest.fixture
def registry(tmp_path):
    """The address of a real registry, without the API of OCI 1.1 for referrers."""
    with running(docker_registry(tmp_path)) as server:
        yield server.url.removeprefix("oci://").replace("/team/store", "/models/demo")


def copy_by_skopeo(source, to):
    options = ("--all", "--src-tls-verify=false", "--dest-tls-verify=false")
    command = ["skopeo", "--insecure-policy", "copy", *options, source, to]
    subprocess.run(command, check=True, capture_output=True)


def names(layout):
    return [name for name in named_in(layout) if name.startswith(ATTACHED)]


def refused_before(copy, policy):
    with pytest.raises(UntrustedError) as raised:
        load(copy, trust=policy)
    assert raised.value.case == "unsigned"


def allowed(copy, policy, targets):
    verdicts = verify_policies(copy, [policy])
    assert [each.decision.signers for each in verdicts] == [("a",)] * targets
    assert load(copy, trust=policy, on_mismatch="error").target == TARGET


@with_skopeo
@pytest.mark.parametrize(("what", "targets"), [("example", 2), (TARGET, 1)])
def test_a_copy_by_skopeo_runs_once_signatures_are_copied(what, targets, signed, policy, tmp_path):
    copy = tmp_path / "copy"
    copy_by_skopeo(f"oci:{signed}:{what}", f"oci:{copy}:{what}")
    # skopeo 1.9 replaces the index by one without our artifact type, and the bundle keeps its name.
    assert load(copy).digest == named_in(signed)[what]["digest"]
    assert main(["verify", str(copy)]) == 0
    refused_before(copy, policy)
    for name in names(signed):
        copy_by_skopeo(f"oci:{signed}:{name}", f"oci:{copy}:{name}")
    allowed(copy, policy, targets)


@with_skopeo
@pytest.mark.parametrize(("what", "targets"), [("example", 2), (TARGET, 1)])
def test_what_oras_pushed_and_skopeo_pulled_runs(what, targets, registry, signed, policy, tmp_path):
    copy = tmp_path / "copy"
    provider = Registry(insecure=True, tls_verify=False)
    for name in (what, *names(signed)):
        Layout(str(signed)).push_to_registry(
            provider=provider, target=f"{registry}:{name}", tag=name
        )
        copy_by_skopeo(f"docker://{registry}:{name}", f"oci:{copy}:{name}")
    allowed(copy, policy, targets)


@with_skopeo
def test_signatures_of_bundle_and_other_target_let_no_copy_of_one_run(signed, policy, tmp_path):
    copy = tmp_path / "copy"
    copy_by_skopeo(f"oci:{signed}:{TARGET}", f"oci:{copy}:{TARGET}")
    others = [
        name
        for name in names(signed)
        if json.loads(blob(signed, named_in(signed)[name]["digest"]).read_bytes())["subject"][
            "digest"
        ]
        != named_in(signed)[TARGET]["digest"]
    ]
    assert len(others) == 2
    for name in others:
        copy_by_skopeo(f"oci:{signed}:{name}", f"oci:{copy}:{name}")
    with pytest.raises(UntrustedError):
        load(copy, trust=policy)


def test_oras_pulls_a_bundle_without_its_signatures(registry, signed, policy, tmp_path):
    """The package writes one reference into a layout: sign the copy, or pull by a tool that copies more."""
    provider = Registry(insecure=True, tls_verify=False)
    copy = tmp_path / "copy"
    where = f"{registry}:v1"
    Layout(str(signed)).push_to_registry(provider=provider, target=where, tag="example")
    NewLayoutFromRegistry(str(copy), provider, where, tag="example")
    refused_before(copy, policy)
    sign(copy, signer("a"))
    allowed(copy, policy, 2)
