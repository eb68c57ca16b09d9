"""A plugin of pytest that lists the tests that take most CPU time, the processes that they start included."""

import ctypes
import os

import pytest

SHOWN = 30
_PR_SET_CHILD_SUBREAPER = 36  # from linux/prctl.h
_TICK = os.sysconf("SC_CLK_TCK")
_seconds = {}


def cpu_seconds():
    """Return the CPU time of this process and of all that come from it, ended ones included."""
    parents, ticks = {}, {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        parents[int(name)], ticks[int(name)] = int(fields[1]), sum(map(int, fields[11:15]))
    ours = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    return sum(ticks[pid] for pid in ours) / _TICK


def pytest_configure():
    """Make the orphans of processes this process's children, so that their time counts."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    before = cpu_seconds()
    result = yield
    _seconds[item.nodeid] = cpu_seconds() - before
    return result


def pytest_terminal_summary(terminalreporter):
    terminalreporter.section(f"{sum(_seconds.values()):.1f} s of CPU time")
    for name in sorted(_seconds, key=_seconds.get, reverse=True)[:SHOWN]:
        terminalreporter.line(f"{_seconds[name]:7.2f} {name}")
