"""Programs that know nothing of prejit: recorded once, then started without compiling, in real processes."""

import json
import shutil
import signal
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


def test_a_recorded_program_compiles_nothing_here_and_elsewhere(
    bundle, prejit_at, reported, tmp_path
):
    """Elsewhere: a copy of the bundle, another HOME, working directory and runtime cache."""
    required = ("--require-aot", "--", sys.executable, "-W", "error", "serve.py")
    plain = prejit_at("run", bundle, *required)
    assert plain.stdout.startswith(ANSWER)
    assert plain.stderr == ""
    copy = shutil.copytree(bundle, tmp_path / "copy")
    shutil.copy(bundle.parent / "serve.py", tmp_path / "serve.py")
    home = {"HOME": str(tmp_path / "home"), "PREJIT_RUNTIME_CACHE": str(tmp_path / "cache")}
    script = f"cd {tmp_path} && exec {sys.executable} serve.py"
    done, found = reported(copy, "sh", "-c", script, **home)
    assert (done.stdout, done.stderr) == (plain.stdout, "")
    assert (found["missed"], found["mismatch"], found["processes"]) == (0, None, 1)
    assert found["hits"] > 1
    assert "jit_score" in {program["name"] for program in found["programs"]}


def test_the_cache_is_read_and_never_written(bundle, prejit_at, reported, tmp_path):
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
    done, found = reported(bundle, *command, PREJIT_RUNTIME_CACHE=str(cache))
    assert done.stdout.startswith(ANSWER)
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


AGED = """
import sys, dataclasses
from pathlib import Path
from prejit.compiler.pipeline.pack.bundle_files import assemble
from prejit.compiler.recording.jax_cache_packing import packed, read_targets
from prejit.compiler.pipeline.pack.bundle_writing import write_layout
[target] = read_targets(Path(sys.argv[1]))
old = dataclasses.replace(target.requirement, jaxlib="0.0.1")
def aged(file):
    digests = {**file.entry.ingredients, "jax_lib version": "0" * 64}
    name = file.entry.file[:-70] + "0" * 4 + file.entry.file[-66:]  # another key
    return dataclasses.replace(
        file, entry=dataclasses.replace(file.entry, ingredients=digests, file=name)
    )
files = {each.entry.file: each for each in map(aged, target.programs.values())}
target = dataclasses.replace(target, requirement=old, programs=files, given="")
write_layout(Path(sys.argv[2]), *assemble("serve", [packed(target, "serve")]))
"""


@pytest.mark.thorough
def test_a_bundle_of_another_jaxlib_is_reported_and_gets_a_target(
    bundle, prejit_at, reported, tmp_path
):
    """As after an upgrade: the bundle has the files and keys of a jaxlib that is not installed."""
    rewritten = tmp_path / "serve"
    subprocess.run([sys.executable, "-c", AGED, bundle, rewritten], check=True)
    done, found = reported(rewritten, sys.executable, "serve.py")
    assert done.stdout.startswith(ANSWER)
    assert found["mismatch"].startswith("jaxlib: needs 0.0.1, found")
    assert "The program runs without the bundle" in done.stderr
    assert {d["name"] for miss in found["misses"] for d in miss["differs"]} == {"jaxlib"}
    prejit_at("record", "-o", rewritten, "--", sys.executable, "serve.py")
    prejit_at("run", rewritten, "--require-aot", "--", sys.executable, "serve.py")


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


SERVER = """
import os, signal, sys, time
import jax, serve, jax.numpy as jnp
for rows in (2, 3):
    if os.fork() == 0:
        serve.score(jnp.ones((rows, 4)), jnp.float32(2))
        print(rows, flush=True)
        os._exit(0)
    os.wait()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
print("ready", flush=True)
while True:
    time.sleep(0.05)
"""


@pytest.mark.thorough
def test_a_server_is_recorded_until_a_signal_ends_it(here, bundle, prejit_at, tmp_path):
    """It answers in processes of its own, which it forks after the import of jax."""
    (here / "server.py").write_text(SERVER)
    words = ("record", "-o", tmp_path / "b", "--", sys.executable, "server.py")
    with started(here, *words, stdout=subprocess.PIPE) as process:
        assert [process.stdout.readline() for _ in range(3)] == ["2\n", "3\n", "ready\n"]
        process.send_signal(signal.SIGTERM)
        _, printed = process.communicate(timeout=60)
    assert process.returncode == 5
    assert "recorded" in printed
    for rows in ("2", "3"):
        prejit_at("run", tmp_path / "b", "--require-aot", "--", sys.executable, "serve.py", rows)


@pytest.mark.thorough
def test_a_program_with_its_own_logging_is_not_disturbed(bundle, reported):
    """jax's messages, which the report needs, do not reach the handlers of the program."""
    lines = (
        "import logging",
        "logging.basicConfig(level=logging.INFO, format='LOG %(name)s')",
        "import runpy; runpy.run_path('serve.py', run_name='__main__')",
    )
    done, found = reported(bundle, sys.executable, "-c", "\n".join(lines))
    assert found["missed"] == 0
    assert "jax._src.cache_key" not in done.stderr
    assert "jax._src.compiler" not in done.stderr


def test_nothing_to_record_is_said(prejit_at, tmp_path):
    done = prejit_at("record", "-o", tmp_path / "b", "--", "true", status=1)
    assert "the program compiled nothing with jax" in done.stderr
    assert "hint: record a command that calls jitted functions" in done.stderr
    failed = prejit_at("record", "-o", tmp_path / "b", "--", "false", status=1)
    assert "hint: mend the command first" in failed.stderr
    assert not (tmp_path / "b").exists()
    assert not list(tmp_path.glob(".*"))


def test_a_place_that_cannot_be_written_is_refused_before_the_run(prejit_at, tmp_path):
    ran = tmp_path / "ran"
    (tmp_path / "file").touch()
    for output in (tmp_path / "file", tmp_path / "file" / "b"):
        done = prejit_at("record", "-o", output, "--", "touch", ran, status=6)
        assert f"{output}: cannot write a bundle: " in done.stderr
        assert "nothing was recorded" in done.stderr
    assert not ran.exists()
