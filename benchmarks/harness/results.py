"""Begin and end a measurement: facts about the machine, and files with the figures.

What stands in a page of docs/performance is repeated by one of these; benchmarks/results holds the latest.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.harness.fresh_processes import BENCHMARKS, machine, progress, versions
from benchmarks.harness.report import Table, Target, markdown

RESULTS = BENCHMARKS / "results"

Facts = dict[str, Any]
"""The entries of a results file that are not samples."""


def option_parser() -> argparse.ArgumentParser:
    """Return a parser of this process's options, whose help is the docstring of its module."""
    said, plain = sys.modules["__main__"].__doc__, argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=said, formatter_class=plain)


def use_two_cores() -> None:
    """Keep this process, and the children that it starts from now on, on two cores."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])


def begin(runs: int, **more: object) -> Facts:
    """Return the facts to begin with: date, machine with its load, and versions."""
    date = time.strftime("%Y-%m-%d %H:%M")
    return {"date": date, "runs": runs, "machine": machine(), "versions": versions(), **more}


def judged(targets: Sequence[Target]) -> list[dict[str, Any]]:
    """Return targets as they stand in a file of results."""
    return [{**asdict(target), "met": target.met} for target in targets]


def file_name(facts: Mapping[str, Any], what: str) -> str:
    """Return the name of a file of results without its suffix: date, processor, cores, subject."""
    cpu = re.sub(r"[^a-z0-9]+", "-", facts["machine"]["cpu"].lower()).strip("-")[:32]
    return f"{facts['date'][:10]}-{cpu}-{facts['machine']['cores']}-{what}"


def save(directory: Path, name: str, facts: Mapping[str, Any], page: str) -> None:
    """Write NAME.json and NAME.md, and print the page."""
    directory.mkdir(parents=True, exist_ok=True)
    content = json.dumps(facts, separators=(",", ":"))
    (directory / f"{name}.json").write_text(content + "\n", encoding="utf-8")
    (directory / f"{name}.md").write_text(page, encoding="utf-8")
    print(page)
    progress(f"written to {directory}/{name}.json and .md")


def publish(
    facts: Facts,
    what: str,
    title: str,
    tables: Sequence[Table],
    targets: Sequence[Target] = (),
    *,
    is_trial: bool = False,
) -> None:
    """Write the page of a study, which names the command that repeats it.

    Args:
        facts: facts about the run, and its samples.
        what: subject in the names of the files.
        title: title of the page.
        tables: tables in order.
        targets: targets, in a table of their own.
        is_trial: whether to print the tables and to write nothing.
    """
    if targets:
        facts["targets"] = judged(targets)
        head = ("what", "found", "wanted", "")
        tables = [*tables, Table("Targets", head, [each.row() for each in targets])]
    if is_trial:
        print("\n".join(table.markdown() for table in tables))
        return
    facts["load_average_after"] = os.getloadavg()[0]
    on, packages = facts["machine"], facts["versions"]
    page = (
        f"# {title}\n\n{facts['date']}, {on['cpu']} ({on['family_model']}), {on['cores']} cores, Python "
        f"{packages['python']}, jax {packages['jax']}, revision {packages['revision']}; load "
        f"{on['load_average']:.1f} before and {facts['load_average_after']:.1f} after. Rounds: "
        f"{facts['runs']}. `{_command()}` repeats it.\n\n"
    )
    page += "\n".join(table.markdown() for table in tables)
    save(RESULTS, file_name(facts, what), facts, page)


def publish_rows(
    facts: Facts,
    what: str,
    tables: Sequence[Table],
    targets: Sequence[Target],
    directory: Path = RESULTS,
) -> None:
    """Write the page of a study whose rows are fresh processes that took turns, with its targets."""
    facts |= {"load_average_after": os.getloadavg()[0], "targets": judged(targets)}
    page = markdown(facts, tables, targets, command=_command())
    save(directory, file_name(facts, what), facts, page)


def _command() -> str:
    """Return the command of this process, without its options."""
    return f"python -m {sys.modules['__main__'].__spec__.name}"  # type: ignore[union-attr]
