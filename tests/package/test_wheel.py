"""The three wheels, and the runtime's alone in a fresh environment."""

import email
import importlib.util
import json
import re
import sys
import sysconfig
import venv
import zipfile
from importlib.metadata import distribution, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from tests.processes import ran

ROOT = Path(__file__).parents[2]
BUILD_SIDE = ("flax", "orbax", "pydantic", "rich", "safetensors", "transformers")
BY_TOKENIZERS = ("rich",)  # they come with its huggingface_hub, and are not imported


HOUSES = ("runtime", "server", "compiler")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """The wheel of each house, built from its source distribution, which is thereby known to be enough."""
    found = {}
    alone = [] if importlib.util.find_spec("hatchling") is None else ["--no-isolation"]
    for house in HOUSES:
        out = tmp_path_factory.mktemp(house)
        ran(sys.executable, "-m", "build", *alone, "--outdir", out, ROOT / house)
        [found[house]] = out.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def server(wheels, tmp_path_factory):
    """`bin` of an environment that has the runtime's wheel, and links to what the wheel asks for."""
    path = tmp_path_factory.mktemp("server")
    venv.create(path, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(path)}))
    waiting = [(text, "") for text in files_of(wheels["runtime"])[1].get_all("Requires-Dist")]
    seen = set()
    while waiting:
        text, extra = waiting.pop()
        wanted = Requirement(text)
        key = (wanted.name, *wanted.extras)
        if key in seen or (wanted.marker and not wanted.marker.evaluate({"extra": extra})):
            continue
        seen.add(key)
        installed = distribution(wanted.name)
        assert wanted.specifier.contains(installed.version, prereleases=True), wanted
        for top in {file.parts[0] for file in installed.files or ()} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(installed.locate_file(top))
        required = installed.requires or ()
        waiting += [(each, extra) for each in required for extra in ("", *wanted.extras)]
    pip = ("-m", "pip", "--disable-pip-version-check", "--python", path / "bin" / "python")
    ran(sys.executable, *pip, "install", "-q", "--no-deps", "--no-compile", wheels["runtime"])
    return path / "bin"


def files_of(wheel):
    """Return the files of a wheel that are installed, and its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        [metadata] = [name for name in names if name.endswith(".dist-info/METADATA")]
        said = email.message_from_bytes(archive.read(metadata))
    assert any(name.endswith("licenses/LICENSE") for name in names)
    return [name for name in names if ".dist-info/" not in name], said


def required(said):
    """Return what a wheel always needs, and its versions."""
    lines = [text for text in said.get_all("Requires-Dist") or [] if "extra ==" not in text]
    return dict(re.match(r"([\w-]+)(.*)", line).groups() for line in lines)


@pytest.mark.parametrize("house", HOUSES)
def test_a_wheel_holds_its_house_and_nothing_else(house, wheels):
    inside, _ = files_of(wheels[house])
    assert {"/".join(name.split("/")[:2]) for name in inside} == {f"prejit/{house}"}
    assert "prejit/__init__.py" not in inside, "prejit is a namespace of three roots"
    assert f"prejit/{house}/py.typed" in inside, "it says `Typing :: Typed`"
    assert not [name for name in inside if "test" in name or "__pycache__" in name]
    tracked = ran("git", "ls-files", f"{house}/prejit", cwd=ROOT).stdout.split()
    assert sorted(inside) == sorted(each.removeprefix(f"{house}/") for each in tracked)


def test_the_extras_bring_the_other_wheels_of_the_same_version(wheels):
    said = {house: files_of(wheel)[1] for house, wheel in wheels.items()}
    assert {each["Version"] for each in said.values()} == {version("prejit")}
    extras = [text for text in said["runtime"].get_all("Requires-Dist") or [] if "extra ==" in text]
    for house in ("server", "compiler"):
        assert f"prejit-{house}=={version('prejit')}; extra == '{house}'" in extras
        assert said[house]["Name"] == f"prejit-{house}"
        assert required(said[house])["prejit"] == f"=={version('prejit')}"
    assert wheels["runtime"].stat().st_size < 610_000
    assert required(said["runtime"]).keys() == {
        *("jax", "jaxlib", "numpy", "blake3", "zstandard", "tokenizers", "jinja2", "click")
    }


def test_the_quick_start_names_the_wheels(wheels):
    said = (ROOT / "docs" / "quick-start.md").read_text()
    patterns = set(re.findall(r"dist/(\S+\.whl)", said))
    for wheel in wheels.values():
        assert [each for each in patterns if wheel.match(each)], wheel.name
    for each in patterns:
        assert len([wheel for wheel in wheels.values() if wheel.match(each)]) == 1, each


def test_a_bundle_runs_where_only_the_server_side_is_installed(server, settled_dir, recipe):
    done = ran(
        server / "python",
        "-c",
        f"""
import importlib.util, json, sys
from prejit.runtime import load
import numpy as np
bundle = load({str(settled_dir)!r}, on_mismatch="error")
y = bundle.call("score", x=np.zeros((2, 16), np.float32))
print(json.dumps({{
    "y": y.tolist(),
    "how": [r.source for r in bundle.report()],
    "installed": [name for name in {BUILD_SIDE!r} if importlib.util.find_spec(name)],
    "imported": [m for m in sys.modules if m.partition(".")[0] in {BUILD_SIDE!r}
                 or m.startswith("prejit.compiler")],
    "from": bundle.__class__.__module__ and sys.modules["prejit.runtime"].__file__,
}}))""",
        cwd=server.parent,
    )
    said = json.loads(done.stdout)
    assert done.stderr == ""
    assert said["y"] == [recipe.weights["score:bias"].tolist()] * 2
    assert said["how"] == ["loaded", "unused", "unused", "unused"]
    assert set(said["installed"]) <= set(BY_TOKENIZERS)
    assert said["imported"] == []
    assert said["from"].startswith(str(server.parent)), "it tested the checkout, not the wheel"


def test_the_commands_work_there(server, settled_dir):
    command, module = (server / "prejit",), (server / "python", "-m", "prejit.runtime")
    assert "cpu-host: fits this machine" in ran(*command, "inspect", settled_dir).stdout
    assert "Usage: prejit" in ran(*module, "--help").stdout
    assert "ok: 2 targets" in ran(*module, "verify", settled_dir).stdout
    ran(*command, "explain", settled_dir)
