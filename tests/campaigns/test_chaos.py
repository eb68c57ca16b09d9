"""A build, a load, a fallback or a collection that breaks at any call leaves nothing wrong behind."""

import json
import os
import random
import shutil
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="cryptography comes with the extra trust")

from . import faults, processes
from .campaign import check, facts, figures_file, setting, write_figures
from .faults import NEW, OLD, Fault

EXAMPLES = setting("CHAOS_EXAMPLES", 1)  # how many faults of each scenario are tried, at most
IS_SAMPLE = EXAMPLES < 10
"""Whether a fault of each command is all, without a run before it that finds its calls or its time."""
pytestmark = pytest.mark.timeout(900 + EXAMPLES)
WHOLE_EXAMPLES = 500  # from this number on, the figures are written
AT_CALLS, AT_TIMES = "at every call", "at random times"
AT_ONCE = 1 if IS_SAMPLE else 3
LIMIT_SECONDS = 120
YEARS = (20,) if IS_SAMPLE else (-20, 20)  # by how much a command's clock is wrong
DOCUMENTED = frozenset((0, 3, 4, 5, 6, 7))
"""Exit statuses of a command whose files fail. 1 and 2 would blame the user: 2 is right only where files
of the user's own cannot be read."""


@dataclass(frozen=True)
class Scenario:
    """A command, what is there before it, and what may be there after it."""

    command: str
    start: str
    before: float | None
    after: float | None


SCENARIOS = {
    "the first build": Scenario("build", "new", None, NEW + 1),
    "a build over a bundle": Scenario("build", "built", OLD + 1, NEW + 1),
    "the first load": Scenario("use", "built", OLD + 1, OLD + 1),
    "a load on another machine": Scenario("use_elsewhere", "built", OLD + 1, OLD + 1),
    "sign": Scenario("sign", "signed", OLD + 1, OLD + 1),
    "gc": Scenario("collect", "aged", OLD + 1, OLD + 1),
}
SAMPLED = ("a build over a bundle", "a load on another machine", "gc")
BROKEN = SAMPLED if IS_SAMPLE else SCENARIOS
TIMED = ("the first build", "sign", "a build over a bundle", "a load on another machine")
TIMED = TIMED[:1] if IS_SAMPLE else TIMED  # commands that are killed at random times


