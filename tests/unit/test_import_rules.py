"""The import rules of `make lint` see every kind of import, on a copy of both roots that breaks one rule."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.import_graph import REPOSITORY, ROOTS

pytest.importorskip("importlinter", reason="import-linter comes with the lint group")

RUNTIME, COMPILER = ROOTS["prejit.runtime"], ROOTS["prejit.compiler"]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("roots")
    for home in ROOTS.values():
        ignored = shutil.ignore_patterns("__pycache__", "kernels")
        shutil.copytree(REPOSITORY / home, directory / home, ignore=ignored)
    shutil.copy(REPOSITORY / "pyproject.toml", directory)
    return directory


def broken_rules(directory: Path) -> list[str]:
    """Return the names of the rules that a checkout breaks."""
    paths = [str(directory / home.parents[1]) for home in ROOTS.values()]
    paths += [path for path in sys.path if path]
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(cache_dir=None))",
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Contracts: " in done.stdout, done.stdout + done.stderr
    return [line.partition(" BROKEN")[0] for line in done.stdout.splitlines() if " BROKEN" in line]


def test_the_repository_breaks_no_rule(copy: Path) -> None:
    assert broken_rules(copy) == []


@pytest.mark.parametrize(
    ("file", "text", "rule"),
    [
        (
            RUNTIME / "format" / "layout.py",
            "def f():\n    from prejit.runtime.loader import load\n",
            "The packages of the server side import one way",
        ),
        (
            RUNTIME / "store" / "receipts.py",
            "if TYPE_CHECKING:\n    from prejit.runtime.format import schema\n",
            "The packages of the server side import one way",
        ),
        (
            COMPILER / "targets" / "toolchain.py",
            "def f():\n    from prejit.compiler.lowering import export\n",
            "The packages of the build side import one way",
        ),
        (
            RUNTIME / "generation" / "sampling.py",
            "if TYPE_CHECKING:\n    from prejit.runtime.generation import batch\n",
            "No files import each other in a circle",
        ),
        (
            RUNTIME / "text" / "stop.py",
            "def f():\n    import prejit.compiler.store.key\n",
            "The server side never imports the build side",
        ),
        (
            RUNTIME / "programs" / "pytree.py",
            "def f():\n    import flax\n",
            "A server needs none of the build side's dependencies",
        ),
        (
            RUNTIME / "bundle.py",
            "def f():\n    import click\n",
            "A server needs none of the build side's dependencies",
        ),
        (
            RUNTIME / "programs" / "pytree.py",
            "from jaxlib import xla_client\n",
            "One module touches jaxlib",
        ),
        (
            COMPILER / "compile" / "pool.py",
            "def f():\n    from prejit.compiler.compile.worker import xla\n",
            "A build uses a worker's code only through its process",
        ),
        (
            COMPILER / "compile" / "worker" / "xla.py",
            "def f():\n    import click\n",
            "A worker runs in environments that have the server's dependencies only",
        ),
    ],
)
def test_a_broken_rule_is_found(copy: Path, file: Path, text: str, rule: str) -> None:
    path = copy / file
    before = path.read_text(encoding="utf-8")
    path.write_text(before + "\n" + text, encoding="utf-8")
    try:
        assert rule in broken_rules(copy)
    finally:
        path.write_text(before, encoding="utf-8")


def test_a_room_without_a_place_in_the_layers_is_found(copy: Path) -> None:
    room = copy / RUNTIME / "attic"
    room.mkdir()
    (room / "__init__.py").write_text("")
    try:
        assert broken_rules(copy) == ["The packages of the server side import one way"]
    finally:
        shutil.rmtree(room)
