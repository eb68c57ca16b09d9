"""The parts that campaigns share: how much one tries, where it works, its findings, its file of figures."""

import json
import os
import platform
import tempfile
from collections import Counter
from contextlib import contextmanager
from datetime import date
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]


def setting(name, usual):
    """Return the number that the environment gives for a campaign, such as PREJIT_FUZZ_EXAMPLES."""
    return int(os.environ.get(f"PREJIT_{name}", usual))


@contextmanager
def scratch_directory():
    """Make a directory, in memory where this machine has some for files."""
    root = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=root) as directory:
        yield Path(directory)


def check(bad):
    assert not bad, f"{len(bad)} bad outcomes\n\n" + "\n\n".join(bad[:20])


class Findings:
    """How often each outcome of each part of a campaign was seen, and what was bad."""

    def __init__(self):
        self.counts = {}
        self.failures = []

    def add(self, part, *names):
        self.counts.setdefault(part, Counter())[", ".join(names)] += 1

    def fail(self, part, problem):
        self.failures.append(f"{part}: {problem}")

    def check(self, part):
        check([each for each in self.failures if each.startswith(f"{part}: ")])

    def figures(self):
        return {part: dict(sorted(counts.items())) for part, counts in self.counts.items()}


def facts(*packages):
    """Return the date and the versions of Python, of packages and of the `kernel`."""
    return {
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        **{p: platform.release() if p == "kernel" else version(p) for p in packages},
    }


def machine_facts():
    """Return what decides how fast a server is: the machine, and its load now."""
    return {
        "machine": f"{os.cpu_count()} CPUs, {platform.machine()}",
        "load average before": [round(each, 1) for each in os.getloadavg()],
    }


def figures_file(campaign):
    return Path(__file__).with_name(f"{campaign}.json")


def write_figures(campaign, figures):
    figures_file(campaign).write_text(json.dumps(figures, indent=1) + "\n")
