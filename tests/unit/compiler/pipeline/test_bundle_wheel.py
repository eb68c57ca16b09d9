"""A bundle as a wheel is whole where pip has installed it, and `load` finds it by name."""

import importlib.util
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from tests.layouts import GOLDEN

from prejit.compiler.pipeline.bundle_wheel import write_wheel
from prejit.runtime.__main__ import main
from prejit.runtime.errors import BuildError, UsageError
from prejit.runtime.ship.reference import parse_reference

CALL = """
import sys, numpy
from prejit.runtime import load
bundle = load("wheel:call-bundle")
print(bundle.digest, bundle.call("score", x=numpy.ones((2, 16), numpy.float32)).shape)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling is not installed")
    return write_wheel(str(GOLDEN / "call"), tmp_path_factory.mktemp("dist") / "new")


def test_a_wheel_loads_by_its_name_in_a_fresh_environment(wheel, tmp_path):
    into = tmp_path / "environment"
    venv.create(into, symlinks=True)
    python = into / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-index"]
    subprocess.run([*pip, "--no-deps", str(wheel)], check=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(into)}))
    # It sees what this environment has. Not a path alone: files in it lead to the installs of prejit.
    here = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    (packages / "tested.pth").write_text(here)
    command = [python, "-W", "ignore", "-c", CALL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    digest, shape = done.stdout.split(maxsplit=1)
    assert shape == "(2, 4)\n"
    module = [python, "-m", "prejit.runtime"]
    for command in (["verify"], ["inspect"], ["explain"]):
        said = subprocess.check_output([*module, *command, "wheel:call-bundle"], text=True)
        assert digest in said or command == ["explain"]
    copied = [*module, "copy", "wheel:call-bundle", str(tmp_path / "copy")]
    subprocess.run(copied, check=True, capture_output=True)
    assert (tmp_path / "copy" / "index.json").exists()
    [directory] = into.rglob("call_bundle")
    found = {str(each.relative_to(directory)) for each in directory.rglob("*") if each.is_file()}
    whole = {str(each.relative_to(GOLDEN / "call")) for each in (GOLDEN / "call").rglob("*/*/*")}
    assert found == whole | {"index.json", "oci-layout"}


def test_the_same_bundle_gives_the_same_wheel(wheel, tmp_path, monkeypatch):
    shutil.copytree(GOLDEN / "call", tmp_path / "call")
    (tmp_path / "call" / "left by somebody").write_text("")
    monkeypatch.chdir(tmp_path)
    again = write_wheel("call", tmp_path)
    assert (again.name, again.read_bytes()) == (wheel.name, wheel.read_bytes())
    assert again.name.startswith("call_bundle-0+")
    assert again.name.endswith("-py3-none-any.whl")


def test_the_command(wheel, tmp_path, capsys, ran):
    words = ["wheel", str(GOLDEN / "call"), "-o", str(tmp_path), "--version", "1.2"]
    assert main(words) == 0
    path = tmp_path / "call_bundle-1.2-py3-none-any.whl"
    assert capsys.readouterr().out == f"{path}\n"
    with zipfile.ZipFile(path) as archive:
        said = archive.read("call_bundle-1.2.dist-info/METADATA").decode()
    assert "Requires-Dist" not in said
    refused = ran(*words[:-1], "next", status=2).err
    assert "expected a version such as 1.2.0, found 'next'" in refused


def half(_builder, _kind, output):
    (Path(output) / "call_bundle-1-py3-none-any.whl").write_bytes(b"PK")
    raise OSError("No space left")


def test_a_package_without_a_bundle_or_a_place_without_room_is_named(wheel, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    said = r"file: cannot write the wheel .*call: File exists"
    with pytest.raises(BuildError, match=said) as raised:
        write_wheel(str(GOLDEN / "call"), tmp_path / "file")
    assert "-o DIR" in raised.value.hint
    with monkeypatch.context() as patch:
        patch.setattr("build.ProjectBuilder.build", half)
        with pytest.raises(BuildError, match=r"cannot write the wheel .*: No space left"):
            write_wheel(str(GOLDEN / "call"), tmp_path / "full")
    assert [*(tmp_path / "full").iterdir()] == []
    for name, expected in (
        *((each, "the name of an installed package") for each in ("no-such-bundle", "../call")),
        ("click", "a package that `prejit wheel` wrote"),
    ):
        with pytest.raises(UsageError, match=f"expected {expected}") as raised:
            parse_reference(f"wheel:{name}")
        assert raised.value.hint
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="found no build") as raised:
        write_wheel(str(GOLDEN / "call"), tmp_path)
    assert raised.value.hint == "pip install 'prejit[wheel]'"
