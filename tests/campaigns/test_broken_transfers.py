"""A transfer that breaks leaves no wrong bundle and nothing that `gc` does not find, and then goes on."""

import base64
import json
import os
import subprocess
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import accumulate
from queue import SimpleQueue
from random import Random

import pytest
from tests.fake_registry import fake_registry

pytest.importorskip("oras", reason="oras comes with the extra ship")
pytest.importorskip("obstore", reason="obstore comes with the extra ship")

from . import processes, transfer_processes
from .broken_transfers import FAULTS, USER, WAYS, Case, Place, make_version
from .campaign import ROOT, check, facts, scratch_directory, setting, write_figures
from .transfer_checks import Result, run_case

EXAMPLES = setting("BROKEN_EXAMPLES", 40)
FIRST = setting("BROKEN_FIRST", 0)  # the number of the first case: its seed
pytestmark = pytest.mark.timeout(900 + EXAMPLES)
WHOLE_EXAMPLES = 5_000  # from this number on, the figures are written
AT_ONCE = setting("BROKEN_AT_ONCE", 6)
GOLDEN = ROOT / "tests" / "format" / "v1" / "call"


def can_mount(directory):
    """Return whether this process may mount disks."""
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "tmpfs", str(directory)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        return False
    subprocess.run(["umount", str(directory)], check=True)
    return True


def cases():
    """Yield the number, the way and the fault of each case. All faults of a way come in turn."""
    ways, sums = list(WAYS), list(accumulate(WAYS.values()))
    turns = Counter[str]()
    for number in range(FIRST, FIRST + EXAMPLES):
        [way] = Random(number).choices(ways, cum_weights=sums)
        yield number, way, FAULTS[way][turns[way] % len(FAULTS[way])]
        turns[way] += 1


@pytest.mark.thorough
def test_broken_transfers_leave_nothing_wrong_and_go_on(monkeypatch):
    monkeypatch.setattr(processes, "PRELOADED", transfer_processes.PRELOADED)
    began = time.monotonic()
    results = list[tuple[int, str, str, Result]]()
    with scratch_directory() as scratch, ExitStack() as stack:
        scratch.chmod(0o755)
        versions = (
            make_version(GOLDEN, scratch / "v1", 1),
            make_version(GOLDEN, scratch / "v2", 2),
        )
        mounts = can_mount(scratch / "disk")
        places = SimpleQueue[Place]()
        for number in range(AT_ONCE):
            user = USER if number % 2 else None
            registry = stack.enter_context(fake_registry(user=user, has_referrers=number < 2))
            abroad = stack.enter_context(fake_registry())
            asked = {"www_authenticate": f'Bearer realm="http://{abroad.host}/token",service="s"'}
            abroad.fault = lambda method, path, asked=asked: (
                (401, asked) if path.startswith("/deny") else None
            )
            directory = scratch / f"worker{number}"
            directory.mkdir()
            logins = directory / "auth.json"
            auth = {"auth": base64.b64encode(USER.encode()).decode()}
            logins.write_text(json.dumps({"auths": {registry.host: auth}}))
            env = {"REGISTRY_AUTH_FILE": str(logins), "PREJIT_STORE_TOKEN": "secret", "HOME": "/"}
            places.put(Place(registry, abroad, directory, env, mounts))

        def run(number, way, fault):
            place = places.get()
            try:
                return run_case(Case(number, way, fault, versions, place))
            finally:
                places.put(place)

        with ThreadPoolExecutor(AT_ONCE) as pool:
            todo = list(cases())
            for (number, way, fault), result in zip(
                todo, pool.map(lambda each: run(*each), todo), strict=True
            ):
                results.append((number, way, fault, result))
    keep(results, time.monotonic() - began, mounts)
    check(
        [
            f"case {number}, {way}, {fault}: {'; '.join(each.bad)}"
            for number, way, fault, each in results
            if each.bad
        ]
    )


def keep(results, seconds, mounts):
    """Write the figures of a whole campaign."""
    figures = {
        **facts("kernel"),
        "cases": len(results),
        "processes that broke": sum(len(each.ends) for *_, each in results),
        "requests that broke": sum(each.broken for *_, each in results),
        "cases in which none did": sum(not each.broken for *_, each in results),
        "bad outcomes": sum(bool(each.bad) for *_, each in results),
        "bytes missing when they went on": sum(each.missing for *_, each in results),
        "bytes that then moved": sum(each.fetched for *_, each in results if each.fetched > 0),
        "disks that are really full": mounts,
        "ways": Counter(way for _, way, _, _ in results),
        "faults": {
            name: Counter(
                end or "ended well"
                for _, _, fault, each in results
                if fault == name
                for end in each.ends
            )
            for name in sorted({fault for _, _, fault, _ in results})
        },
        "seconds": round(seconds),
    }
    if len(results) >= WHOLE_EXAMPLES:
        write_figures("broken_transfers", figures)
    print(json.dumps(figures, indent=1))
