"""Builds that are repeated, damaged, or run at once."""

import json
import shutil
from importlib.util import find_spec

import numpy as np
import pytest
from tests.manifests import functions_manifest

from prejit.runtime import load
from prejit.runtime.base.files import digest_of


def write_manifest(directory, sizes="1, 2, 3"):
    keys = f'function = "tiny_model:f"; args = {{ x = "float32[{{n}}]" }}; buckets = {{ n = [{sizes}] }}'
    functions_manifest(directory / "tiny.toml", {"p": keys}, ("cpu-host", "cpu-x86-64-v3"))


def write_project(directory):
    (directory / "tiny_model.py").write_text("def f(x):\n    return x * 2 + 1\n")
    write_manifest(directory)
    return directory


@pytest.fixture(scope="module")
def built_once(run, tmp_path_factory):
    """A project that was built. Read only: it is the module's."""
    directory = write_project(tmp_path_factory.mktemp("built"))
    build(run, directory)
    return directory


@pytest.fixture
def built_project(built_once, tmp_path):
    return shutil.copytree(built_once, tmp_path, dirs_exist_ok=True)


def build(run, project, **options):
    [built] = json.loads(run(*arguments(project, "out"), **options).stdout)
    return built


def arguments(project, output):
    at = ("-o", project / output, "--cache", project / "cache", "--json")
    return ["build", *map(str, (project / "tiny.toml", *at))]


def test_a_build_compiles_what_a_change_touches_and_keys_know_no_directory(
    run, built_project, tmp_path
):
    project, digest = built_project, load(built_project / "out" / "tiny").digest
    if find_spec("cryptography") is not None:  # it comes with the extra trust
        from tests.signers import signer

        from prejit.compiler.signing.bundle_signing import sign

        sign(project / "out" / "tiny", signer("a"))
    done = run(*arguments(project, "out"))
    [again] = json.loads(done.stdout)
    assert (again["compiled"], again["cached"], again["written"]) == (0, 6, False)
    assert again["digest"] == digest
    assert "signed" not in done.stderr
    plan = run("plan", project / "tiny.toml", "--cache", project / "cache", "--json")
    planned = json.loads(plan.stdout)
    assert (planned["to_compile"], planned["traced_at_build"]) == (0, 0)
    elsewhere = tmp_path / "else" / "where"
    shutil.copytree(project, elsewhere, ignore=shutil.ignore_patterns("out", "else"))
    assert build(run, elsewhere)["compiled"] == 0

    write_manifest(project, "1, 2, 3, 4")
    done = run(*arguments(project, "out"), "-v")
    assert json.loads(done.stdout)[0]["compiled"] == 2
    decided = [line for line in done.stderr.splitlines() if " INFO prejit.compiler." in line]
    assert sum(line.endswith(": cached") for line in decided) == 6
    assert sum(": compiles: first build of this program" in line for line in decided) == 2
    if find_spec("cryptography") is not None:
        assert "out/tiny is not signed any more" in done.stderr


def test_a_damaged_bundle_and_a_damaged_cache_are_mended_by_the_next_build(run, built_project):
    project = built_project
    bundle = project / "out" / "tiny"
    for directory in (bundle, project / "cache"):
        for blob in directory.rglob("blobs/sha256/*"):
            content = bytearray(blob.read_bytes())
            content[len(content) // 2] ^= 1
            blob.write_bytes(content)
    run("verify", bundle, status=4)
    built = build(run, project)
    assert (built["compiled"], built["cached"], built["written"]) == (6, 0, True)
    run("verify", bundle)
    assert load(bundle).call("p", x=np.ones(3, np.float32)).tolist() == [3, 3, 3]
    for directory in (bundle, project / "cache"):
        for blob in directory.rglob("blobs/sha256/*"):
            assert digest_of(blob.read_bytes()) == f"sha256:{blob.name}"
    again = build(run, project)
    assert (again["compiled"], again["written"], again["digest"]) == (0, False, built["digest"])
