"""Programs that know nothing of prejit: recorded once, then started without compiling, in real processes."""

import json
import shutil
import subprocess
import sys

import pytest
from tests.layouts import attached_to

PROGRAM = """
import os, sys
import jax, jax.numpy as jnp

@jax.jit
def score(x, scale):
    return jnp.tanh(x * scale).sum()

if __name__ == "__main__":
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    print(float(score(jnp.ones((rows, 4)), jnp.float32(2))), flush=True)
"""
ANSWER = "30.8488"  # 32 times tanh 2


@pytest.fixture(scope="module")
def bundle(here, prejit_at):
    done = prejit_at(*("record", "-o", "serve", "--json"), *("--", sys.executable, "serve.py"))
    answer, _, described = done.stdout.partition("\n")
    assert answer.startswith(ANSWER)
    said = json.loads(described)
    assert (said["status"], said["left_out"]) == (0, [])
    assert said["added"] == said["programs"] > 1
    return here / "serve"


def started(here, *words, **pipes):
    """A `prejit` that runs beside the program meanwhile."""
    command = [sys.executable, "-m", "prejit.runtime", *map(str, words)]
    return subprocess.Popen(command, cwd=here, stderr=subprocess.PIPE, text=True, **pipes)


def report_of(prejit_at, bundle, *command, **more):
    file = bundle.parent / "report.json"
    done = prejit_at("run", bundle, "-o", file, "--", *command, **more)
    found = json.loads(file.read_text())
    return {**found, "stdout": done.stdout, "stderr": done.stderr}


def test_a_recorded_program_compiles_nothing_here_and_elsewhere(bundle, prejit_at, tmp_path):
    """Elsewhere: a copy of the bundle, another HOME, working directory and runtime cache."""
    required = ("--require-aot", "--", sys.executable, "-W", "error", "serve.py")
    plain = prejit_at("run", bundle, *required)
    assert plain.stdout.startswith(ANSWER)
    assert plain.stderr == ""
    copy = shutil.copytree(bundle, tmp_path / "copy")
    shutil.copy(bundle.parent / "serve.py", tmp_path / "serve.py")
    home = {"HOME": str(tmp_path / "home"), "PREJIT_RUNTIME_CACHE": str(tmp_path / "cache")}
    script = f"cd {tmp_path} && exec {sys.executable} serve.py"
    found = report_of(prejit_at, copy, "sh", "-c", script, **home)
    assert (found["stdout"], found["stderr"]) == (plain.stdout, "")
    assert (found["missed"], found["mismatch"], found["processes"]) == (0, None, 1)
    assert found["hits"] > 1
    assert "jit_score" in {program["name"] for program in found["programs"]}


def test_the_cache_is_read_and_never_written(bundle, prejit_at, tmp_path):
    """Also by a program that sets a cache and its limits itself, as root, who may write anywhere."""
    cache = tmp_path / "cache"
    lines = (
        "import jax",
        f"jax.config.update('jax_compilation_cache_dir', {str(tmp_path / 'own')!r})",
        "jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)",
        "import serve, jax.numpy as jnp",
        "print(float(serve.score(jnp.ones((8, 4)), jnp.float32(2))))",
        "serve.score(jnp.ones((5, 4)), jnp.float32(2))",
    )
    command = (sys.executable, "-c", "\n".join(lines))
    found = report_of(prejit_at, bundle, *command, PREJIT_RUNTIME_CACHE=str(cache))
    assert found["stdout"].startswith(ANSWER)
    assert found["hits"] > 1
    assert {miss["name"] for miss in found["misses"]} >= {"jit_score"}
    assert any("own: not used" in note for note in found["notes"])
    [directory] = (cache / "recorded" / "v1").iterdir()
    described = json.loads(prejit_at("inspect", bundle, "--json").stdout)
    recorded = {each["file"] for each in described["targets"][0]["config"]["recorded"]}
    assert {path.name for path in directory.iterdir()} == recorded
    assert not (tmp_path / "own").exists()


def test_a_miss_is_told_with_its_shapes_while_the_program_runs(here, bundle):
    """It waits for a line that its user sends after reading of the miss."""
    waiting = (
        "import serve, jax.numpy as jnp",
        "serve.score(jnp.ones((16, 4)), jnp.float32(2))",
        "assert input() == 'read'",
        "serve.score(jnp.ones((17, 4)), jnp.float32(2))",
    )
    words = ("run", bundle, "--live", "--", sys.executable, "-c", "\n".join(waiting))
    with started(here, *words, stdin=subprocess.PIPE) as process:
        told = ""
        while "found (float32[16,4], float32[])" not in told:
            told += (line := process.stderr.readline())
            assert line, told
        _, rest = process.communicate("read\n", timeout=60)
    assert process.returncode == 0
    assert "found (float32[17,4], float32[])" in rest
    recorded = "arguments: recorded (float32[8,4], float32[]), "
    assert (told + rest).count(f"{recorded}found (float32[16,4], float32[])") == 1
    assert "miss: jit_score at " in told
    assert "hint: record this run too (prejit record -o BUNDLE -- COMMAND)" in rest


@pytest.mark.thorough
def test_recording_again_changes_no_byte_and_another_run_is_added(bundle, prejit_at, tmp_path):
    copy = shutil.copytree(bundle, tmp_path / "serve")
    before = (copy / "index.json").read_bytes()
    again = prejit_at("record", "-o", copy, "--", sys.executable, "serve.py")
    assert "recorded 0 programs" in again.stderr
    assert (copy / "index.json").read_bytes() == before
    prejit_at("record", "-o", copy, "--", sys.executable, "serve.py", "16")
    prejit_at("verify", copy)
    both = "import runpy, sys\nfor sys.argv in (['', '8'], ['', '16']):"
    both += " runpy.run_path('serve.py', run_name='__main__')"
    prejit_at("run", copy, "--require-aot", "--", sys.executable, "-c", both)


def test_a_recording_has_a_list_of_parts_and_a_provenance_that_signing_covers(bundle, tmp_path):
    pytest.importorskip("cryptography", reason="cryptography comes with the extra trust")
    from tests.signers import signer

    from prejit.compiler.signing.bundle_signing import sign

    parts, statement = (
        json.loads(attached_to(bundle, f"application/vnd.{kind}+json")[0][1].read_bytes())
        for kind in ("cyclonedx", "in-toto")
    )
    names = {each.get("purl", "").partition("@")[0] for each in parts["components"]}
    assert {"pkg:pypi/jax", "pkg:pypi/jaxlib", "pkg:pypi/prejit"} <= names
    definition = statement["predicate"]["buildDefinition"]
    assert definition["buildType"] == "urn:prejit:recording:v1"
    assert definition["externalParameters"]["functions"] == ["serve:score"]
    assert str(bundle.parent) not in json.dumps(statement)  # no command, no paths
    digests = {each["digest"]["sha256"] for each in statement["subject"]}
    copy = shutil.copytree(bundle, tmp_path / "serve")
    signed = sign(copy, signer("a"))
    assert digests == {digest.removeprefix("sha256:") for digest in signed.subjects}
    assert signed.added == len(signed.subjects) + 2  # and the provenance and the list of parts


def test_nothing_to_record_is_said(prejit_at, tmp_path):
    done = prejit_at("record", "-o", tmp_path / "b", "--", "true", status=1)
    assert "the program compiled nothing with jax" in done.stderr
    assert not (tmp_path / "b").exists()
    assert not list(tmp_path.glob(".*"))
