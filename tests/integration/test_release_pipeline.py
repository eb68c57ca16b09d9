"""deploy/ci: the script of three CIs releases from a clean clone, and stops what the gate stops."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import yaml
from safetensors.numpy import load_file, save_file
from tests.lettered import write_lettered
from tests.manifests import write_manifest
from tests.processes import ran

from prejit.runtime.__main__ import main

ROOT = Path(__file__).parents[2]
CI = ROOT / "deploy" / "ci"
TOOLS = ROOT / ".venv-tools" / "bin"
STEPS = {"first", "candidate", "rollout", "back"}
SIZES = {"batch": (1, 3), "prompt": (64,), "context": (64, 512)}
"""Those of `lettered_dir`: its programs are in the build cache."""
GATE_FAILED = 9

needs_tools = pytest.mark.skipif(
    not TOOLS.exists(), reason="no .venv-tools: `make .venv-tools/.ready` makes it"
)


@pytest.fixture
def clone(tmp_path):
    """A clean clone of this repository, with a manifest that builds in seconds."""
    place = tmp_path / "clone"
    ran("git", "clone", "-q", "--depth", "1", f"file://{ROOT}", place)
    shutil.copytree(CI, place / "deploy" / "ci", dirs_exist_ok=True)  # also if not committed
    write_lettered(place / "models" / "model")
    more = {"model": 'dtype = "float32"', "generate": "draft_tokens = 3"}
    write_manifest(place / "models" / "decoder.toml", "model", name="decoder", **SIZES, **more)
    return place


@pytest.fixture
def release(clone, registry, lettered_dir, build_cache, programs, tmp_path):
    """Runs a step of the script as a CI does."""
    key = tmp_path / "release.pem"
    ran("openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", key)
    given = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "MANIFEST": "models/decoder.toml",
        "CHANNEL": f"{registry.url}:prod",
        "SIGNING_KEY": str(key),
        "PREJIT_CACHE": str(build_cache),
    }

    def run(step, status=0):
        env = {**os.environ, **given}
        return ran("deploy/ci/release.sh", step, status=status, cwd=clone, env=env)

    return run


@pytest.mark.thorough
def test_a_pipeline_releases_gates_rolls_out_and_back(release, clone, registry, capsys):
    def tags():
        capsys.readouterr()
        assert main(["ls", registry.url, "--json"]) == 0
        return {each["tag"]: each["digest"] for each in json.loads(capsys.readouterr().out)}

    # Without a channel there is nothing to compare with, and the script does not guess.
    assert "prod: not found" in release("candidate", 6).stderr
    release("first")
    old = tags()["prod"]
    assert "serves this bundle already" in release("candidate").stdout
    nothing = f"{registry.url}:prod serves this bundle already: nothing to release\n"
    assert (clone / "gate.md").read_text() == nothing

    # The same model with a license passes; its signature travels with it.
    manifest = clone / "models" / "decoder.toml"
    (clone / "models" / "LICENSE").write_text("Public domain.\n")
    named = '"decoder"\nlicense = "LICENSE"'
    manifest.write_text(manifest.read_text().replace('"decoder"', named))
    release("candidate")
    assert tags()["prod"] == old
    assert "|" in (clone / "gate.md").read_text()
    release("rollout")
    new = tags()["prod"]
    assert new == tags()["candidate"] != old
    (clone / "trust.toml").write_text(
        '[keys.ci]\nfile = "release.pub.pem"\n[[rules]]\nnames = ["decoder"]\nkeys = ["ci"]\n'
    )
    public = ("openssl", "pkey", "-in", clone.parent / "release.pem", "-pubout", "-out")
    ran(*public, clone / "release.pub.pem")
    trusted = ["--trust", str(clone / "trust.toml")]
    assert main(["verify", f"{registry.url}:prod", *trusted]) == 0
    release("back")
    assert tags()["prod"] == old

    # Other weights give other tokens: the gate stops them before the channel moves.
    weights = clone / "models" / "model" / "model.safetensors"
    save_file({name: -value for name, value in load_file(weights).items()}, weights)
    release("candidate", GATE_FAILED)
    assert tags()["prod"] == old


def test_the_script_names_what_is_missing():
    def run(*arguments, **env):
        given = {"PATH": os.environ["PATH"], **env}
        done = ran("deploy/ci/release.sh", *arguments, status=None, cwd=ROOT, env=given)
        assert done.returncode != 0
        return done.stderr

    assert "MANIFEST: expected the path of a manifest" in run("candidate")
    assert "CHANNEL: expected oci://" in run("candidate", MANIFEST="a.toml")
    wrong = run("deploy", MANIFEST="a.toml", CHANNEL="oci://registry.example/a:prod")
    assert "expected first, candidate, rollout or back, found 'deploy'" in wrong


@pytest.mark.thorough
@needs_tools
def test_the_published_schemas_and_shellcheck_accept_the_files(tmp_path):
    check = TOOLS / "check-jsonschema"
    ran(check, "--builtin-schema", "vendor.github-workflows", CI / "github.yml")
    schema = ("--builtin-schema", "vendor.gitlab-ci", "--data-transform", "gitlab-ci")
    ran(check, *schema, CI / "gitlab.yml")
    # The commands in the files, which the schemas take for texts.
    github = yaml.safe_load((CI / "github.yml").read_text())["jobs"]["release"]["steps"]
    gitlab = yaml.safe_load((CI / "gitlab.yml").read_text())
    (jenkins,) = re.findall(r"sh '''(.*?)'''", (CI / "Jenkinsfile").read_text(), re.DOTALL)
    keys = ("before_script", "script", "after_script")
    commands = {
        "github": [each["run"] for each in github if "run" in each],
        "gitlab": [line for job in gitlab.values() for key in keys for line in job.get(key, ())],
        "jenkins": [jenkins],
    }
    for name, lines in commands.items():
        script = tmp_path / f"{name}.sh"
        script.write_text("\n".join(["#!/bin/sh", *lines]))
        ran(TOOLS / "shellcheck", script)
        steps = set(re.findall(r"release\.sh (\w+)", script.read_text()))
        assert steps <= STEPS
    ran(TOOLS / "shellcheck", CI / "release.sh")
    asked = yaml.safe_load((CI / "github.yml").read_text())[True]["workflow_dispatch"]["inputs"]
    assert set(asked["step"]["options"]) <= STEPS
    (choices,) = re.findall(r"choices: \[(.*?)\]", (CI / "Jenkinsfile").read_text())
    assert {each.strip("'") for each in choices.split(", ")} <= STEPS
