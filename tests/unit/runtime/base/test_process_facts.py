"""What the kernel says of this process: how many threads it may use."""

import os

import pytest

from prejit.runtime.base import process_facts
from prejit.runtime.base.process_memory import free_memory_bytes
from prejit.runtime.errors import UsageError
from prejit.server.engine.memory import host_memory_limit_bytes

V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "31 23 0:27 / /sys/fs/cgroup/cpu,cpuacct rw shared:5 - cgroup cgroup rw,cpu,cpuacct\n"
V1_OTHER = "32 23 0:28 / /sys/fs/cgroup/memory rw shared:6 - cgroup cgroup rw,memory\n"


@pytest.fixture(autouse=True)
def eight_cpus(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("PREJIT_THREADS", raising=False)


def threads(root, files):
    """Of a process where /proc and /sys hold these files."""
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return process_facts.kernel_threads(str(root))


def v2(group, limits, mounts=V2):
    """A process in a group of the unified hierarchy, with cpu.max of some groups."""
    files = {"proc/self/cgroup": f"0::{group}\n", "proc/self/mountinfo": mounts}
    return files | {f"sys/fs/cgroup/{at}cpu.max": f"{limit}\n" for at, limit in limits.items()}


def v1(group, limits, mounts=V1):
    files = {
        "proc/self/cgroup": f"12:memory:/elsewhere\n4:cpu,cpuacct:{group}\n0::/\n",
        "proc/self/mountinfo": V1_OTHER + mounts,
    }
    for at, (quota, period) in limits.items():
        files[f"sys/fs/cgroup/cpu,cpuacct/{at}cpu.cfs_quota_us"] = f"{quota}\n"
        files[f"sys/fs/cgroup/cpu,cpuacct/{at}cpu.cfs_period_us"] = f"{period}\n"
    return files


PODS = {"": "max 100000", "pod/": "300000 100000", "pod/box/": "max 100000"}
OLD = {"": (-1, 100000), "a/": (300000, 100000), "a/b/": (500000, 100000)}
PART = V1.replace(" / ", " /docker/abc ")
"""The mount of a container that sees its part of a hierarchy: it begins at its own group."""
TWO = {"": (200000, 100000)}
INNER = {"": (-1, 100000), "in/": (300000, 100000)}
BROKEN = {"proc/self/cgroup": "\nnonsense\n1:2", "proc/self/mountinfo": "\n- \n1 - cgroup2\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        *(({}, 8), (BROKEN, 8), (v2("/", {}), 8), (v1("/", {"": (-1, 100000)}), 8)),
        *((v2("/", {"": limit}), 8) for limit in ("max 100000", "", "max", "x y", "1 0", "\xff")),
        *((v2("/", {"": limit}), 8) for limit in ("-5 100000", "1 2 3", "1600000 100000")),
        *((v2("/", {"": f"{limit} 100000"}), 2) for limit in (200000, 250000)),
        *((v2("/", {"": "20000 10000"}), 2), (v2("/", {"": "50000 100000"}), 1)),
        (v2("/pod/box", PODS), 3),
        (v2("/pod/box", PODS | {"pod/box/": "200000 100000"}), 2),
        *((v1("/", {"": (400000, 100000)}), 4), (v1("/a/b", OLD), 3)),
        *((v1("/docker/abc", TWO, PART), 2), (v1("/docker/abc/in", INNER, PART), 3)),
        (v1("/docker/abcd", TWO, PART), 2),
    ],
)
def test_control_groups_are_a_limit(files, expected, tmp_path):
    assert threads(tmp_path, files) == expected


@pytest.mark.parametrize(("text", "expected"), [("64", 8), ("03", 3), ("", 8)])
def test_the_setting_is_no_upper_bound(text, expected, tmp_path, monkeypatch):
    monkeypatch.setenv("PREJIT_THREADS", text)
    assert threads(tmp_path, {}) == expected
    assert threads(tmp_path, v2("/", {"": "200000 100000"})) == min(expected, 2)
    for wrong in ("0", "-1", " 2", "٣", "1" * 4000):
        monkeypatch.setenv("PREJIT_THREADS", wrong)
        with pytest.raises(UsageError, match="PREJIT_THREADS: expected an integer of at") as raised:
            threads(tmp_path, {})
        assert raised.value.hint
        assert len(str(raised.value)) < 200


def test_memory_limits_are_the_least_of_all_control_groups(tmp_path):
    machine = host_memory_limit_bytes(str(tmp_path / "nothing"))
    first = {**v1("/", {}), "proc/self/cgroup": "12:memory:/unit\n"}
    cases = [
        (v2("/pod/box", {}), {"pod/memory.max": "1000000", "pod/box/memory.max": "max"}, 1_000_000),
        (v2("/pod/box", {}), {"pod/box/memory.max": "max"}, machine),
        (first, {"memory/unit/memory.limit_in_bytes": "1000000"}, 1_000_000),  # a unit of systemd
        (first, {"memory/memory.limit_in_bytes": "9223372036854771712"}, machine),  # no limit
    ]
    for number, (files, limits, expected) in enumerate(cases):
        root = tmp_path / str(number)
        threads(root, files | {f"sys/fs/cgroup/{name}": text for name, text in limits.items()})
        assert host_memory_limit_bytes(str(root)) == expected
    stat = "inactive_file 10\nactive_file 5\ntotal_inactive_file 20\ntotal_active_file 7\n"
    second = {"memory.max": "1000", "memory.current": "900", "memory.stat": stat}
    first = {"memory.limit_in_bytes": "800", "memory.usage_in_bytes": "600", "memory.stat": stat}
    free = [
        (v2("/pod/box", {}), "pod/", second, 110, 115),  # the limit of the group around it
        ({**v1("/", {}), "proc/self/cgroup": "12:memory:/\n"}, "memory/", first, 220, 227),
    ]
    for files, group, limits, idle, dropped in free:
        root = tmp_path / str(idle)
        files |= {f"sys/fs/cgroup/{group}{name}": text for name, text in limits.items()}
        threads(root, files | {"proc/meminfo": "MemAvailable: 1000 kB\n"})
        assert free_memory_bytes(str(root)) == idle
        assert free_memory_bytes(str(root), with_files=True) == dropped
