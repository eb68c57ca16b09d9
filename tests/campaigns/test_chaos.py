"""A build, a load, a fallback or a collection that breaks at any call leaves nothing wrong behind."""

import json
import os
import random
import shutil
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("cryptography", reason="cryptography comes with the extra trust")

from . import faults, processes
from .campaign import check, facts, figures_file, setting, write_figures
from .faults import NEW, OLD, Fault

EXAMPLES = setting("CHAOS_EXAMPLES", 1)  # how many faults of each scenario are tried, at most
IS_SAMPLE = EXAMPLES < 10
"""Whether a fault of each command is all, without a run before it that finds its calls or its time."""
pytestmark = [pytest.mark.timeout(900 + EXAMPLES), pytest.mark.thorough]
WHOLE_EXAMPLES = 500  # from this number on, the figures are written
AT_CALLS, AT_TIMES = "at every call", "at random times"
AT_ONCE = 1 if IS_SAMPLE else 3
LIMIT_SECONDS = 120
DOCUMENTED = frozenset((0, 3, 4, 5, 6, 7))
"""Exit statuses of a command whose files fail. 1 and 2 would blame the user: 2 is right only where files
of the user's own cannot be read."""
SCENARIOS = {
    "the first build": ("build", "new"),
    "a build over a bundle": ("build", "built"),
    "the first load": ("use", "built"),
    "a load on another machine": ("use_elsewhere", "built"),
    "sign": ("sign", "signed"),
    "gc": ("collect", "aged"),
}
SAMPLED = ("a build over a bundle", "a load on another machine", "gc")
BROKEN = SAMPLED if IS_SAMPLE else SCENARIOS
TIMED = ("the first build", "sign", "a build over a bundle", "a load on another machine")
TIMED = TIMED[:1] if IS_SAMPLE else TIMED  # commands that are killed at random times


class Campaign:
    """Prepared directories, and figures by scenario, then by when it breaks."""

    def __init__(self, directory):
        self.directory = directory
        self.results = {}

    def run(self, scenario, number, fault):
        """Run a scenario in a directory of its own, which stays. Return both, and its calls."""
        command, start = SCENARIOS[scenario]
        directory = self.directory / f"{scenario.replace(' ', '-')}-{number}"
        directory.mkdir()
        tree = shutil.copytree(self.directory / start, directory / "tree", symlinks=True)
        (directory / "state").write_bytes(bytes(64))
        (directory / "log").touch()
        order = (command, tree, fault)
        outcome = processes.run(faults.broken, order, directory, limit_seconds=LIMIT_SECONDS)
        return directory, outcome, (directory / "log").read_text().split()

    def sound_calls(self, scenario, number):
        _, outcome, calls = self.run(scenario, number, Fault())
        assert outcome.status == 0, outcome.stderr
        return calls

    def try_one(self, scenario, number, fault):
        """Break a command, look at what is left, mend it, and judge both."""
        directory, outcome, calls = self.run(scenario, number, fault)
        tree = directory / "tree"
        healed = processes.run(faults.heal, tree, directory, limit_seconds=LIMIT_SECONDS)
        # Threads make calls in another order each time: it need not be the one that the fault was meant for.
        where = calls[fault.at - 1] if 0 < fault.at <= len(calls) else "no call"
        ended = "by SIGKILL" if outcome.status == -9 else f"exit {outcome.status}"
        ended = f"{fault.error or 'killed'}, {ended}"
        problem = problem_of(*SCENARIOS[scenario], fault, where, outcome, healed)
        if problem is None:
            shutil.rmtree(directory)
            return ended, None
        said = "\n".join((outcome.stdout, outcome.stderr, healed.stdout, healed.stderr))
        return ended, f"{scenario}, {fault}, {where}: {problem}\n{said[-2500:]}"

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


