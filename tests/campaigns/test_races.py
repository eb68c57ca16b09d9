"""Processes that share a directory never read anything wrong, and a bundle that is replaced loads whole.

`make chaos` lets 16 processes write and 16 read each shared directory for 10,000 rounds, while writers are
killed, and loads a bundle 2,000 times while it is replaced. It writes the figures to races.json beside this
file; `make test` tries a few.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from . import faults, processes, races
from .faults import NEW, OLD

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).with_name("races.json")
EXAMPLES = int(os.environ.get("PREJIT_CHAOS_EXAMPLES", "2"))
pytestmark = pytest.mark.timeout(900 + EXAMPLES)
WHOLE_EXAMPLES = 100
"""From this number on, the figures are written."""
ROUNDS = min(10_000, 5 * EXAMPLES)
"""How often each process writes or reads."""
PROCESSES = races.PROCESSES if EXAMPLES >= WHOLE_EXAMPLES else 4
LOADS = min(2_000, 10 * EXAMPLES)
LIMIT_SECONDS = 3600


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    """Lets processes import this package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        yield


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """Gives later tests their own variables back: what looks for leftovers sets those of a race."""
    with mock.patch.dict(os.environ):
        yield


def keep(name: str, figures: dict[str, Any]) -> None:
    """Write the figures of a whole campaign."""
    if EXAMPLES < WHOLE_EXAMPLES:
        return
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    found[name] = {
        "date": str(date.today()),
        "python": platform.python_version(),
        "kernel": platform.release(),
        **figures,
    }
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


@pytest.mark.parametrize("name", races.CACHES)
def test_processes_that_share_a_directory_read_nothing_wrong(name: str, tmp_path: Path) -> None:
    if name == "the state of a channel":
        pytest.importorskip("cryptography", reason="cryptography comes with the extra trust")
    found = races.race(name, tmp_path, rounds=ROUNDS, writers=PROCESSES, seed=1)
    keep(
        name,
        {
            "writers": PROCESSES,
            "readers": PROCESSES,
            "rounds of each": found.rounds,
            "writers killed": found.kills,
            "wrong reads and false rejections": len(found.errors),
            "left over": len(found.left),
            "seconds": round(found.seconds),
        },
    )
    kinds = Counter(error.splitlines()[-1][:300] for error in found.errors)
    assert not found.errors, f"{len(found.errors)}: {kinds.most_common(5)}\n{found.errors[0]}"
    assert not found.left


def test_a_bundle_that_is_replaced_while_it_loads_is_the_old_or_the_new_one(tmp_path: Path) -> None:
    for name, factor in (("old", OLD), ("new", NEW)):
        directory = tmp_path / name
        directory.mkdir()
        faults.write_project(directory, factor)
        ended = processes.run(faults.build, directory, directory, limit_seconds=LIMIT_SECONDS)
        assert ended.status == 0, ended.stderr
    sources = tuple(str(tmp_path / name / "out" / "tiny") for name in ("old", "new"))
    direct, link, counts = tmp_path / "direct", tmp_path / "link", tmp_path / "counts"
    shutil.copytree(sources[0], direct)
    races.link(Path(sources[0]), link, -1)
    loaders = [tmp_path / f"loader-{number}" for number in range(2)]
    replacer = tmp_path / "replacer"
    replacer.mkdir()
    replacing = races.Replacing(sources, str(direct), str(link), str(counts))
    with (
        ThreadPoolExecutor(3) as pool,
        processes.until_the_end(races.replace_often, replacing, replacer),
    ):
        tasks = []
        for loader in loaders:
            loader.mkdir()
            loads = races.Loads(
                (str(direct), str(direct), str(direct), str(link)),
                LOADS // len(loaders),
                (OLD + 1, NEW + 1),
                str(tmp_path / "runtime"),
                str(loader / "found.json"),
            )
            tasks.append(
                pool.submit(
                    processes.run, races.load_often, loads, loader, limit_seconds=LIMIT_SECONDS
                )
            )
        outcomes = [task.result() for task in tasks]
        assert not (stderr := (replacer / "stderr").read_text()), stderr
    assert [each.status for each in outcomes] == [0, 0], outcomes[0].stderr
    found = [json.loads((loader / "found.json").read_text()) for loader in loaders]
    errors = [error for each in found for error in each["errors"]]
    values = sum((Counter(each["counts"]) for each in found), Counter[str]())
    replaced = json.loads(counts.read_text())
    keep(
        "loads of a bundle that is replaced",
        {
            "loads": values.total() + len(errors),
            "wrong or rejected": len(errors),
            "the old one": values[str(OLD + 1.0)],
            "the new one": values[str(NEW + 1.0)],
            "replaced": replaced,
        },
    )
    assert not errors, f"{len(errors)}\n\n" + "\n\n".join(errors[:5])
    assert values.total() == LOADS // 2 * 2
    assert all(replaced.values()), replaced
