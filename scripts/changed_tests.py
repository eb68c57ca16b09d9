"""Run the unit tests that touch what changed, for as long as a developer waits.

    python -m scripts.changed_tests [--seconds 40] [--list]

Changed is what the working tree holds beside the last commit; in a clean working tree, the last commit.
A changed test runs. A changed module runs the test of the same name, then the unit tests that import it;
where there is none, the tests of its room. When the time is over, the rest is left to `make test-fast`.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
ROOTS = {
    "prejit.runtime": Path("runtime", "prejit", "runtime"),
    "prejit.server": Path("server", "prejit", "server"),
    "prejit.compiler": Path("compiler", "prejit", "compiler"),
}
UNIT = Path("tests", "unit")


def changed_files(repository: Path) -> list[Path]:
    """Return the changed files, relative to the repository."""

    def lines(*command: str) -> list[Path]:
        done = subprocess.run(
            ["git", "-C", str(repository), *command], check=True, stdout=subprocess.PIPE, text=True
        )
        return [Path(line) for line in done.stdout.splitlines()]

    found = lines("diff", "--name-only", "HEAD")
    found += lines("ls-files", "--others", "--exclude-standard")
    return found or lines("diff-tree", "--no-commit-id", "--name-only", "-r", "HEAD")


def imported_names(source: str) -> set[str]:
    """Return dotted names of everything that a source file imports, wherever the import stands."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in ("import_module", "__import__"):
                found.add(str(node.args[0].value))
    return found


def choose_tests(changed: Iterable[Path], repository: Path) -> list[Path]:
    """Return the test files to run, the nearest first."""
    every = sorted((repository / UNIT).rglob("test_*.py"))
    imports = {path: imported_names(path.read_text(encoding="utf-8")) for path in every}
    nearest: list[Path] = []
    others: list[Path] = []
    for file in changed:
        if file.is_relative_to(UNIT):
            if file.name.startswith("test_"):
                nearest.append(repository / file)
            else:  # a conftest.py, or what tests of its directory share
                others += [path for path in every if path.is_relative_to(repository / file.parent)]
            continue
        for module, room in _places(file):
            named = [path for path in every if path.name == f"test_{file.stem}.py"]
            named = [path for path in named if path.is_relative_to(repository / room)]
            using = [path for path in every if any(_within(name, module) for name in imports[path])]
            if not named and not using:
                using = [path for path in every if path.is_relative_to(repository / room)]
            nearest += named
            others += using
    found = dict.fromkeys(path for path in (*nearest, *others) if path.exists())
    return [path.relative_to(repository) for path in found]


def _places(file: Path) -> Iterator[tuple[str, Path]]:
    """Yield the dotted name of a source file, and the directory that mirrors its room."""
    for name, home in ROOTS.items():
        if file.is_relative_to(home):
            inner = file.relative_to(home)
            parts = [part for part in inner.with_suffix("").parts if part != "__init__"]
            yield (
                ".".join([name, *parts]),
                UNIT / name.rpartition(".")[2] / Path(*inner.parts[:-1][:1]),
            )
    if file.parts[0] in ("benchmarks", "scripts") and file.suffix == ".py":
        yield ".".join(file.with_suffix("").parts), UNIT / file.parts[0]


def _within(name: str, module: str) -> bool:
    return f"{name}.".startswith(f"{module}.")


class Deadline:
    """A pytest plugin that ends the run between two tests when the time is over."""

    def __init__(self, seconds: float) -> None:
        self.ends = time.monotonic() + seconds
        self.left = 0

    def pytest_runtestloop(self, session: pytest.Session) -> None:
        """Remember the session, whose tests are about to run."""
        self.session = session
        self.left = len(session.items)

    def pytest_runtest_logfinish(self) -> None:
        """Stop when the time is over."""
        self.left -= 1
        if self.left and time.monotonic() > self.ends:
            self.session.shouldstop = f"the time is over, {self.left} tests are left"


def main(argv: list[str] | None = None) -> int:
    """Run the tests; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=40, help="of tests (default: 40)")
    parser.add_argument("--list", action="store_true", help="print the tests and run none")
    given = parser.parse_args(argv)
    tests = [str(path) for path in choose_tests(changed_files(REPOSITORY), REPOSITORY)]
    if given.list or not tests:
        print("\n".join(tests) or "no unit test touches what changed")
        return 0
    # What tests build is kept for the next time: keys hold everything that decides it.
    os.environ.setdefault("PREJIT_TEST_CACHE", str(REPOSITORY / ".environments" / "build-cache"))
    deadline = Deadline(given.seconds)
    plugins: list[Any] = [deadline]
    status = pytest.main(["-q", "--maxfail=5", *tests], plugins=plugins)
    if status == pytest.ExitCode.INTERRUPTED and deadline.left and not deadline.session.testsfailed:
        print(
            f"{deadline.left} tests did not run in {given.seconds:.0f} s: `make test-fast` runs all"
        )
        return 0
    return 0 if status == pytest.ExitCode.NO_TESTS_COLLECTED else int(status)


if __name__ == "__main__":
    sys.exit(main())
