"""Measure two bundles in two processes that take turns, each with the jaxlib of its bundle."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from prejit.compiler.bench.bench_report import Ratio
from prejit.compiler.bench.probes import ratio_in_turns
from prejit.compiler.comparing.difference import ReadBundle
from prejit.compiler.targets import environments
from prejit.runtime.base.child_process import Child, last_line
from prejit.runtime.errors import UsageError
from prejit.runtime.machine.compare import compare
from prejit.runtime.machine.fingerprint import Fingerprint

ROUNDS = 15
"""How often each bundle has its turn."""
TOLERANCE = 0.05
"""The part by which a program must be slower or faster to be named."""

_MODULE = "prejit.compiler.comparing.timing_child"


@dataclass(frozen=True, slots=True)
class SpeedRow:
    """The speed of a program in both bundles.

    Attributes:
        name: the row, as `prejit bench` names it: `decode, batch 1, context 128`.
        before, after: median of one run in seconds.
        ratio: of after to before, round by round.
        verdict: `slower`, `faster`, or `same`: within the tolerance, or within the spread.
    """

    name: str
    before: float
    after: float
    ratio: Ratio
    verdict: str


@dataclass(frozen=True, slots=True)
class Speed:
    """The speed of two bundles.

    Attributes:
        rows: programs that both have, the one that became slowest first.
        why_not: why nothing was measured; empty: it was.
    """

    rows: tuple[SpeedRow, ...] = ()
    why_not: str = ""


def compare_speed(
    before: ReadBundle, after: ReadBundle, say: Callable[[str], None], rounds: int = ROUNDS
) -> Speed:
    """Measure the programs of two bundles on this machine.

    A bundle for another jaxlib runs in an environment that a build made for a target with this version.
    """
    commands = []
    for bundle in (before, after):
        command = _command(bundle)
        if isinstance(command, str):
            return Speed(why_not=f"{bundle.path}: {command}")
        commands.append([*command, bundle.path])
    sides: list[dict[str, list[list[float]]]] = [{}, {}]
    try:
        with ExitStack() as stack:
            children = [stack.enter_context(_start(command)) for command in commands]
            say("loading both bundles")
            for child in children:
                _answer(child)
            for number in range(rounds):
                say(f"round {number + 1} of {rounds}")
                for side in (0, 1) if number % 2 else (1, 0):
                    children[side].send(True)
                    for name, samples in _answer(children[side]).items():
                        sides[side].setdefault(name, []).append(samples)
    except UsageError as error:
        return Speed(why_not=str(error))
    rows = [_row(name, old, sides[1][name]) for name, old in sides[0].items() if name in sides[1]]
    return Speed(tuple(sorted(rows, key=lambda row: -row.ratio.middle)))


def _row(name: str, before: list[list[float]], after: list[list[float]]) -> SpeedRow:
    ratio = ratio_in_turns(after, before)
    old, new = (float(np.median(np.concatenate(side))) for side in (before, after))
    return SpeedRow(name, old, new, ratio, verdict(ratio))


def verdict(ratio: Ratio) -> str:
    """Return whether a ratio of after to before is `slower`, `faster` or `same`.

    The best run of each side must differ too: other work on the machine slows single runs, and hastens none.
    """
    if ratio.low > 1 and min(ratio.middle, ratio.least) > 1 + TOLERANCE:
        return "slower"
    if ratio.high < 1 and max(ratio.middle, ratio.least) < 1 / (1 + TOLERANCE):
        return "faster"
    return "same"


def _command(bundle: ReadBundle) -> list[str] | str:
    """Return the command that measures a bundle, or why this machine cannot."""
    here = Fingerprint.current()
    needs = [target.requirement for target in bundle.targets.values()]
    if any(compare(bundle.path, each, here).matches for each in needs):
        return [sys.executable, "-P", "-m", _MODULE]
    wanted = sorted({each.jaxlib for each in needs if each.platform == "cpu"})
    root = environments.root()
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        found = environments.read(path)
        if found is not None and found.versions.get("jaxlib") in wanted:
            return environments.worker_command(found, _MODULE)
    listed = " or ".join(wanted)
    return (
        f"expected a machine that runs it with jaxlib {here.jaxlib}, or an environment with jaxlib "
        f"{listed or 'of its own'}, found neither"
    )


def _start(command: list[str]) -> Child:
    # Its environment has its own packages; what this process inherited would hide them.
    without = ("PYTHONPATH", "PYTHONHOME") if command[0] != sys.executable else ()
    environment = {name: value for name, value in os.environ.items() if name not in without}
    return Child(command, environment=environment, errors="kept")


def _answer(child: Child) -> Any:
    """Return the next answer of a process: true once its programs are loaded, then seconds of each round."""
    answer = child.answer()
    if answer is None:
        last = last_line(child.errors()) or "no message"
        raise UsageError(f"the process that measures ended: {last}")
    if isinstance(answer, Mapping) and isinstance(answer.get("error"), str):
        raise UsageError(answer["error"])
    return answer
