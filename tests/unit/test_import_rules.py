"""`make lint` finds every import that the rules in pyproject.toml forbid, wherever the import stands."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("importlinter", reason="import-linter comes with the lint group")

REPOSITORY = Path(__file__).parents[2]
RUNTIME = Path("runtime", "prejit", "runtime")
SETTINGS = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
RULES = {rule["name"]: rule for rule in SETTINGS["tool"]["importlinter"]["contracts"]}

IN_A_FUNCTION = "def f():\n    {}\n"
FOR_TYPES = "if TYPE_CHECKING:\n    {}\n"
AT_THE_TOP = "{}\n"
BREAKS = [
    ("prejit.runtime.text.sandbox", IN_A_FUNCTION, "prejit.compiler.store.build_cache_key"),
    ("prejit.server.served.process_upkeep", FOR_TYPES, "prejit.server.http.app"),
    ("prejit.runtime.format.layout", IN_A_FUNCTION, "prejit.runtime.loader"),
    ("prejit.runtime.machine.kept_files", FOR_TYPES, "prejit.runtime.format.layout"),
    ("prejit.compiler.targets.toolchain", IN_A_FUNCTION, "prejit.compiler.lowering.export"),
    (
        "prejit.runtime.generation.sampling_arguments",
        FOR_TYPES,
        "prejit.runtime.generation.continuous_batch",
    ),
    ("prejit.runtime.programs.pytree", IN_A_FUNCTION, "flax"),
    ("prejit.runtime.bundle", FOR_TYPES, "click"),
    ("prejit.runtime.trust.policy", IN_A_FUNCTION, "jax"),
    ("prejit.runtime.text.chat_template", FOR_TYPES, "numpy"),
    ("prejit.runtime.programs.pytree", AT_THE_TOP, "jaxlib"),
    ("prejit.compiler.compile.pool", IN_A_FUNCTION, "prejit.compiler.compile.worker.xla"),
    ("prejit.compiler.compile.worker.xla", AT_THE_TOP, "click"),
]
"""Imports that break each rule: where, how and of what."""


def lint(directory):
    """Return what import-linter prints about a checkout."""
    paths = [
        *(str(directory / root) for root in ("runtime", "server", "compiler")),
        *filter(None, sys.path),
    ]
    call = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(cache_dir=None))"
    done = subprocess.run(
        [sys.executable, "-c", call],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Contracts: " in done.stdout, done.stdout + done.stderr
    return done.stdout


def test_every_forbidden_import_is_found_and_every_rule_can_be_broken(tmp_path):
    for root in ("runtime", "server", "compiler"):
        ignored = shutil.ignore_patterns("__pycache__", "kernels")
        shutil.copytree(REPOSITORY / root, tmp_path / root, ignore=ignored)
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    assert f"Contracts: {len(RULES)} kept, 0 broken." in lint(tmp_path)
    for module, place, target in BREAKS:
        file = tmp_path / module.split(".")[1] / Path(*module.split(".")).with_suffix(".py")
        with file.open("a", encoding="utf-8") as stream:
            stream.write("\n" + place.format(f"import {target}"))
    (tmp_path / RUNTIME / "attic").mkdir()
    (tmp_path / RUNTIME / "attic" / "__init__.py").touch()
    printed = lint(tmp_path)
    assert set(re.findall(r"^(.*) BROKEN", printed, re.MULTILINE)) == RULES.keys()
    assert "not listed as layers:\n\n- prejit.runtime.attic\n" in printed
    in_a_circle = (
        "prejit.runtime.generation.sampling_arguments",
        "prejit.runtime.generation.continuous_batch",
    )
    assert "No cycles are allowed in prejit.runtime.generation." in printed
    assert "\n- .sampling_arguments -> .continuous_batch (1 import)\n" in printed
    for module, _, target in BREAKS:
        if (module, target) != in_a_circle:
            assert f" {module} -> {target} (" in printed


def test_the_drawing_shows_the_layers_of_the_rules():
    page = (REPOSITORY / "docs" / "architecture" / "index.md").read_text(encoding="utf-8")
    for root in ("runtime", "server", "compiler"):
        drawn = page.partition(f"+- {root}/prejit/{root} -")[2].partition("\n+-")[0]
        rooms = [row.strip().split(", ") for row in re.findall(r"^\|(.*)\|$", drawn, re.MULTILINE)]
        [layers] = [
            r["layers"] for r in RULES.values() if r.get("containers") == [f"prejit.{root}"]
        ]
        assert rooms == [layer.split(" | ") for layer in layers]


def test_importing_rooms_without_jax_imports_no_numpy_either(run_python):
    """One of their functions imports NumPy, which its rule allows, and no rule says where in a file."""
    rule = RULES["Files are read and checked without jax and NumPy"]
    run_python(
        "import importlib, pkgutil, sys\n"
        "for room in sys.argv[1].split():\n"
        "    package = importlib.import_module(room)\n"
        "    for each in pkgutil.walk_packages(getattr(package, '__path__', ()), f'{room}.'):\n"
        "        importlib.import_module(each.name)\n"
        "assert 'prejit.runtime.base.arguments' in sys.modules\n"
        "found = sys.modules.keys() & set(sys.argv[2].split())\n"
        "assert not found, found\n",
        " ".join(rule["source_modules"]),
        " ".join(rule["forbidden_modules"]),
    )
