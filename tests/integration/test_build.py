"""Builds that are repeated, killed, damaged or impossible."""

from __future__ import annotations

import functools
import json
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.decoders import write_random
from tests.extent import cases
from tests.warm import WarmPython

from prejit.runtime import load
from prejit.runtime.base.files import digest_of

from .conftest import ROOT, Run, write_manifest

MANIFEST = """
[bundle]
name = "tiny"
[[program]]
name = "p"
function = "tiny_model:f"
args = { x = "float32[{n}]" }
buckets = { n = [1, 2, 3] }
[[target]]
name = "cpu-host"
[[target]]
name = "cpu-x86-64-v3"
"""


def write_project(directory: Path) -> Path:
    (directory / "tiny_model.py").write_text("def f(x):\n    return x * 2 + 1\n")
    (directory / "tiny.toml").write_text(MANIFEST)
    return directory


@pytest.fixture(scope="module")
def built_once(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project that was built. Read only: it is the module's."""
    directory = write_project(tmp_path_factory.mktemp("built"))
    build(run, directory)
    return directory


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project that was never built."""
    return write_project(tmp_path)


@pytest.fixture
def built_project(built_once: Path, tmp_path: Path) -> Path:
    """A project that was built, with its cache and its bundle."""
    shutil.copytree(built_once, tmp_path, dirs_exist_ok=True)
    return tmp_path


def build(run: Run, project: Path, **options: int) -> dict[str, object]:
    [built] = json.loads(run(*arguments(project, "out"), **options).stdout)
    assert isinstance(built, dict)
    return built


def change(project: Path, factor: int) -> None:
    """Makes the function another one: for ones it gives `factor` + 1."""
    (project / "tiny_model.py").write_text(f"def f(x):\n    return x * {factor:>20} + 1\n")
    shutil.rmtree(project / "__pycache__", ignore_errors=True)  # it holds only for whole seconds


def arguments(project: Path, output: str | Path) -> list[str]:
    """The arguments of prejit that build a project."""
    at = ("-o", project / output, "--cache", project / "cache", "--json")
    return ["build", *map(str, (project / "tiny.toml", *at))]


def test_a_build_compiles_what_a_change_touches_and_keys_know_no_directory(
    run: Run, built_project: Path, tmp_path: Path
) -> None:
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

    wider = MANIFEST.replace("2, 3]", "2, 3, 4]")
    (project / "tiny.toml").write_text(wider)
    done = run(*arguments(project, "out"), "-v")
    assert json.loads(done.stdout)[0]["compiled"] == 2
    decided = [line for line in done.stderr.splitlines() if " INFO prejit.compiler." in line]
    assert sum(line.endswith(": cached") for line in decided) == 6
    assert sum(": compiles: first build of this program" in line for line in decided) == 2
    if find_spec("cryptography") is not None:
        assert "out/tiny is not signed any more" in done.stderr


def test_a_plan_of_a_model_knows_what_a_build_does_and_why(run: Run, tmp_path: Path) -> None:
    model = write_random("gpt2", tmp_path / "checkpoint")
    manifest = write_manifest(tmp_path / "m.toml", model, context=(32,))
    options = ("--cache", tmp_path / "cache")
    settings: Any = {"quick": True, "PATH": "/nonexistent"}  # without kernels, which take 15 s
    first = run("plan", manifest, *options, status=8, **settings)
    assert "first build of this program" in first.stdout
    build = ("build", manifest, *options, "-o", tmp_path / "out", "--no-measure", "--json")
    [built] = json.loads(run(*build, **settings).stdout)
    planned = json.loads(run("plan", manifest, *options, "--json", **settings).stdout)
    assert (planned["to_compile"], planned["traced_at_build"]) == (0, 0)
    assert {row["state"] for row in planned["programs"]} == {"cached"}
    assert len(planned["programs"]) == built["compiled"]

    config = json.loads((model / "config.json").read_bytes())
    (model / "config.json").write_text(json.dumps({**config, "layer_norm_epsilon": 1e-3}))
    changed = run("plan", manifest, *options, status=8, **settings)
    assert "config.json: sha256:" in changed.stdout


def test_a_damaged_bundle_and_a_damaged_cache_are_mended_by_the_next_build(
    run: Run, built_project: Path
) -> None:
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
    assert load(bundle).call("p", x=_ones(3)).tolist() == [3, 3, 3]
    for directory in (bundle, project / "cache"):
        for blob in directory.rglob("blobs/sha256/*"):
            assert digest_of(blob.read_bytes()) == f"sha256:{blob.name}"
    again = build(run, project)
    assert (again["compiled"], again["written"], again["digest"]) == (0, False, built["digest"])


@pytest.mark.parametrize("where", cases(["bundle"], others=["cache"]))
def test_a_full_disk_is_told_and_loses_nothing(run: Run, built_project: Path, where: str) -> None:
    project, digest = built_project, load(built_project / "out" / "tiny").digest
    change(project, 5)
    if where == "bundle":  # all is in the cache already
        options = ("-o", project / "other", "--cache", project / "cache")
        run("build", project / "tiny.toml", *options)
    limit = {"cache": 500, "bundle": 2000}[where]
    script = (
        "import resource, signal, sys\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "from prejit.runtime.__main__ import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", script, *arguments(project, "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 6, done.stderr
    assert "error[store]" in done.stderr
    at = project / "cache" / "v1" if where == "cache" else project / "out" / "tiny" / "blobs"
    assert f"{at}/" in done.stderr
    assert "cannot write" in done.stderr
    run("verify", project / "out" / "tiny")
    assert load(project / "out" / "tiny").digest == digest
    assert not [*project.rglob("*.tmp"), *(project / "cache" / "v1" / "temp").iterdir()]
    assert build(run, project)["written"]
    assert load(project / "out" / "tiny").call("p", x=_ones(3)).tolist() == [6, 6, 6]


@pytest.mark.parametrize(
    "closing", cases(["2>&- >&-"], others=["2>&1 | head -c 1", "2>&-", "2>/dev/full"])
)
def test_a_build_whose_stderr_is_closed_ends_and_writes_its_bundle(
    run: Run, project: Path, closing: str
) -> None:
    command = shlex.join(
        [sys.executable, "-m", "prejit.runtime", *arguments(project, "out")]
    ).removesuffix(" --json")
    script = f"set -o pipefail; {command} {closing}"
    subprocess.run(["bash", "-c", script], timeout=300, check=True, stdout=subprocess.DEVNULL)
    run("verify", project / "out" / "tiny")
    assert build(run, project)["compiled"] == 0


def test_equal_builds_at_once_compile_each_program_once(warm: WarmPython, project: Path) -> None:
    processes = [warm.start(*arguments(project, f"out{n}"), quick=True) for n in range(3)]
    built = [json.loads(process.communicate(timeout=300)[0])[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 3
    assert sum(each["compiled"] for each in built) == 6
    assert [each["compiled"] + each["cached"] for each in built] == [6] * 3
    assert len({each["digest"] for each in built}) == 1


def test_a_manifest_that_fails_is_named_and_the_others_are_built(run: Run, project: Path) -> None:
    for name, function in (("first", "f"), ("wrong", "g"), ("last", "f")):
        changes = {'"tiny"': f'"{name}"', "model:f": f"model:{function}", "[1, 2, 3]": "[1]"}
        text = functools.reduce(lambda t, change: t.replace(*change), changes.items(), MANIFEST)
        (project / f"{name}.toml").write_text(text)
    paths = [project / f"{name}.toml" for name in ("first", "wrong", "last")]
    build = ("build", *paths, "-o", project / "out", "--cache", project / "cache", "--json")
    done = run(*build, status=2, quick=True)
    built = [(Path(each["path"]).name, each["compiled"]) for each in json.loads(done.stdout)]
    assert built == [("first", 2), ("last", 0)], "equal programs compile once"
    assert f"1 of 3 bundles were not built\n  wrong ({paths[1]}):\n    " in done.stderr
    assert "tiny_model" in done.stderr
    assert "compiled first/p/n1 for cpu-host" in done.stderr


def test_unknown_targets_and_manifests_are_usage_errors(run: Run, project: Path) -> None:
    wrong = run("build", project / "tiny.toml", "--target", "cpu-x86-64-v9", status=2)
    assert "cpu-x86-64-v" in wrong.stderr
    assert "error[store]" in run("build", project / "missing.toml", status=6).stderr
    assert run("build", status=2).stderr
    assert run("plan", "--nonsense", status=2).stderr


def test_the_demo_is_built_once_and_fits_this_machine(run: Run, demo: Path) -> None:
    options = ("-o", demo.parent, "--target", "cpu-host", "--json")
    again = run("build", ROOT / "manifests" / "demo.toml", *options, quick=True)
    [built] = json.loads(again.stdout)
    assert (built["compiled"], built["written"]) == (0, False)
    explained = json.loads(run("explain", demo, "--json").stdout)
    assert explained["target"] == "cpu-host"
    assert "cpu-host" in [verdict["target"] for verdict in explained["verdicts"]]


def _ones(count: int) -> object:
    import numpy as np

    return np.ones(count, np.float32)