@dataclass
class Campaign:
    """Prepared directories, and what became of the faults."""

    directory: Path
    results: dict[str, dict[str, Any]] = field(default_factory=dict)

    def run(self, scenario, number, fault):
        """Run a scenario in a directory of its own, which stays. Return the outcome, and its calls."""
        directory = self.place(scenario, number)
        directory.mkdir()
        tree = directory / "tree"
        shutil.copytree(self.directory / SCENARIOS[scenario].start, tree, symlinks=True)
        (directory / "state").write_bytes(bytes(64))
        (directory / "log").touch()
        order = (SCENARIOS[scenario].command, tree, fault)
        outcome = processes.run(faults.broken, order, directory, limit_seconds=LIMIT_SECONDS)
        return outcome, (directory / "log").read_text().split()

    def place(self, scenario, number):
        """Return the directory of a fault."""
        return self.directory / f"{scenario.replace(' ', '-')}-{number}"

    def sound(self, scenario, number):
        """Run a scenario without a fault. Return its calls."""
        outcome, calls = self.run(scenario, number, Fault())
        assert outcome.status == 0, outcome.stderr
        return calls

    def try_one(self, scenario, number, fault):
        """Break a command, look at what is left, mend it, and judge both."""
        outcome, calls = self.run(scenario, number, fault)
        directory = self.place(scenario, number)
        tree = directory / "tree"
        healed = processes.run(faults.heal, tree, directory, limit_seconds=LIMIT_SECONDS)
        where = calls[fault.at - 1] if 0 < fault.at <= len(calls) else "no call"
        kind = "killed" if fault.error is None else fault.error
        ended = "by SIGKILL" if outcome.status == -9 else f"exit {outcome.status}"
        problem = self.problem(SCENARIOS[scenario], fault, where, outcome, healed)
        if problem is None:
            shutil.rmtree(directory)
            return f"{kind}, {ended}", None
        said = "\n".join((outcome.stdout, outcome.stderr, healed.stdout, healed.stderr))
        return f"{kind}, {ended}", f"{scenario}, {fault}, {where}: {problem}\n{said[-2500:]}"

    def problem(self, scenario, fault, where, outcome, healed):
        """Return what is wrong after a command and its mending; None: nothing is."""
        allowed = DOCUMENTED if fault.error else {0, -9}
        if fault.error is None and "its worker was killed by SIGKILL" in outcome.stderr:
            allowed = {1}  # it has a process group of its own
        blames_the_user = outcome.status == 2 and "error[manifest]" in outcome.stderr
        if outcome.status not in allowed and not (fault.error and blames_the_user):
            return f"the command ended with {outcome.status}"
        if "Traceback" in outcome.stderr:
            return "a traceback"
        if fault.error == "EINTR" and where in faults.INTERRUPTIBLE and outcome.status != 0:
            return "an interrupted call was not repeated"
        if outcome.status == 0 and scenario.command.startswith("use"):
            [line] = outcome.stdout.splitlines()
            if json.loads(line)["value"] != scenario.after:
                return f"a wrong value: {line}"
        if healed.status != 0:
            return f"the next build ended with {healed.status}"
        said = json.loads(healed.stdout.splitlines()[-1])
        there = said.get("value")
        if outcome.status == 0 and there != scenario.after:
            return f"the command ended well, and the bundle gives {there}"
        if there not in (scenario.before, scenario.after):
            return f"the bundle that is there gives {there}"
        if said["healed"] != NEW + 1 or said["elsewhere"] != NEW + 1:
            return f"the next bundle gives {said['healed']}, elsewhere {said['elsewhere']}"
        if scenario.start == "new" and said["compiled"] > len(faults.BUCKETS) - said["kept"]:
            return f"finished work was lost: {said}"
        if scenario.start in ("built", "signed") and said["compiled"]:
            return f"finished work was lost: {said}"
        if said["left"]:
            return f"files were left: {said['left']}"
        return None

    def check(self, scenario, when, tried, calls=()):
        """Try faults, keep their figures, and fail if one had a bad outcome."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            found = list(pool.map(lambda each: self.try_one(scenario, *each), enumerate(tried)))
        bad = [problem for _, problem in found if problem is not None]
        self.results.setdefault(scenario, {})[when] = {
            "date": facts()["date"],
            "bad outcomes": len(bad),
            "faults": len(found),
            **({"calls": dict(sorted(Counter(calls).items()))} if calls else {}),
            "outcomes": dict(sorted(Counter(outcome for outcome, _ in found).items())),
        }
        check(bad)
        assert tried

    def write_figures(self):
        """Write the figures of this run, and keep those of scenarios that only an earlier run tried."""
        scenarios = json.loads(figures_file("chaos").read_text())["scenarios"]
        for name, results in self.results.items():
            scenarios[name] = scenarios.get(name, {}) | results
        parts = [part for results in scenarios.values() for part in results.values()]
        sums = {key: sum(part[key] for part in parts) for key in ("bad outcomes", "faults")}
        of_run = facts("kernel")
        del of_run["date"]  # each scenario has its own
        write_figures("chaos", {**of_run, **sums, "scenarios": scenarios})


@pytest.fixture(scope="module")
def campaign(tmp_path_factory):
    """The three prepared directories, and the figures at the end."""
    directory = tmp_path_factory.mktemp("chaos")
    try:
        shim = faults.compile_shim(directory)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_PRELOAD", str(shim))
        patch.delenv("PREJIT_RUNTIME_CACHE", raising=False)
        made = Campaign(directory)
        _prepare(made)
        yield made
    if EXAMPLES >= WHOLE_EXAMPLES:
        made.write_figures()


def _prepare(campaign):
    """Make the directories that scenarios start from."""
    new, built, aged = (campaign.directory / name for name in ("new", "built", "aged"))
    new.mkdir()
    faults.write_project(new, NEW)
    built.mkdir()
    for factor in (NEW, OLD):
        faults.write_project(built, factor)
        shutil.rmtree(built / "out", ignore_errors=True)
        ended = processes.run(faults.build, built, campaign.directory, limit_seconds=LIMIT_SECONDS)
        assert ended.status == 0, ended.stderr
    faults.write_project(built, NEW)
    shutil.copytree(built, aged, symlinks=True)
    shutil.copytree(built, campaign.directory / "signed", symlinks=True)
    faults.write_key(campaign.directory / "signed")
    then = time.time() - 100 * 86_400
    for path in (aged / "cache").rglob("*"):
        os.utime(path, (then, then))


@pytest.mark.thorough
@pytest.mark.parametrize("scenario", BROKEN)
def test_a_command_that_breaks_at_any_call_leaves_nothing_wrong(campaign, scenario):
    pick = random.Random(7)
    if IS_SAMPLE:
        last = json.loads(figures_file("chaos").read_text())["scenarios"][scenario][AT_CALLS]
        at, error = pick.randint(1, sum(last["calls"].values())), pick.choice((None, "EIO"))
        campaign.check(scenario, AT_CALLS, [Fault(at, error)])
        return
    calls = campaign.sound(scenario, "sound")
    tried = faults.every_fault(calls)
    pick.shuffle(tried)
    campaign.check(scenario, AT_CALLS, tried[:EXAMPLES], calls)


@pytest.mark.thorough
@pytest.mark.parametrize("scenario", TIMED)
def test_a_command_killed_at_any_time_leaves_nothing_wrong(campaign, scenario):
    started = time.monotonic()
    if not IS_SAMPLE:
        campaign.sound(scenario, "timed")
    seconds = 3.0 if IS_SAMPLE else time.monotonic() - started
    campaign.check(scenario, AT_TIMES, faults.random_kills(min(EXAMPLES, 250), seconds, seed=1))


@pytest.mark.thorough
@pytest.mark.parametrize("years", YEARS)
@pytest.mark.parametrize("scenario", ("gc",) if IS_SAMPLE else SCENARIOS)
def test_a_command_with_a_wrong_clock_does_the_same(campaign, scenario, years):
    fault = Fault(clock_seconds=years * 365 * 86_400)
    ended, problem = campaign.try_one(scenario, f"clock{years}", fault)
    assert (ended, problem) == ("killed, exit 0", None)
