"""A transfer that breaks leaves no wrong bundle and nothing that `gc` does not find, and then goes on."""

import base64
import json
import os
import subprocess
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from queue import SimpleQueue
from random import Random
from types import SimpleNamespace

import pytest
from tests.fake_registry import fake_registry

pytest.importorskip("oras", reason="oras comes with the extra ship")
pytest.importorskip("obstore", reason="obstore comes with the extra ship")

from . import processes, transfer_processes
from .broken_transfers import FAULTS, USER, WAYS, Case, make_version
from .campaign import ROOT, check, facts, scratch_directory, setting, write_figures
from .transfer_checks import run_case

EXAMPLES = setting("BROKEN_EXAMPLES", 40)
FIRST = setting("BROKEN_FIRST", 0)  # the number of the first case: its seed
pytestmark = pytest.mark.timeout(900 + EXAMPLES)
WHOLE_EXAMPLES = 5_000  # from this number on, the figures are written
AT_ONCE = setting("BROKEN_AT_ONCE", 6)
GOLDEN = ROOT / "tests" / "format" / "v1" / "call"


def can_mount(directory):
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "tmpfs", str(directory)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        return False
    subprocess.run(["umount", str(directory)], check=True)
    return True


def cases():
    """Yield the number, the way and the fault of each case. All faults of a way come in turn."""
    turns = Counter()
    for number in range(FIRST, FIRST + EXAMPLES):
        [way] = Random(number).choices([*WAYS], [*WAYS.values()])
        yield number, way, FAULTS[way][turns[way] % len(FAULTS[way])]
        turns[way] += 1


@contextmanager
def place(number, scratch, mounts):
    """Run the servers of a worker, every second with a login, the first two with the referrers API."""
    user = USER if number % 2 else None
    with fake_registry(user=user, has_referrers=number < 2) as registry, fake_registry() as abroad:
        asked = {"www_authenticate": f'Bearer realm="http://{abroad.host}/token",service="s"'}
        abroad.fault = lambda method, path: (401, asked) if path.startswith("/deny") else None
        directory = scratch / f"worker{number}"
        directory.mkdir()
        logins = directory / "auth.json"
        auth = {"auth": base64.b64encode(USER.encode()).decode()}
        logins.write_text(json.dumps({"auths": {registry.host: auth}}))
        env = {"REGISTRY_AUTH_FILE": str(logins), "PREJIT_STORE_TOKEN": "secret", "HOME": "/"}
        found = {"registry": registry, "abroad": abroad, "scratch": directory}
        yield SimpleNamespace(**found, env=env, can_mount=mounts)


@pytest.mark.thorough
def test_broken_transfers_leave_nothing_wrong_and_go_on(monkeypatch):
    monkeypatch.setattr(processes, "PRELOADED", transfer_processes.PRELOADED)
    began = time.monotonic()
    with scratch_directory() as scratch, ExitStack() as stack:
        scratch.chmod(0o755)
        versions = tuple(make_version(GOLDEN, scratch / f"v{seed}", seed) for seed in (1, 2))
        mounts = can_mount(scratch / "disk")
        places = SimpleQueue()
        for number in range(AT_ONCE):
            places.put(stack.enter_context(place(number, scratch, mounts)))

        def run(case):
            at = places.get()
            try:
                return *case, run_case(Case(*case, versions, at))
            finally:
                places.put(at)

        with ThreadPoolExecutor(AT_ONCE) as pool:
            results = list(pool.map(run, cases()))
    keep(results, time.monotonic() - began, mounts)
    check(
        [
            f"case {number}, {way}, {fault}: {'; '.join(each.bad)}"
            for number, way, fault, each in results
            if each.bad
        ]
    )


def keep(results, seconds, mounts):
    found = [each for *_, each in results]
    faults = {}
    for _, _, fault, each in results:
        faults.setdefault(fault, Counter()).update(end or "ended well" for end in each.ends)
    figures = {
        **facts("kernel"),
        "cases": len(found),
        "processes that broke": sum(len(each.ends) for each in found),
        "requests that broke": sum(each.broken for each in found),
        "cases in which none did": sum(not each.broken for each in found),
        "bad outcomes": sum(bool(each.bad) for each in found),
        "bytes missing when they went on": sum(each.missing for each in found),
        "bytes that then moved": sum(max(0, each.fetched) for each in found),
        "disks that are really full": mounts,
        "ways": Counter(way for _, way, _, _ in results),
        "faults": dict(sorted(faults.items())),
        "seconds": round(seconds),
    }
    if len(results) >= WHOLE_EXAMPLES:
        write_figures("broken_transfers", figures)
    print(json.dumps(figures, indent=1))
