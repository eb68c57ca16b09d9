"""A slow disk: an image on a loop device, whose reads a control group limits, and how busy it is.

The limit is put on the disk below the image, for the processes of one control group. The kernel charges what
a loop device reads to the process that asked for it. Therefore a request waits in the loop device, and the
time that the device counts as busy includes the wait, as on a disk that is slow itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.control_groups import DISK_READS, Group, NoControlGroupError, group

READ_AHEAD_KB = 128
"""The kernel's own default, which most disks have. Some virtual machines set much more."""
_SYSTEM = Path("/sys/dev/block")
_SECTOR_BYTES, _BLOCK_BYTES = 512, 4096
_ROOM_BYTES = 256 << 20
_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNS = 0x20000


class NoSlowDiskError(Exception):
    """This machine lets the benchmark make no slow disk; the text says why."""


@dataclass(frozen=True)
class Counters:
    """Counters of a disk since it was attached.

    Attributes:
        busy_seconds: time in which at least one request was in flight.
        read_bytes: bytes read.
    """

    busy_seconds: float
    read_bytes: int


@dataclass(frozen=True)
class SlowDisk:
    """A slow disk that is mounted.

    Attributes:
        device: number of its loop device, such as `7:0`.
        group: control group whose processes read it slowly.
    """

    device: str
    group: Group


def parse_counters(text: str) -> Counters:
    """Return the counters in a disk's `stat` file (Documentation/block/stat.rst in the kernel).

    Args:
        text: numbers: requests read, merged, sectors read, milliseconds; the same of writes; requests in
            flight; milliseconds in which the disk was busy (io_ticks); more.

    Raises:
        ValueError: the text has too few numbers.
    """
    fields = text.split()
    if len(fields) < 10:
        raise ValueError(f"stat of a disk: expected at least 10 numbers, found {text!r}")
    return Counters(int(fields[9]) / 1e3, int(fields[2]) * _SECTOR_BYTES)


def counters(device: str) -> Counters:
    """Return what a disk has done so far.

    Args:
        device: its number, such as `7:0`.
    """
    return parse_counters((_SYSTEM / device / "stat").read_text())


def work_since(device: str, before: Counters) -> dict[str, float]:
    """Return `disk_busy_seconds` and `disk_read_bytes` of a disk since its counters were read."""
    now = counters(device)
    return {
        "disk_busy_seconds": now.busy_seconds - before.busy_seconds,
        "disk_read_bytes": now.read_bytes - before.read_bytes,
    }


def disk_below(path: Path) -> str:
    """Return the number of the whole disk that holds a file, such as `254:0`.

    Raises:
        NoSlowDiskError: the file is on no block device, as in an overlay or in memory.
    """
    number = path.stat().st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    known = _SYSTEM / device
    if not known.exists():
        raise NoSlowDiskError(
            f"{path}: expected a file system on a disk, found device {device}, which is none; "
            "set PREJIT_BENCH_DIR to a directory on a disk"
        )
    if (known / "partition").exists():  # limits are for whole disks
        return (known.resolve().parent / "dev").read_text().strip()
    return device


@contextlib.contextmanager
def slow_disk(
    directory: Path, sources: Sequence[Path], bytes_per_second: int
) -> Iterator[SlowDisk]:
    """Copy files to a slow disk, and mount the copies over the originals for this process alone.

    The process gets a view of mounts of its own, and keeps it. Its children see the slow disk at the same
    paths. Only those in the control group read it slowly. If the process dies, the kernel unmounts all.

    Args:
        directory: directory for the image, which is removed at the end.
        sources: files and directories to copy. Directories are copied without `site-packages` below them.
        bytes_per_second: limit of reads.

    Raises:
        NoSlowDiskError: this machine refuses a step, or the disk is full.
    """
    image, mounted = directory / "slow-disk.img", directory / "slow-disk"
    mounted.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        stack.callback(image.unlink, missing_ok=True)
        stack.callback(_unmount, mounted)
        _private_mounts()
        device = _mount_new(image, mounted, sum(map(_size, sources)))
        copies = [_copy(source, mounted / str(n)) for n, source in enumerate(sources)]
        os.sync()
        _run("mount", "-o", "remount,ro", str(mounted))
        for source, copy in zip(sources, copies, strict=True):
            _run("mount", "--bind", str(copy), str(source))
            stack.callback(_unmount, source)
        try:
            made = stack.enter_context(group(DISK_READS))
            made.limit_reads(disk_below(image), bytes_per_second)
        except (NoControlGroupError, OSError) as error:
            raise NoSlowDiskError(f"cannot limit the speed of reads: {error}") from error
        yield SlowDisk(device, made)


def _mount_new(image: Path, mounted: Path, size: int) -> str:
    """Make an image with room for some bytes, mount it, and return the number of its loop device."""
    with open(image, "wb") as file:
        file.truncate(size + size // 20 + _ROOM_BYTES)
    at_once = "lazy_itable_init=0,lazy_journal_init=0"  # else the kernel writes while we measure
    _run("mkfs.ext4", "-q", "-F", "-m", "0", "-E", at_once, str(image))
    # Direct: else the page cache holds every byte twice.
    loop = _run("losetup", "--find", "--show", "--direct-io=on", str(image))
    try:
        _run("mount", loop, str(mounted))
    finally:
        _run("losetup", "--detach", loop)  # the kernel detaches it when nothing is mounted any more
    system = Path("/sys/block") / Path(loop).name
    (system / "queue" / "read_ahead_kb").write_text(str(READ_AHEAD_KB))
    return (system / "dev").read_text().strip()


def _private_mounts() -> None:
    """Give this process a view of mounts of its own."""
    if _LIBC.unshare(_CLONE_NEWNS):
        reason = os.strerror(ctypes.get_errno())
        raise NoSlowDiskError(
            f"mounts for this process alone: {reason}; run as root, outside a container"
        )
    _run("mount", "--make-rprivate", "/")


def _copy(source: Path, to: Path) -> Path:
    """Copy a file, or a directory without `site-packages` below it."""
    try:
        if source.is_dir():
            ignored = shutil.ignore_patterns("site-packages")
            return Path(shutil.copytree(source, to, symlinks=True, ignore=ignored))
        return Path(shutil.copy2(source, to))
    except (OSError, shutil.Error) as error:
        raise NoSlowDiskError(f"cannot copy {source} to the slow disk: {error}") from error


def _size(source: Path) -> int:
    """Return the bytes that a copy of a file or directory needs, in whole blocks."""
    if source.is_file():
        return _whole_blocks(source)
    size = 0
    for root, directories, names in os.walk(source):
        directories[:] = [name for name in directories if name != "site-packages"]
        size += sum(_whole_blocks(Path(root, name)) for name in names)
    return size


def _whole_blocks(path: Path) -> int:
    return -(-path.lstat().st_size // _BLOCK_BYTES) * _BLOCK_BYTES


def _unmount(path: Path) -> None:
    with contextlib.suppress(NoSlowDiskError):  # it is not mounted, or a process still uses it
        _run("umount", "--lazy", str(path))  # this process may use a library below it


def _run(*command: str) -> str:
    """Run a command of the system, and return what it printed.

    Raises:
        NoSlowDiskError: it failed or is missing.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise NoSlowDiskError(f"the command {command[0]} is missing; install it") from error
    if done.returncode:
        raise NoSlowDiskError(
            f"{' '.join(command)}: {done.stderr.strip()}; a slow disk needs root and loop devices"
        )
    return done.stdout.strip()
