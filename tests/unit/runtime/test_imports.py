"""What comes with an import: the first call's time is imports."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import pytest

import prejit.compiler
import prejit.runtime

RUNTIME = Path(prejit.runtime.__file__).parent
COMPILER = Path(prejit.compiler.__file__).parent
MODULES = sorted(RUNTIME.rglob("*.py"))
BUILD_MODULES = sorted(COMPILER.rglob("*.py"))
BUILD_SIDE = {"prejit.compiler", "flax", "transformers", "pydantic", "rich"}
WITHOUT_JAX = {"base", "machine", "store", "format", "text", "trust"}
"""Rooms that read bundles and machines. They import neither JAX nor NumPy: `prejit explain` is quick."""
ONLY_PRIVATE = RUNTIME / "device" / "_jaxlib.py"
PRIVATE = ("jax._src", "jaxlib._jax", "jaxlib.xla_client", "jaxlib.mlir", "jaxlib.xla_extension")


def imports_of(module: Path, *, at_import: bool = False) -> set[str]:
    """Dotted names of everything that a module imports, anywhere in it or when it is imported."""
    tree = ast.parse(module.read_text(encoding="utf-8"))
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module.name}: relative import"
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
            found.add(str(node.module))
        elif at_import and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            return
        elif (
            isinstance(node, ast.If)
            and isinstance(node.test, ast.Name)
            and node.test.id == "TYPE_CHECKING"
        ):
            if not at_import:
                for child in node.body:
                    visit(child)
            for child in node.orelse:
                visit(child)
            return
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(tree)
    return found


def of_package(names: set[str], packages: set[str] | tuple[str, ...]) -> set[str]:
    return {n for n in names for p in packages if n == p or n.startswith(f"{p}.")}


def room_of(module: Path) -> str:
    """The package of a module, below the root: `format`; of a module at the root: its own name."""
    root = RUNTIME if module.is_relative_to(RUNTIME) else COMPILER
    return module.relative_to(root).with_suffix("").parts[0]


def name_of(module: Path) -> str:
    root = RUNTIME if module.is_relative_to(RUNTIME) else COMPILER
    return ".".join((root.name, *module.relative_to(root).with_suffix("").parts))


@pytest.mark.parametrize("module", MODULES, ids=name_of)
def test_the_server_side_never_imports_the_build_side(module: Path) -> None:
    command_line = room_of(module) == "cli"
    assert not of_package(
        imports_of(module), BUILD_SIDE if command_line else BUILD_SIDE | {"click"}
    )


@pytest.mark.parametrize("module", MODULES, ids=name_of)
def test_the_format_part_imports_no_jax_and_no_numpy(module: Path) -> None:
    if room_of(module) in WITHOUT_JAX:
        found = of_package(imports_of(module), {"jax", "jaxlib", "numpy", "ml_dtypes"})
        # jaxlib.version is a file of constants; NumPy only inside functions.
        assert found <= {"jaxlib", "jaxlib.version", "numpy"}
        assert not of_package(imports_of(module, at_import=True), {"jax", "jaxlib", "numpy"})


@pytest.mark.parametrize("module", MODULES + BUILD_MODULES, ids=name_of)
def test_one_module_alone_touches_private_jax(module: Path) -> None:
    if module != ONLY_PRIVATE:
        assert not of_package(imports_of(module), PRIVATE)


def test_the_walk_sees_what_it_should() -> None:
    """Or the tests above would pass on anything."""
    assert "jax._src" in imports_of(ONLY_PRIVATE)
    assert "numpy" in imports_of(RUNTIME / "programs" / "weights.py", at_import=True)
    fingerprint = RUNTIME / "machine" / "fingerprint.py"
    assert "jaxlib" not in imports_of(fingerprint, at_import=True)
    assert "jaxlib.version" in imports_of(fingerprint)
    assert {room_of(module) for module in MODULES} > WITHOUT_JAX
    assert {room_of(module) for module in BUILD_MODULES} > {"pipeline", "models", "lowering"}


LIGHT = (
    *("numpy", "jax", "jaxlib", "tokenizers", "zstandard", "hashlib", "prejit.runtime.errors"),
    *("subprocess", "mmap", "typing_extensions", "jinja2", "blake3"),
)


def test_importing_the_package_imports_nothing_else(run_python: Any) -> None:
    run_python(
        "import sys, prejit.runtime\n"
        f"heavy = set({LIGHT!r}) & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert [m for m in sys.modules if m.startswith('prejit')] == ['prejit', 'prejit.runtime']"
    )


def test_every_public_name_is_there_and_comes_when_wanted(run_python: Any) -> None:
    run_python(
        "import sys, prejit.runtime as runtime\n"
        "assert runtime.RejectError.code == 'reject'\n"
        "assert 'numpy' not in sys.modules\n"
        "for name in runtime.__all__:\n"
        "    assert getattr(runtime, name).__name__ == name, name\n"
        "from prejit.runtime import *\n"
        "assert load.__module__ == 'prejit.runtime.loader'"
    )
    with pytest.raises(AttributeError, match=r"prejit\.runtime.*no attribute 'nothing'"):
        prejit.runtime.nothing  # noqa: B018


def test_the_errors_of_the_package_are_all_of_one_base() -> None:
    from prejit.runtime import errors

    found = [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, Exception)
    ]
    codes = []
    for error in found:
        if issubclass(error, Warning):
            assert issubclass(error, errors.PrejitWarning)
            assert error.__name__.endswith("Warning")
        else:
            assert issubclass(error, errors.PrejitError)
            assert error.__name__.endswith("Error")
            codes.append(error.code)
            assert error.exit_code in (1, 2, 3, 4, 5, 6, 7, 9)
    assert len(set(codes)) == len(codes), "a code tells which error it is"


def test_an_error_describes_itself_with_and_without_a_hint() -> None:
    from prejit.runtime.errors import RejectError, StoreError

    assert StoreError("no disk").describe() == "error[store]: no disk"
    text = RejectError("a/b", "expected 1, found 2", hint="fetch it again").describe()
    assert text == "error[reject]: a/b: expected 1, found 2\n\nhint: fetch it again"


def test_help_imports_next_to_nothing(run_python: Any) -> None:
    """Time is for benchmarks; what it is spent on can be tested."""
    done = run_python(
        "import sys\n"
        "from prejit.runtime.__main__ import main\n"
        "main(['--help'])\n"
        f"heavy = set({LIGHT!r}) - {{'prejit.runtime.errors'}}\n"
        "sys.exit(f'imported {heavy & set(sys.modules)}' if heavy & set(sys.modules) else 0)"
    )
    assert "Usage: prejit" in done.stdout


NOT_TO_LOAD = {
    *("tokenizers", "jinja2", "scipy", "click", "asyncio", "jax.numpy"),
    "prejit.runtime.start",  # a report is made when somebody asks
}


def test_loading_imports_neither_the_build_side_nor_all_of_jax(
    settled_dir: Path, run_python: Any
) -> None:
    run_python(
        "import sys\n"
        "import numpy as np\n"
        "from prejit.runtime import load\n"
        f"bundle = load({str(settled_dir)!r})\n"
        "bundle.call('score', x=np.ones((2, 16), np.float32))\n"
        f"heavy = {sorted(BUILD_SIDE | NOT_TO_LOAD)!r}\n"
        "found = [m for m in sys.modules for h in heavy if m == h or m.startswith(h + '.')]\n"
        "sys.exit(f'imported {found}' if found else 0)"
    )


def test_this_interpreter_is_one_that_we_support() -> None:
    assert sys.version_info >= (3, 11)
