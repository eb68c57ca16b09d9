"""Processes that share a directory never read anything wrong, and a bundle that is replaced loads whole."""

import json
import os
import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
from tests.extent import sampled

from . import faults, processes, races
from .campaign import check, facts, figures_file, setting, write_figures
from .faults import NEW, OLD

EXAMPLES = setting("CHAOS_EXAMPLES", 2)
pytestmark = pytest.mark.timeout(900 + EXAMPLES)
WHOLE_EXAMPLES = 100  # from this number on, the figures are written
ROUNDS = min(10_000, 5 * EXAMPLES)  # how often each process writes or reads
PROCESSES = races.PROCESSES if EXAMPLES >= WHOLE_EXAMPLES else 4
LOADS = min(2_000, 10 * EXAMPLES)
LIMIT_SECONDS = 3600


@pytest.fixture(autouse=True)
def own_environment():
    """Gives later tests their own variables back: a cache sets those of its race."""
    with mock.patch.dict(os.environ):
        yield


def keep(name, figures):
    if EXAMPLES >= WHOLE_EXAMPLES:
        found = json.loads(figures_file("races").read_text())
        write_figures("races", {**found, name: {**facts("kernel"), **figures}})


@pytest.mark.parametrize("name", sampled(races.CACHES, "a bundle's directory".__eq__))
def test_processes_that_share_a_directory_read_nothing_wrong(name, tmp_path):
    if name == "the state of a channel":
        pytest.importorskip("cryptography", reason="cryptography comes with the extra trust")
    bad, figures = races.race(name, tmp_path, rounds=ROUNDS, writers=PROCESSES, seed=1)
    keep(name, figures)
    check(bad)


@pytest.mark.thorough
def test_a_bundle_that_is_replaced_while_it_loads_is_the_old_or_the_new_one(tmp_path):
    def apart(name, function, argument):
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        ended = processes.run(function, argument, directory, limit_seconds=LIMIT_SECONDS)
        assert ended.status == 0, ended.stderr
        return ended.stdout

    for name, factor in (("old", OLD), ("new", NEW)):
        directory = tmp_path / name
        directory.mkdir()
        faults.write_project(directory, factor)
        apart(name, faults.build, directory)
    sources = tuple(tmp_path / name / "out" / "tiny" for name in ("old", "new"))
    direct, link, counts = tmp_path / "direct", tmp_path / "link", tmp_path / "counts"
    shutil.copytree(sources[0], direct)
    races.link(sources[0], link, -1)
    replacer = tmp_path / "replacer"
    replacer.mkdir()
    replacing = (sources, direct, link, counts)
    right = (OLD + 1, NEW + 1)
    loads = ((direct, direct, direct, link), LOADS // 2, right, tmp_path / "runtime", counts)

    def loaded(number):
        printed = apart(f"loader-{number}", races.load_often, loads)
        return json.loads(printed.splitlines()[-1])

    with (
        ThreadPoolExecutor(2) as pool,
        processes.until_the_end(races.replace_often, replacing, replacer),
    ):
        found = list(pool.map(loaded, range(2)))
        assert not (stderr := (replacer / "stderr").read_text()), stderr
    errors = [error for each in found for error in each["errors"]]
    values = sum((Counter(each["counts"]) for each in found), Counter())
    replaced = json.loads(counts.read_text())
    figures = {
        "loads": values.total() + len(errors),
        "wrong or rejected": len(errors),
        "the old one": values[str(OLD + 1.0)],
        "the new one": values[str(NEW + 1.0)],
        "replaced": replaced,
    }
    keep("loads of a bundle that is replaced", figures)
    check(errors)
    assert values.total() >= LOADS // 2 * 2
    assert all(replaced.values()), replaced
