"""What of our own code and of jax's configuration is in keys: all that decides a result, and no more."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from prejit.compiler.store import code
from prejit.compiler.store.code import COMPILING, LOWERING, WEIGHTS, code_digest, jax_configuration

Edit = Callable[[str], None]


@pytest.fixture
def edit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Edit]:
    """Changes a byte of a module's source, in a copy of ours."""
    roots = {
        name: Path(shutil.copytree(root, tmp_path / name, ignore=shutil.ignore_patterns("*.so")))
        for name, root in code._ROOTS.items()
    }
    monkeypatch.setattr(code, "_ROOTS", roots)

    def forget() -> None:
        for cached in (code.code_digest, code.imported, code._imports):
            cached.cache_clear()

    def change(module: str) -> None:
        with code._file(module).open("a") as file:
            file.write("# mended\n")
        forget()

    forget()
    yield change
    forget()


@pytest.mark.parametrize(
    ("result", "module"),
    [
        (COMPILING, "prejit.runtime.device._jaxlib"),
        (COMPILING, "prejit.runtime.device.portable"),
        (COMPILING, "prejit.compiler.compile.disassembly"),
        (COMPILING, "prejit.compiler.compile.compiling"),
        (LOWERING, "prejit.compiler.models.layers.rope"),
        (LOWERING, "prejit.compiler.lowering.sampling"),
        (LOWERING, "prejit.compiler.native.products"),
        (LOWERING, "prejit.compiler.native.calls"),
        (WEIGHTS, "prejit.compiler.checkpoint.checkpoint"),
        (WEIGHTS, "prejit.compiler.checkpoint.tensor_files"),
        (WEIGHTS, "prejit.compiler.build.packaging"),
        (WEIGHTS, "prejit.compiler.models.precision"),
    ],
)
def test_a_mended_module_makes_again_what_it_decides(
    result: tuple[str, ...], module: str, edit: Edit
) -> None:
    before = code_digest(*result)
    edit(module)
    assert code_digest(*result) != before


@pytest.mark.parametrize("result", [COMPILING, LOWERING, WEIGHTS])
@pytest.mark.parametrize(
    "module", ["prejit.compiler.cli", "prejit.compiler.progress", "prejit.runtime.generation.batch"]
)
def test_a_module_that_decides_nothing_is_in_no_key(
    result: tuple[str, ...], module: str, edit: Edit
) -> None:
    before = code_digest(*result)
    edit(module)
    assert code_digest(*result) == before


def test_imports_are_found_as_python_finds_them() -> None:
    """They are read without a parser: this reads them with one."""

    def run(node: ast.AST) -> Iterator[ast.AST]:
        for child in ast.iter_child_nodes(node):
            if not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
                yield child
                yield from run(child)

    for root, directory in code._ROOTS.items():
        for file in sorted(directory.rglob("*.py")):
            parts = file.relative_to(directory).with_suffix("").parts
            module = ".".join((root, *(part for part in parts if part != "__init__")))
            if module in code._ROOTS:
                continue
            expected = set[str]()
            for node in run(ast.parse(file.read_bytes())):
                if isinstance(node, ast.Import):
                    expected |= {alias.name for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module:
                    assert node.level == 0, f"{module}: relative imports are not found"
                    expected |= {node.module, *(f"{node.module}.{a.name}" for a in node.names)}
            expected = {name for name in expected if code._is_module(name)}
            assert expected <= set(code._imports(module)), module


SETTINGS = {
    "JAX_ENABLE_X64": "1",
    "JAX_DEFAULT_MATMUL_PRECISION": "highest",
    "JAX_DEFAULT_PRNG_IMPL": "rbg",
    "JAX_NUMPY_DTYPE_PROMOTION": "strict",
    "JAX_THREEFRY_PARTITIONABLE": "off",
    "JAX_RANDOM_SEED_OFFSET": "3",
}
BEFORE_AND_AFTER = """
import json, os
from prejit.compiler.store.code import jax_configuration
before = jax_configuration(os.environ)
import jax
print(json.dumps([before, jax_configuration(os.environ)]))
"""


@pytest.mark.parametrize("settings", [{}, SETTINGS], ids=["defaults", "set"])
def test_jax_is_configured_as_its_environment_says_before_it_is_imported(
    settings: dict[str, str],
) -> None:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    done = subprocess.run(
        [sys.executable, "-c", BEFORE_AND_AFTER],
        env={**plain, **settings},
        capture_output=True,
        check=True,
    )
    before, after = json.loads(done.stdout)
    assert before == after
    assert len(before.split()) == len(settings)


def test_what_decides_no_program_is_no_part_of_jaxs_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    assert jax_configuration({"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": "/x"}) == ""
    assert jax_configuration({"JAX_ENABLE_X64": "true"}) == "jax_enable_x64=True"
