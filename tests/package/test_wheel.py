"""The base install: the wheel in a fresh environment, without the build side's packages."""

from __future__ import annotations

import email
import json
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BUILD_SIDE = ("flax", "orbax", "pydantic", "rich", "safetensors", "transformers")
BY_TOKENIZERS = ("rich",)  # they come with its huggingface_hub, and are not imported


def run(*command: object, status: int = 0, **options: Any) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, timeout=900, **options
    )
    assert done.returncode == status, f"{words}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the source distribution, which is thereby known to be enough."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", out, ROOT)
    [path] = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def server(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bin` of an environment that has the wheel and what it asks for, and the jax of this one."""
    path = tmp_path_factory.mktemp("server")
    venv.create(path, with_pip=True)
    constraints = path / "constraints.txt"
    constraints.write_text("".join(f"{name}=={version(name)}\n" for name in ("jax", "jaxlib")))
    pip = (path / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "install", "-q")
    run(*pip, "--constraint", constraints, wheel)
    return path / "bin"


def test_the_wheel_holds_both_sides_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        [metadata] = [name for name in names if name.endswith(".dist-info/METADATA")]
        said = email.message_from_bytes(archive.read(metadata))
        [points] = [name for name in names if name.endswith("entry_points.txt")]
        assert b"prejit = prejit.runtime.__main__:main" in archive.read(points)
    inside = [name for name in names if ".dist-info/" not in name]
    assert {"/".join(name.split("/")[:2]) for name in inside} == {
        *("prejit/compiler", "prejit/runtime"),
    }
    assert "prejit/runtime/loader.py" in inside
    assert "prejit/compiler/pipeline/plan.py" in inside
    native = {"prejit/compiler/native/kernels/linear.cc", "prejit/compiler/native/forms.json"}
    catalogue = {f"prejit/runtime/machine/catalogue/{name}.toml" for name in ("cpu", "cuda", "tpu")}
    assert native | catalogue <= set(inside)
    assert "prejit/runtime/device/library_pages.txt" in inside
    templates = ROOT / "runtime" / "prejit" / "runtime" / "observe" / "templates"
    watching = {path.relative_to(ROOT / "runtime") for path in templates.rglob("*.*")}
    assert {path.suffix for path in watching} == {".json", ".md", ".yml"}
    assert set(map(str, watching)) <= set(inside)
    assert "prejit/runtime/py.typed" in inside, "it says `Typing :: Typed`"
    assert "prejit/__init__.py" not in inside, "prejit is a namespace of two roots"
    assert not [name for name in names if "test" in name or "__pycache__" in name]
    assert any(name.endswith("licenses/LICENSE") for name in names)
    required = said.get_all("Requires-Dist") or []
    base = {text.split(">")[0].split("<")[0] for text in required if "extra" not in text}
    assert base == {
        "jax",
        "jaxlib",
        "numpy",
        "blake3",
        "zstandard",
        "tokenizers",
        "jinja2",
        "click",
    }


def test_a_bundle_runs_where_only_the_server_side_is_installed(
    server: Path, settled_dir: Path, recipe: Any
) -> None:
    done = run(
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


def test_the_commands_work_there(server: Path, settled_dir: Path) -> None:
    for command in ((server / "prejit",), (server / "python", "-m", "prejit.runtime")):
        assert "cpu-host: fits this machine" in run(*command, "inspect", settled_dir).stdout
        assert "ok: 2 targets" in run(*command, "verify", settled_dir).stdout
        assert "Usage: prejit" in run(*command, "--help").stdout
        run(*command, "explain", settled_dir)


@pytest.mark.parametrize("command", ["build", "plan"])
def test_the_build_side_says_how_to_get_it(command: str, server: Path, tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text('[bundle]\nname = "x"\n')
    done = run(server / "prejit", command, "x.toml", status=2, cwd=tmp_path)
    assert done.stdout == ""
    assert done.stderr.startswith(f"error[usage]: `prejit {command}` needs the build side")
    assert done.stderr.rstrip().endswith("hint: pip install 'prejit[compiler]'")
