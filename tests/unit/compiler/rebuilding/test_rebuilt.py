"""A bundle is built again from what it records: equal, explained, or a finding that is named."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.manifests import functions_manifest

import prejit.compiler
from prejit.compiler import Program
from prejit.compiler.pipeline.pack import bundle_descriptions as descriptions
from prejit.compiler.progress import Quiet
from prejit.compiler.rebuilding.rebuilt import rebuild
from prejit.runtime import load
from prejit.runtime.cli.commands import run
from prejit.runtime.errors import BuildError, UsageError

KEYS = (
    'function = "functions.first:f"; args = { x = "float32[{n}]" }; buckets = { n = [2, 3] }; '
    'reads = ["data/*.txt"]; params = "params.safetensors"'
)
FILES = {
    "functions/__init__.py": "",
    "functions/first.py": "from pathlib import Path\nfrom .second import scaled\n"
    'FILE = Path(__file__).with_name("factor.txt")\n'
    "def f(params, x):\n    return scaled(params['w'][0] * x) + float(FILE.read_text())\n",
    "functions/second.py": "def scaled(x):\n    return x * 2\n",
    "functions/factor.txt": "1",
    "data/declared.txt": "1",
}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A project with its bundle in `out/m`. Who changes it puts it right again."""
    directory = tmp_path_factory.mktemp("project")
    for name, content in FILES.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(content)
    save_file({"w": np.ones(2, np.float32)}, directory / "params.safetensors")
    options = {"cache": directory / "cache", "workers": 1, "quiet": True}
    functions_manifest(directory / "m.toml", {"f": KEYS}, ("cpu-host", "cpu-x86-64-v3"))
    prejit.compiler.build(directory / "m.toml", directory / "out", **options)
    return directory


def again(project):
    return rebuild(project / "out" / "m", project / "m.toml", progress=Quiet(), workers=1)


def test_a_rebuild_is_equal_and_takes_nothing_from_the_cache(project, monkeypatch, said):
    monkeypatch.setenv("PREJIT_CACHE", "/nonexistent/cache")  # it would have to be made
    bundle = project / "out" / "m"
    monkeypatch.chdir(project / "out")
    with pytest.raises(BuildError, match=r"expected its manifest at m\.toml, found no f") as caught:
        rebuild(bundle, None, progress=Quiet())
    assert "--manifest FILE" in str(caught.value.hint)
    monkeypatch.chdir(project)
    found = json.loads(said("rebuild", "--verify", bundle, "--json", "--jobs", "1"))
    assert found["digest"] == found["rebuilt"] == load(bundle).digest
    kinds = {(each["kind"], each["target"]) for each in found["parts"]}
    of_all = {("weights.safetensors", ""), ("StableHLO", "")}
    hosts = ("cpu-host", "cpu-x86-64-v3")
    assert kinds >= of_all | {("executable", host) for host in hosts} | {("table", "cpu-host")}
    assert {each["verdict"] for each in found["parts"]} == {"equal"}


def test_changed_sources_are_named_before_anything_compiles(project):
    names = ("functions/second.py", "params.safetensors", "m.toml", "data/declared.txt")
    contents = {project / name: (project / name).read_bytes() for name in names}
    try:
        for file, content in contents.items():
            file.write_bytes(content + b"\n")
        with pytest.raises(BuildError, match="4 of the files that it was built from") as caught:
            again(project)
        for file, content in contents.items():
            assert f"  {file}: expected sha256:" in str(caught.value)
            file.write_bytes(content)
        for file, content in contents.items():
            file.unlink()
            with pytest.raises(BuildError, match="found no file"):
                again(project)
            file.write_bytes(content)
    finally:
        for file, content in contents.items():
            file.write_bytes(content)


def test_a_hidden_input_is_a_finding(project, capsys):
    hidden = project / "functions" / "factor.txt"
    try:
        hidden.write_text("3")
        arguments = ["rebuild", "--jobs", "1", "--verify", str(project / "out" / "m")]
        assert run([*arguments, "--manifest", str(project / "m.toml")]) == 8
    finally:
        hidden.write_text("1")
    out = capsys.readouterr().out
    for said in (
        "StableHLO            all            2 DIFFERS",
        "executable           cpu-host       2 DIFFERS",
        "weights.safetensors  all            equal",
        "DIFFERS StableHLO f/n2: the same operations, another line: ",
        *("dense<1.000000e+00>", "dense<3.000000e+00>"),
    ):
        assert said in out


def test_conditions_explain_executables(project, monkeypatch):
    flags = "--xla_cpu_enable_fast_min_max=true --xla_cpu_prefer_vector_width=128"
    monkeypatch.setenv("XLA_FLAGS", flags)
    found = again(project)
    assert not found.findings
    by_part = {(each.kind, each.name, each.target): each for each in found.parts}
    assert by_part["StableHLO", "f/n2", ""].verdict == "equal"
    table = by_part["table", "", "cpu-host"]
    assert table.verdict == "explained"
    assert "xla_flags" in table.reason or table.reason == "its executables differ"
    for each in found.parts:
        if each.kind == "executable" and each.verdict == "explained":
            assert "xla_flags" in each.reason


def test_what_cannot_be_rebuilt_says_so(tmp_path, recipe):
    without = recipe.write(tmp_path / "without")
    with pytest.raises(BuildError, match="expected the provenance of its build, found none"):
        rebuild(without, None, progress=Quiet())
    programs = [Program("p", fn=abs, args=["float32[2]"])]
    options = {"name": "p", "cache": tmp_path / "cache", "quiet": True}
    made_in_python = prejit.compiler.build(programs, tmp_path / "python", **options)
    with pytest.raises(UsageError, match="found one that a Python program built"):
        rebuild(made_in_python.path, None, progress=Quiet())
    digest = load(without).digest
    recorded = descriptions.recording_provenance
    descriptions.attach_descriptions(without, digest, lambda i, c: recorded(digest, i, c))
    with pytest.raises(UsageError, match="found one that `prejit record` made"):
        rebuild(without, None, progress=Quiet())
