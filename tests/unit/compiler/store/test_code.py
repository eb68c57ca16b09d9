"""The digest of our own code in keys: all code that decides a result, no other code, and no prose."""

from __future__ import annotations

import ast
import shutil
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from prejit.compiler.store import code
from prejit.compiler.store.code import ACCURACY, COMPILING, LOWERING, WEIGHTS, code_digest

Edit = Callable[[str, Callable[[str], str]], None]


@pytest.fixture
def edit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Edit]:
    """Changes the source of a module, in a copy of ours."""
    roots = {
        name: Path(shutil.copytree(root, tmp_path / name, ignore=shutil.ignore_patterns("*.so")))
        for name, root in code._ROOTS.items()
    }
    monkeypatch.setattr(code, "_ROOTS", roots)

    def change(module: str, how: Callable[[str], str]) -> None:
        file = code._file(module)
        before = file.read_text()
        after = how(before)
        assert after != before, "the edit changes nothing"
        file.write_text(after)
        forget()

    forget()
    yield change
    forget()


def forget() -> None:
    for cached in (code.code_digest, code.imported, code._source, code._is_module):
        cached.cache_clear()


def mended(source: str) -> str:
    return source + "_MENDED = True\n"


@pytest.mark.parametrize(
    ("result", "module"),
    [
        (COMPILING, "prejit.runtime.device._jaxlib"),
        (COMPILING, "prejit.runtime.device.portable"),
        (COMPILING, "prejit.compiler.compile.worker.xla"),
        (COMPILING, "prejit.compiler.compile.worker.disassembly"),
        (COMPILING, "prejit.compiler.compile.worker.compiling"),
        (LOWERING, "prejit.compiler.models.layers.rope"),
        (LOWERING, "prejit.compiler.lowering.sampling"),
        (LOWERING, "prejit.compiler.native.products"),
        (LOWERING, "prejit.compiler.native.calls"),
        (WEIGHTS, "prejit.compiler.checkpoint.checkpoint"),
        (WEIGHTS, "prejit.compiler.checkpoint.tensor_files"),
        (WEIGHTS, "prejit.compiler.pipeline.pack.bundle_files"),
        (WEIGHTS, "prejit.compiler.models.precision"),
    ],
)
def test_a_mended_module_makes_again_what_it_decides(
    result: tuple[str, ...], module: str, edit: Edit
) -> None:
    before = code_digest(*result)
    edit(module, mended)
    assert code_digest(*result) != before


@pytest.mark.parametrize("result", [COMPILING, LOWERING, WEIGHTS])
@pytest.mark.parametrize(
    "module",
    ["prejit.compiler.cli.run", "prejit.compiler.progress", "prejit.runtime.generation.batch"],
)
def test_a_module_that_decides_nothing_is_in_no_key(
    result: tuple[str, ...], module: str, edit: Edit
) -> None:
    before = code_digest(*result)
    edit(module, mended)
    assert code_digest(*result) == before


