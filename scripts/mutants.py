"""Change the product at random places and see whether the tests notice.

    python -m scripts.mutants [--count 300] [--seed 1] [--room server/engine] [--output FILE.json]
    python -m scripts.mutants --again FILE.json

Each mutant is one change of one function: another comparison, a negated condition, another number, a
statement left out. The unit tests nearest to its file run until one fails: the test of the same name, then
those that import the module, for at most a minute of CPU time. `--again` runs the mutants that a file says
were killed, and exits 1 if one survives now: whoever removes tests runs it before and after. Run it in a
checkout of its own, because files of the product change while it runs.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import random
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from scripts.changed_tests import REPOSITORY, ROOTS, choose_tests

_CPU_SECONDS = 60
"""CPU time of each process of one mutant's tests: a busy machine lets no mutant survive."""
_SECONDS = 600
"""Time for one mutant's tests, for those that wait for ever."""
_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


@dataclass(frozen=True)
class Mutant:
    """One change of the product.

    Attributes:
        path: of the file, below the repository.
        old: the text of an expression or a statement.
        new: what stands in its place.
        number: which of several equal texts of the file it is.
        killed: whether a test failed; None: it did not run, because its file or its text is gone.
    """

    path: str
    old: str
    new: str
    number: int
    killed: bool | None = None

    def applied(self, source: str) -> str | None:
        """Return the changed source of its file; None: the text is gone."""
        parts = source.split(self.old)
        if len(parts) < self.number + 2:
            return None
        before, after = parts[: self.number + 1], parts[self.number + 1 :]
        return self.old.join(before) + self.new + self.old.join(after)


def _changed(node: ast.AST) -> str | None:
    """Return another form of a node that has one."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in _COMPARISONS:
            return ast.unparse(ast.Compare(node.left, [_COMPARISONS[type(op)]()], node.comparators))
        case ast.Constant(value=int(number)) if type(number) is int:
            return str(number + 1)
        case ast.BoolOp():
            other = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
            return f"({ast.unparse(ast.BoolOp(other, node.values))})"
        case ast.Raise() | ast.Expr(value=ast.Call()):
            return "pass"
        case ast.Return(value=ast.expr()):
            return "return None"
        case _:
            return None


def mutants_of(path: Path) -> list[Mutant]:
    """Return every mutant of the functions of a file, those that are no Python included."""
    content = path.read_bytes()
    starts = [0, *itertools.accumulate(map(len, content.splitlines(keepends=True)))]
    found: dict[Mutant, None] = {}
    for function in ast.walk(ast.parse(content)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in (each for statement in function.body for each in ast.walk(statement)):
            new = _changed(node)
            if new is None or not isinstance(node, ast.expr | ast.stmt):
                continue
            begin = starts[node.lineno - 1] + node.col_offset
            end = starts[(node.end_lineno or 1) - 1] + (node.end_col_offset or 0)
            old = content[begin:end]
            number = content[:begin].count(old)
            found[Mutant(str(path.relative_to(REPOSITORY)), old.decode(), new, number)] = None
    return [*found]


def is_python(mutant: Mutant) -> bool:
    """Return whether the changed file can be parsed."""
    changed = mutant.applied((REPOSITORY / mutant.path).read_text(encoding="utf-8"))
    try:
        ast.parse(changed or "")
    except SyntaxError:
        return False
    return changed is not None


def run(mutant: Mutant) -> Mutant:
    """Return a mutant with whether the nearest tests notice it. Its file is changed meanwhile."""
    path = REPOSITORY / mutant.path
    if not path.exists():
        return replace(mutant, killed=None)
    source = path.read_text(encoding="utf-8")
    changed = mutant.applied(source)
    tests = choose_tests([Path(mutant.path)], REPOSITORY)
    if changed is None or not tests:
        return replace(mutant, killed=None)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider"]
    path.write_text(changed, encoding="utf-8")
    try:
        done = subprocess.run(
            [*command, *map(str, tests)],
            cwd=REPOSITORY,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_SECONDS,
            check=False,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS,) * 2),
        )
        return replace(mutant, killed=done.returncode not in (0, -signal.SIGKILL))
    except subprocess.TimeoutExpired:
        return replace(mutant, killed=False)
    finally:
        path.write_text(source, encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Run mutants and print those that survive."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=300, help="mutants (default: 300)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--room", default="", help="part of the path of files, such as server/engine"
    )
    parser.add_argument("--output", type=Path, help="write what happened to this file, as JSON")
    parser.add_argument("--again", type=Path, help="run the killed mutants of this file")
    given = parser.parse_args(argv)
    if given.again is not None:
        rows = json.loads(given.again.read_text(encoding="utf-8"))
        chosen = [Mutant(**row) for row in rows if row["killed"]]
    else:
        files = [
            path for root in ROOTS.values() for path in sorted((REPOSITORY / root).rglob("*.py"))
        ]
        every = [each for path in files if given.room in str(path) for each in mutants_of(path)]
        random.Random(given.seed).shuffle(every)
        chosen = [*itertools.islice(filter(is_python, every), given.count)]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # `run` restores its file then
    done = []
    for mutant in chosen:
        done.append(run(mutant))
        state = {True: "killed", False: "SURVIVED", None: "not run"}[done[-1].killed]
        print(
            f"{len(done)}/{len(chosen)} {state} {mutant.path}: {mutant.old!r:.60} -> {mutant.new!r:.60}",
            flush=True,
        )
        if given.output is not None:
            text = json.dumps([asdict(each) for each in done], indent=1)
            given.output.write_text(text + "\n", encoding="utf-8")
    survived = sum(each.killed is False for each in done)
    print(f"{sum(bool(each.killed) for each in done)} of {len(done)} killed, {survived} survived")
    return 1 if given.again is not None and survived else 0


if __name__ == "__main__":
    sys.exit(main())