def problem_of(command, start, fault, where, outcome, healed):
    """Return what is wrong after a command and its mending; None: nothing is."""
    before = None if start == "new" else OLD + 1
    after = NEW + 1 if command == "build" else OLD + 1
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
    if outcome.status == 0 and command.startswith("use"):
        [line] = outcome.stdout.splitlines()
        if json.loads(line)["value"] != after:
            return f"a wrong value: {line}"
    if healed.status != 0:
        return f"the next build ended with {healed.status}"
    said = json.loads(healed.stdout.splitlines()[-1])
    there = said.get("value")
    if outcome.status == 0 and there != after:
        return f"the command ended well, and the bundle gives {there}"
    if there not in (before, after):
        return f"the bundle that is there gives {there}"
    if said["healed"] != NEW + 1 or said["elsewhere"] != NEW + 1:
        return f"the next bundle gives {said['healed']}, elsewhere {said['elsewhere']}"
    lost = {"new": said["compiled"] - len(faults.BUCKETS) + said["kept"], "aged": 0}
    if lost.get(start, said["compiled"]) > 0:
        return f"finished work was lost: {said}"
    return f"files were left: {said['left']}" if said["left"] else None


@pytest.fixture(scope="module")
def campaign(tmp_path_factory):
    made = Campaign(tmp_path_factory.mktemp("chaos"))
    shim = faults.compile_shim(made.directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_PRELOAD", str(shim))
        patch.delenv("PREJIT_RUNTIME_CACHE", raising=False)
        _prepare(made.directory)
        yield made
    if EXAMPLES >= WHOLE_EXAMPLES:
        made.write_figures()


def _prepare(directory):
    """Make `new`, without a bundle; `built`; `signed`, which has a key; `aged`, older than gc allows."""
    new, built, signed, aged = (directory / name for name in ("new", "built", "signed", "aged"))
    new.mkdir()
    faults.write_project(new, NEW)
    built.mkdir()
    for factor in (NEW, OLD):  # the next bundle's programs are in the cache
        faults.write_project(built, factor)
        shutil.rmtree(built / "out", ignore_errors=True)
        ended = processes.run(faults.build, built, directory, limit_seconds=LIMIT_SECONDS)
        assert ended.status == 0, ended.stderr
    faults.write_project(built, NEW)
    for copy in (aged, signed):
        shutil.copytree(built, copy, symlinks=True)
    faults.write_key(signed)
    then = time.time() - 100 * 86_400
    for path in (aged / "cache").rglob("*"):
        os.utime(path, (then, then))


@pytest.mark.parametrize("scenario", BROKEN)
def test_a_command_that_breaks_at_any_call_leaves_nothing_wrong(campaign, scenario):
    pick = random.Random(7)
    if IS_SAMPLE:
        last = json.loads(figures_file("chaos").read_text())["scenarios"][scenario][AT_CALLS]
        at, error = pick.randint(1, sum(last["calls"].values())), pick.choice((None, "EIO"))
        campaign.check(scenario, AT_CALLS, [Fault(at, error)])
        return
    calls = campaign.sound_calls(scenario, "sound")
    tried = faults.every_fault(calls)
    pick.shuffle(tried)
    campaign.check(scenario, AT_CALLS, tried[:EXAMPLES], calls)


@pytest.mark.parametrize("scenario", TIMED)
def test_a_command_killed_at_any_time_leaves_nothing_wrong(campaign, scenario):
    started, pick = time.monotonic(), random.Random(1)
    if not IS_SAMPLE:
        campaign.sound_calls(scenario, "timed")
    seconds = 3.0 if IS_SAMPLE else time.monotonic() - started
    times = [pick.uniform(0, seconds) for _ in range(min(EXAMPLES, 250))]
    campaign.check(scenario, AT_TIMES, [Fault(after_seconds=each) for each in times])


@pytest.mark.parametrize("scenario", ("gc",) if IS_SAMPLE else SCENARIOS)
def test_a_command_with_a_wrong_clock_does_the_same(campaign, scenario):
    for years in (-20, 20):
        fault = Fault(clock_seconds=years * 365 * 86_400)
        found = campaign.try_one(scenario, f"clock{years}", fault)
        assert found == ("killed, exit 0", None), years