def rewritten(source: str) -> str:
    """The source as the parser sees it, without a comment, a blank line or a docstring, and with new ones."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            text = ast.Expr(ast.Constant('Another "docstring",\nwith ( in it. # No comment.'))
            if ast.get_docstring(node) is None:
                node.body.insert(0, text)
            else:
                node.body[0] = text
    return ast.unparse(ast.fix_missing_locations(tree))


def test_prose_changes_no_digest(edit: Edit) -> None:
    """Nothing of any module but its code counts; unparsed twice, code has one form."""
    modules = code.imported(*COMPILING, *LOWERING, *WEIGHTS, *ACCURACY)
    for module in modules:
        edit(
            module, lambda source: ast.unparse(ast.parse(source)) + "\n# The form of the parser.\n"
        )
    before = [code_digest(*each) for each in (COMPILING, LOWERING, WEIGHTS, ACCURACY)]
    for module in modules:
        edit(module, lambda source: "# A comment.\n\n" + rewritten(source) + "\n\n")
    assert [code_digest(*each) for each in (COMPILING, LOWERING, WEIGHTS, ACCURACY)] == before


MAIN, HELPER, OTHER = (f"prejit.compiler.{name}" for name in ("main", "base.helper", "base.other"))
SOURCES = {
    MAIN: """
        from typing import TYPE_CHECKING
        from prejit.compiler.base.helper import double

        if TYPE_CHECKING:
            from prejit.compiler.base.other import Other

        def run(x):
            if x < 0:
                raise ValueError(f"expected 0 or more, found {x}")
            return double(x) + len("text")
        """,
    HELPER: "def double(x):\n    return 2 * x\n",
    OTHER: "def double(x):\n    return x + x\n\nclass Other:\n    pass\n",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Edit]:
    """Edits one of SOURCES."""
    monkeypatch.setattr(code, "_ROOTS", {"prejit.compiler": tmp_path})
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "__init__.py").touch()
    for name, source in SOURCES.items():
        code._file(name).write_text(textwrap.dedent(source))

    def change(module: str, how: Callable[[str], str]) -> None:
        file = code._file(module)
        before = file.read_text()
        assert how(before) != before, "the edit changes nothing"
        file.write_text(how(before))
        forget()

    forget()
    yield change
    forget()


def replaced(old: str, new: str) -> Callable[[str], str]:
    return lambda source: source.replace(old, new)


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (MAIN, "def run", '"""What it is for: (."""\n\n\ndef run'),
        (MAIN, "if x <", "# Why: it's so.\n    if x <"),
        (MAIN, "return double(x) +", "return double(  # both\n        x) +"),
        (MAIN, "expected 0 or more, found {x}", "cannot double {x}"),
        (MAIN, "import Other", "import Other, Another"),
        (HELPER, "    return", "    'Return twice x.'\n    return"),
        (OTHER, "x + x", "x - x"),
    ],
    ids=["docstring", "comment", "line break", "error", "types only", "helper", "not imported"],
)
def test_prose_and_what_does_not_run_change_no_digest(
    module: str, old: str, new: str, package: Edit
) -> None:
    before = code_digest(MAIN)
    package(module, replaced(old, new))
    assert code_digest(MAIN) == before


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (MAIN, "x < 0", "x < 1"),
        (MAIN, '"text"', '"texts"'),
        (MAIN, "ValueError", "TypeError"),
        (MAIN, "base.helper", "base.other"),
        (MAIN, "    return", "return"),
        (HELPER, "2 *", "3 *"),
    ],
    ids=["statement", "text", "kind of error", "import", "indentation", "helper"],
)
def test_all_that_runs_changes_the_digest(module: str, old: str, new: str, package: Edit) -> None:
    before = code_digest(MAIN)
    package(module, replaced(old, new))
    assert code_digest(MAIN) != before


def test_a_module_that_moves_changes_no_digest(package: Edit) -> None:
    before = code_digest(MAIN)
    code._file(HELPER).rename(code._file("prejit.compiler.helping"))
    package(MAIN, replaced("prejit.compiler.base.helper", "prejit.compiler.helping"))
    assert HELPER not in code.imported(MAIN)
    assert code_digest(MAIN) == before


def test_digests_are_quick() -> None:
    """A build that changes nothing makes them all."""
    least = 9.0
    for _ in range(5):
        forget()
        start = time.process_time()
        code_digest(*LOWERING)
        least = min(least, time.process_time() - start)
    assert least < 0.25


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
            expected = set[tuple[str, str]]()
            for node in run(ast.parse(file.read_bytes())):
                if isinstance(node, ast.Import):
                    expected |= {(alias.name, alias.asname or alias.name) for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("prejit."):
                    assert node.level == 0, f"{module}: relative imports are not found"
                    for alias in node.names:
                        inner = f"{node.module}.{alias.name}"
                        at = inner if code._is_module(inner) else str(node.module)
                        expected.add((at, alias.asname or alias.name))
            found = {(each.module, each.local) for each in code._source(module).imports}
            assert found == {each for each in expected if code._is_module(each[0])}, module
