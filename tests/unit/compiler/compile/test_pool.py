"""The worker pool: an error shows whatever happens to a worker, and costs no other program."""

from __future__ import annotations

import errno
import io
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zstandard

from prejit.compiler.compile import pool, worker_process
from prejit.compiler.compile.executor import (
    Executor,
    collect,
    find_compiled,
    need_of,
    size_need,
)
from prejit.compiler.compile.jobs import Compiled, CompileJob, Source
from prejit.compiler.compile.pool import WorkerPool, default_workers
from prejit.compiler.compile.worker.worker_compile import compress
from prejit.compiler.compile.worker_process import WorkerProcess
from prejit.compiler.progress import Plain
from prejit.compiler.store.directory_store import DirectoryStore
from prejit.compiler.store.key import Key
from prejit.compiler.targets import cpu_count
from prejit.compiler.targets.build_host import jaxlib_version
from prejit.compiler.targets.target_classes import Target
from prejit.compiler.targets.target_table import target
from prejit.compiler.targets.toolchain import Toolchain, host_toolchain
from prejit.runtime.errors import BuildError, StoreError
from prejit.runtime.format.bundle_schema import Memory, Segment

VERSIONS = (("jax", "0.12.0"), ("jaxlib", "0.12.0"))
HOST = target("cpu-host")
V3 = target("cpu-x86-64-v3")

# A worker whose compiler does what its portable program says. Everything but XLA is real.
FAKE_WORKER = """
import ctypes, os, signal, sys, time
from pathlib import Path
from prejit.compiler.compile.worker import requests, worker_compile
from prejit.runtime.format.bundle_schema import Memory
from prejit.runtime.errors import BuildError

def compile_program(portable, machine):
    action, _, argument = portable.decode().partition(":")
    if action == "signal":
        print("the last words", file=sys.stderr, flush=True)
        signal.raise_signal(int(argument))
    if action == "crash":
        ctypes.string_at(0)
    if action == "exit":
        print("noise\\n\\nwhat went wrong", file=sys.stderr, flush=True)
        os._exit(int(argument))
    if action == "raise":
        raise BuildError("XLA does not like it", hint="change it")
    if action == "bug":
        raise ZeroDivisionError("a bug")
    if action == "kill-worker":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    if action == "noise":
        os.write(1, b"{}\\nnot an answer")
        print("nor this")
    if action == "babble":
        answers.write(b"not an answer\\n")
        answers.flush()
        time.sleep(60)
    if action == "stop":  # neither it nor the process that waits for it ever does anything again
        os.kill(os.getppid(), signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
    if action == "count":
        with open(argument, "a") as file:
            file.write(f"{os.getpid()}\\n")
        time.sleep(0.2)
    if action == "greedy" and not Path(argument).exists():
        Path(argument).touch()
        time.sleep(0.3)  # so that another program runs beside it
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "warn":
        print("a warning of another program", file=sys.stderr)
    if action == "sleep":
        Path(argument).write_text(f"{os.getpid()} {os.getppid()}")
        time.sleep(60)
    if action == "once":
        mark, count = argument.split(",")
        if not Path(mark).exists():
            Path(mark).touch()
            time.sleep(60)
        with open(count, "a") as file:
            file.write("compiled\\n")
    if action == "meet":  # returns only if another program is compiled at the same time
        mine, other = argument.split(",")
        Path(mine).touch()
        for _ in range(6000):
            if Path(other).exists():
                break
            time.sleep(0.01)
        else:
            sys.exit("nobody came")
    if action == "break-cache":
        Path(argument).rename(argument + ".gone")
    return worker_compile.CompilerOutput(
        portable * 100, (f"worker-{os.getppid()}", os.environ["XLA_FLAGS"]), Memory(1, 2, 3, 4)
    )

answers = open(os.dup(1), "wb")
requests.main(compile_program)
"""


@pytest.fixture
def cache(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore.open(tmp_path / "cache")


@pytest.fixture
def fake(tmp_path: Path) -> tuple[str, str]:
    """The command of the fake worker."""
    path = tmp_path / "fake_worker.py"
    path.write_text(FAKE_WORKER)
    return (sys.executable, str(path))


@pytest.fixture(autouse=True)
def import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers find prejit where this process finds it."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


def job(
    cache: DirectoryStore,
    program: str,
    portable: str | bytes,
    on: Target = HOST,
    command: tuple[str, ...] = (),
) -> CompileJob:
    """A job for a portable program, which is put into the cache."""
    content = portable.encode() if isinstance(portable, str) else portable
    digest = cache.put_blob(content)
    key = Key("compile", f"{program}/{on.name}", (("portable", digest), ("target", on.name)))
    toolchain = Toolchain(on, command, VERSIONS)
    if not command:
        toolchain = host_toolchain(on, {"jaxlib": jaxlib_version()})
    return CompileJob(program, toolchain, Source(digest, ()), key)


def run(
    cache: DirectoryStore, command: tuple[str, ...], *jobs: CompileJob, workers: int = 2
) -> dict[tuple[str, str], Compiled]:
    """Compiles jobs."""
    with WorkerPool(cache, workers=workers) as pool:
        return results(
            pool, *(replace(one, toolchain=replace(one.toolchain, command=command)) for one in jobs)
        )


def results(pool: Executor, *jobs: CompileJob) -> dict[tuple[str, str], Compiled]:
    """Compiles jobs with an executor."""
    return collect({(one.program, one.target.name): pool.submit(one) for one in jobs})


def compiled(cache: DirectoryStore, *jobs: CompileJob) -> dict[tuple[str, str], Compiled]:
    """Compiles jobs with their own toolchains."""
    with WorkerPool(cache) as pool:
        return results(pool, *jobs)


def test_a_real_program_is_compiled_for_each_target_and_runs(cache: DirectoryStore) -> None:
    import jax
    from jax import export

    from prejit.runtime.device.device import Device
    from prejit.runtime.device.transfer import to_numpy

    def f(x: jax.Array) -> jax.Array:
        return x * 2 + 1

    exported = export.export(jax.jit(f), platforms=["cpu"])(jax.ShapeDtypeStruct((8,), "float32"))
    jobs = [job(cache, "f", exported.mlir_module_serialized, on) for on in (HOST, V3)]
    results = compiled(cache, *jobs)
    assert set(results) == {("f", "cpu-host"), ("f", "cpu-x86-64-v3")}
    device = Device()
    for result in results.values():
        segment = result.executable
        frame = cache.read_blob(segment.digest)
        assert frame is not None
        assert len(frame) == segment.size
        serialized = zstandard.ZstdDecompressor().decompress(frame)
        assert len(serialized) == segment.raw_size
        (y,) = device.load(serialized, "f").run([device.put(np.arange(8, dtype=np.float32))])
        np.testing.assert_array_equal(to_numpy(y), np.arange(8) * 2 + 1)
        assert "sse2" in result.cpu_features or "avx" in result.cpu_features
        assert result.memory.argument_bytes == 32
    assert "avx512f" not in results["f", "cpu-x86-64-v3"].cpu_features
    # A build that changes nothing compiles nothing: no worker could be started with this command.
    assert run(cache, ("/nonexistent",), *jobs) == results


def a_loop_in_parts() -> bytes:
    """A program whose loops XLA splits for the CPUs that it sees."""
    import jax
    import jax.numpy as jnp
    from jax import export

    def program(x: jax.Array) -> tuple[jax.Array, ...]:
        y = x
        for _ in range(20):
            y = y * y * 0.5 - x * y + 1.25  # enough for a part on every CPU
        z = jax.nn.softmax(x @ x) + jnp.sin(x).T @ x[:, :1]
        return y, jnp.tanh(x), jnp.sum(jnp.sin(x), axis=0), z

    shape = jax.ShapeDtypeStruct((1024, 1024), "float32")
    return export.export(jax.jit(program), platforms=["cpu"])(shape).mlir_module_serialized


def test_the_build_hosts_cores_change_no_byte_of_a_program(tmp_path: Path) -> None:
    """They decided into how many parts loops are split, and in which order kernels are in the file."""
    portable = a_loop_in_parts()
    host = os.sched_getaffinity(0)
    found = []
    for cpus in ({min(host)}, host, host):
        cache = DirectoryStore.open(tmp_path / f"cache-{len(found)}")
        os.sched_setaffinity(0, cpus)
        try:
            one = compiled(cache, job(cache, "p", portable))["p", "cpu-host"]
        finally:
            os.sched_setaffinity(0, host)
        found.append(one.executable.digest)
    assert found[0] == found[1] == found[2]
    assert cpu_count.seen_by_xla(HOST.cpus) == HOST.cpus, "without this, cores are in the key"


def test_a_program_is_split_for_the_cpus_of_its_target(cache: DirectoryStore) -> None:
    """And for those of no other target that the same build compiles for."""
    portable = a_loop_in_parts()
    on = [replace(HOST, name=f"cpus-{n}", cpus=n) for n in (1, 2, 16, 100)]
    digests = [
        each.executable.digest
        for each in compiled(cache, *(job(cache, "p", portable, t) for t in on)).values()
    ]
    assert len(set(digests)) == len(on)


def test_where_no_filter_is_allowed_a_process_gives_up_cpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A build for fewer CPUs than the host has is exact, and none is for other CPUs than its key."""
    monkeypatch.setattr(cpu_count, "_can_answer", lambda: False)
    host = os.sched_getaffinity(0)
    assert cpu_count.seen_by_xla(1) == 1
    assert cpu_count.seen_by_xla(len(host) + 1) == len(host)
    ours, its = socket.socketpair()
    try:
        with ours, its:
            cpu_count.show(1, its)
            assert len(os.sched_getaffinity(0)) == 1
            with pytest.raises(BuildError, match=r"expected XLA to see 2 CPUs .* sees 1") as caught:
                cpu_count.show(2, its)
            assert "cpus = 1" in str(caught.value.hint)
    finally:
        os.sched_setaffinity(0, host)


def test_programs_are_compiled_side_by_side(
    cache: DirectoryStore, fake: tuple[str, str], tmp_path: Path
) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    jobs = [job(cache, "a", f"meet:{a},{b}"), job(cache, "b", f"meet:{b},{a}")]
    assert len(run(cache, fake, *jobs)) == 2


def test_each_target_has_a_process_of_its_own_that_is_used_again(
    cache: DirectoryStore, fake: tuple[str, str]
) -> None:
    jobs = [job(cache, f"p{n}", f"ok:{n}", on) for n in range(3) for on in (HOST, V3)]
    results = run(cache, fake, *jobs, workers=1)
    workers = {
        name: {result.cpu_features for (_, on), result in results.items() if on == name}
        for name in ("cpu-host", "cpu-x86-64-v3")
    }
    assert [len(found) for found in workers.values()] == [1, 1]
    assert workers["cpu-host"] != workers["cpu-x86-64-v3"]
    for on in (HOST, V3):
        ((_, flags),) = workers[on.name]
        assert flags == job(cache, "any", "", on).toolchain.xla_flags(os.environ)


def test_what_xla_prints_is_no_answer(cache: DirectoryStore, fake: tuple[str, str]) -> None:
    assert len(run(cache, fake, job(cache, "a", "noise:"))) == 1


def failure(cache: DirectoryStore, command: tuple[str, ...], bad: CompileJob) -> BuildError:
    """The error of a build with one bad job among good ones; the good ones must be cached."""
    good = [job(cache, f"good{n}", f"ok:{n}", on) for n in range(2) for on in (HOST, V3)]
    with pytest.raises(BuildError) as caught:
        run(cache, command, good[0], bad, *good[1:])
    for one in good:
        assert cache.get(one.key, verify=True) is not None, one
    assert cache.get(bad.key) is None
    assert str(caught.value).startswith("1 of 5 programs did not compile\n")
    assert caught.value.hint is not None
    assert caught.value.hint.endswith("4 finished and stay cached")
    return caught.value


def test_an_out_of_memory_kill_is_reported_with_program_target_and_last_lines(
    cache: DirectoryStore, fake: tuple[str, str]
) -> None:
    error = failure(cache, fake, job(cache, "decode", "signal:9", V3))
    assert str(error).splitlines()[1:] == [
        "  decode for cpu-x86-64-v3: its worker was killed by SIGKILL",
        "      | the last words",
    ]
    assert error.hint is not None
    assert "more memory than this machine has" in error.hint


@pytest.mark.parametrize(
    ("portable", "lines"),
    [
        ("crash:", ["  bad for cpu-host: its worker was killed by SIGSEGV"]),
        (
            "signal:6",
            ["  bad for cpu-host: its worker was killed by SIGABRT", "      | the last words"],
        ),
        (
            "exit:7",
            [
                "  bad for cpu-host: its worker ended with exit code 7",
                "      | noise",
                "      | what went wrong",
            ],
        ),
        ("raise:", ["  bad for cpu-host: XLA does not like it"]),
    ],
)
def test_a_crash_is_reported_with_its_text(
    cache: DirectoryStore, fake: tuple[str, str], portable: str, lines: list[str]
) -> None:
    error = str(failure(cache, fake, job(cache, "bad", portable)))
    said, fatal, stack = error.partition("\n      | Fatal Python error: ")
    assert said.splitlines()[1:] == lines
    assert bool(fatal) == (" killed by SIG" in said)
    assert not fatal or " in compile_program\n" in stack
    assert len(stack.splitlines()) <= 15


def test_a_bug_of_ours_is_reported_with_its_traceback(
    cache: DirectoryStore, fake: tuple[str, str]
) -> None:
    text = str(failure(cache, fake, job(cache, "bad", "bug:")))
    assert "its worker ended with exit code 1" in text
    assert "| ZeroDivisionError: a bug" in text


def test_a_worker_process_that_is_killed_is_reported_at_once(
    cache: DirectoryStore, fake: tuple[str, str]
) -> None:
    start = time.monotonic()
    text = str(failure(cache, fake, job(cache, "bad", "kill-worker:")))
    assert "bad for cpu-host: its worker was killed by SIGKILL" in text
    assert time.monotonic() - start < 30  # its fork, which sleeps for 60 s, died with it


def test_a_worker_that_babbles_is_killed(
    cache: DirectoryStore, fake: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_process, "_ANSWER_SECONDS", 0.1)
    text = str(failure(cache, fake, job(cache, "bad", "babble:")))
    assert "bad for cpu-host: its worker was killed by SIGKILL" in text


def test_only_what_the_failed_program_wrote_is_reported(
    cache: DirectoryStore, fake: tuple[str, str]
) -> None:
    jobs = [job(cache, "a", "warn:"), job(cache, "b", "exit:7")]
    with pytest.raises(BuildError, match="what went wrong") as caught:
        run(cache, fake, *jobs, workers=1)
    assert "a warning of another program" not in str(caught.value)


def test_real_xla_tells_of_a_flag_that_it_does_not_know(
    cache: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_no_such_flag=1")
    with pytest.raises(BuildError, match=r"Unknown flags? in XLA_FLAGS: --xla_no_such_flag=1"):
        compiled(cache, job(cache, "f", b"whatever"))


def test_a_portable_program_that_is_damaged_is_reported(
    cache: DirectoryStore, fake: tuple[str, str]
) -> None:
    one = job(cache, "a", "ok:")
    path = cache.blob_path(one.source.program)
    assert path is not None
    path.write_bytes(b"damaged")
    with pytest.raises(BuildError, match="expected sha256:"):
        run(cache, fake, one)


def test_a_cache_that_cannot_be_written_is_a_store_error(
    cache: DirectoryStore, fake: tuple[str, str]
) -> None:
    broken = cache.root / "v1" / "temp"
    with pytest.raises(StoreError, match="cannot write the build cache"):
        run(cache, fake, job(cache, "a", f"break-cache:{broken}"))


def test_a_worker_that_cannot_be_started_is_reported_for_every_program(
    cache: DirectoryStore,
) -> None:
    jobs = [job(cache, f"p{n}", f"ok:{n}") for n in range(3)]
    with pytest.raises(BuildError, match="3 of 3 programs") as caught:
        run(cache, ("/nonexistent",), *jobs)
    assert str(caught.value).count("cannot start a worker process, /nonexistent") == 3


def test_a_result_of_another_form_is_compiled_again(
    cache: DirectoryStore, fake: tuple[str, str]
) -> None:
    one = job(cache, "a", "ok:")
    cache.put(one.key, {"executable": "of an older prejit"})
    assert find_compiled(cache, one.key) is None
    assert run(cache, fake, one) == {("a", "cpu-host"): find_compiled(cache, one.key)}


def test_jobs_are_taken_while_others_run(
    cache: DirectoryStore, fake: tuple[str, str], tmp_path: Path
) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    with WorkerPool(cache, workers=2) as pool:
        first = pool.submit(job(cache, "a", f"meet:{a},{b}", command=fake))
        wait_for(a.exists)
        second = pool.submit(job(cache, "b", f"meet:{b},{a}", command=fake))
        first.result()
        second.result()
        pool.submit(job(cache, "c", "ok:", command=fake)).result()
        assert len(pool.compiled) == 3


def test_a_long_compile_is_reported_by_a_heartbeat(
    cache: DirectoryStore, fake: tuple[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    with (
        Plain(sys.stderr, heartbeat_seconds=0.05) as progress,
        WorkerPool(cache, workers=1, progress=progress) as pool,
    ):
        future = pool.submit(job(cache, "a", f"meet:{a},{b}", command=fake))
        wait_for(a.exists)
        time.sleep(0.2)
        b.touch()
        future.result()
    captured = capsys.readouterr()
    assert re.search(r"^still compiling a for cpu-host \(\d+ s\); 0/1$", captured.err, re.MULTILINE)
    assert captured.err.splitlines()[-1].startswith("compiled a for cpu-host in ")
    assert captured.out == ""


# A build of its own, to be interrupted.
BUILD = """
import signal
import sys
from pathlib import Path
from prejit.compiler.store.directory_store import DirectoryStore
from prejit.compiler.store.key import Key
from prejit.compiler.compile.executor import collect
from prejit.compiler.compile.jobs import CompileJob, Source
from prejit.compiler.compile.pool import WorkerPool
from prejit.compiler.targets.build_host import jaxlib_version
from prejit.compiler.targets.target_table import target
from prejit.compiler.targets.toolchain import Toolchain

signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
root, command, *portables = sys.argv[1:]
cache = DirectoryStore.open(Path(root))
toolchain = Toolchain(target("cpu-host"), (sys.executable, command), (("jaxlib", "0.12.0"),))
with WorkerPool(cache, workers=len(portables)) as pool:
    futures = {}
    for number, portable in enumerate(portables):
        digest = cache.put_blob(portable.encode())
        key = Key("compile", f"{number}", (("portable", digest),))
        job = CompileJob(f"{number}", toolchain, Source(digest, ()), key)
        futures[job.program, "cpu-host"] = pool.submit(job)
    collect(futures)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_a_build_that_is_interrupted(
    cache: DirectoryStore, fake: tuple[str, str], tmp_path: Path, number: signal.Signals
) -> None:
    marks = [tmp_path / "a", tmp_path / "b"]
    portables = [f"sleep:{mark}" for mark in marks]
    build = subprocess.Popen(
        [sys.executable, "-c", BUILD, str(cache.root), fake[1], *portables],
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(lambda: all(mark.exists() and mark.read_text() for mark in marks))
    processes = [int(text) for mark in marks for text in mark.read_text().split()]
    assert all(map(is_alive, processes))
    build.send_signal(number)
    _, errors = build.communicate(timeout=60)
    if number == signal.SIGINT:
        assert errors.rstrip().endswith("KeyboardInterrupt")
    wait_for(lambda: not any(map(is_alive, processes)))
    assert list((DirectoryStore.open(cache.root).root / "v1" / "temp").iterdir()) == []


def is_alive(process: int) -> bool:
    """Whether a process runs; a zombie that nobody has waited for does not."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # it ended before the file was opened, or read
        return False
    return state != "Z"


def wait_for(condition: Callable[[], bool]) -> None:
    """Waits until something is so; at most 60 s."""
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.01)
    pytest.fail("waited for 60 s")


@pytest.mark.parametrize("portable", ["sleep:{mark}", "stop:"])
def test_a_worker_that_does_not_answer_is_killed_at_the_time_limit(
    cache: DirectoryStore, fake: tuple[str, str], tmp_path: Path, portable: str
) -> None:
    mark = tmp_path / "mark"
    late = job(cache, "decode", portable.format(mark=mark), V3, command=fake)
    with WorkerPool(cache, workers=1, timeout_seconds=3.0) as pool:
        with pytest.raises(BuildError) as caught:
            results(pool, late, job(cache, "good", "ok:", V3, command=fake))
    assert str(caught.value).splitlines()[:2] == [
        "1 of 2 programs did not compile",
        "  decode for cpu-x86-64-v3: its worker did not answer within 3 s and was killed",
    ]
    assert caught.value.hint is not None
    assert "--timeout SECONDS" in caught.value.hint
    if mark.exists():
        wait_for(lambda: not any(is_alive(int(text)) for text in mark.read_text().split()))


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os; os._exit(3)", "its worker ended with exit code 3"),
        ("import sys; sys.stdin.readline(); sys.exit('no such thing')", "    | no such thing"),
        ("import os; os.kill(os.getpid(), 9)", "its worker was killed by SIGKILL"),
        ("import time; time.sleep(60)", "its worker did not answer within 1 s and was killed"),
    ],
)
def test_a_worker_that_dies_while_it_measures_is_a_failed_measurement(
    cache: DirectoryStore, code: str, reason: str
) -> None:
    toolchain = Toolchain(HOST, (sys.executable, "-c", code), VERSIONS)
    large = [{"executable": "x" * (1 << 20)}]  # more than a pipe holds
    seconds = 1.0 if "sleep" in code else 60.0
    with WorkerProcess(toolchain, cache, os.environ) as worker:
        with pytest.raises(BuildError) as caught:
            worker.measure(large, Path("weights"), None, seconds)
        with pytest.raises(BuildError, match="cannot measure"):
            worker.measure(large, Path("weights"), None, seconds)
    assert str(caught.value).startswith(
        "target cpu-host: cannot measure its programs on this machine: its worker "
    )
    assert reason in str(caught.value)
    assert caught.value.hint


class Closed(io.StringIO):
    """A stream whose reader has gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


def test_a_build_whose_stderr_is_closed_does_not_hang(
    cache: DirectoryStore, fake: tuple[str, str]
) -> None:
    jobs = [job(cache, f"p{n}", f"ok:{n}", command=fake) for n in range(3)]
    bad = job(cache, "bad", "exit:7", command=fake)
    with (
        Plain(Closed(), heartbeat_seconds=0.05) as progress,
        WorkerPool(cache, workers=1, progress=progress) as pool,
    ):
        with pytest.raises(BuildError, match="1 of 4 programs"):
            results(pool, *jobs, bad)


def test_equal_builds_at_once_compile_each_program_once(
    cache: DirectoryStore, fake: tuple[str, str], tmp_path: Path
) -> None:
    marks = [tmp_path / f"mark{n}" for n in range(3)]
    portables = [f"count:{mark}" for mark in marks]
    command = [sys.executable, "-c", BUILD, str(cache.root), fake[1], *portables]
    builds = [subprocess.Popen(command) for _ in range(4)]
    assert [build.wait(timeout=60) for build in builds] == [0] * 4
    assert [mark.read_text().count("\n") for mark in marks] == [1, 1, 1]
    assert list((cache.root / "v1" / "temp").iterdir()) == []


def test_a_build_that_is_killed_leaves_its_program_to_those_that_wait(
    cache: DirectoryStore, fake: tuple[str, str], tmp_path: Path
) -> None:
    mark, count = tmp_path / "mark", tmp_path / "count"
    count.touch()
    # It sleeps the first time that it is compiled, and the mark says that it does.
    text = f"once:{mark},{count}"
    command = [sys.executable, "-c", BUILD, str(cache.root), fake[1], text]
    first = subprocess.Popen(command)
    wait_for(mark.exists)
    second = subprocess.Popen(command)
    time.sleep(0.5)
    assert second.poll() is None, "it waits for the first"
    first.kill()
    first.wait()
    assert second.wait(timeout=60) == 0
    assert count.read_text() == "compiled\n"


def test_closing_a_pool_ends_its_wait_for_another_build(
    cache: DirectoryStore, fake: tuple[str, str]
) -> None:
    one = job(cache, "a", "ok:", command=fake)
    with cache.making(one.key) as held:
        assert held
        pool = WorkerPool(cache, workers=1)
        future = pool.submit(one)
        time.sleep(0.2)
        pool.close()
        with pytest.raises(CancelledError):
            future.result(timeout=60)
    with WorkerPool(cache, workers=1) as pool:
        pool.submit(one).result()
        assert pool.compiled == {one.key.digest}


def test_closing_a_pool_cancels_what_it_has_not_compiled(
    cache: DirectoryStore, fake: tuple[str, str], tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    pool = WorkerPool(cache, workers=1)
    jobs = (job(cache, name, f"sleep:{mark}", command=fake) for name in ("running", "waiting"))
    running, waiting = map(pool.submit, jobs)
    wait_for(mark.exists)
    pool.close()
    for future in (running, waiting):
        with pytest.raises(CancelledError):
            future.result(timeout=60)


def test_workers_are_bounded_by_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    for available, workers in ((0, 1), (3 * size_need(0).bytes, 3), (1 << 50, 16)):
        monkeypatch.setattr(pool, "_available_bytes", lambda found=available: found)
        assert default_workers() == workers


def remember(cache: DirectoryStore, program: str, seconds: float, peak_mb: int, on: Target) -> None:
    """Puts a compile of an older version of a program into the cache."""
    digest = cache.put_blob(b"executable")
    found = Compiled(
        Segment(0, 10, digest, 10, digest),
        (),
        Memory(1, 2, 3, 4),
        round(1000 * seconds),
        round(1000 * seconds),
        peak_bytes=peak_mb << 20,
    )
    key = Key("compile", f"{program}/{on.name}", (("portable", f"an older {program}"),))
    cache.put(key, found.to_plain(), blobs=[digest])


def order_of(
    cache: DirectoryStore, blocker: CompileJob, at: Path, jobs: list[CompileJob], **options: bool
) -> str:
    """The order in which the only worker compiles jobs that were submitted while it was busy."""
    done: list[str] = []
    with WorkerPool(cache, workers=1, **options) as workers:
        first = workers.submit(blocker)
        wait_for((at / "begun").exists)
        futures = [workers.submit(each) for each in jobs]
        for each, future in zip(jobs, futures, strict=True):
            future.add_done_callback(lambda _, name=each.program: done.append(name))
        (at / "go on").touch()
        for future in (first, *futures):
            future.result(60)
    return "".join(done)


@pytest.fixture
def blocker(cache: DirectoryStore, fake: tuple[str, str], tmp_path: Path) -> CompileJob:
    return job(cache, "first", f"meet:{tmp_path / 'begun'},{tmp_path / 'go on'}", command=fake)


def test_the_longest_job_does_not_run_last(
    cache: DirectoryStore, fake: tuple[str, str], tmp_path: Path, blocker: CompileJob
) -> None:
    """At the end it would run beside nothing."""
    for name, seconds in (("b", 3.0), ("c", 60.0), ("d", 9.0)):
        remember(cache, name, seconds, 100, HOST)
    # `a` is new, and small.
    jobs = [job(cache, name, f"ok:{name}", command=fake) for name in "abcd"]
    assert order_of(cache, blocker, tmp_path, jobs) == "cdba"


def test_jobs_of_a_shard_run_in_the_order_that_divides_them_among_machines(
    cache: DirectoryStore, fake: tuple[str, str], tmp_path: Path, blocker: CompileJob
) -> None:
    """All shards know the same times: each would take the longest job, and wait for the others."""
    remember(cache, "b", 60.0, 100, HOST)
    jobs = [job(cache, name, f"ok:{name}", command=fake) for name in "abc"]
    assert order_of(cache, blocker, tmp_path, jobs, in_order=True) == "abc"


def test_a_new_worker_is_started_only_for_a_job_that_is_worth_it(
    cache: DirectoryStore, fake: tuple[str, str], tmp_path: Path, blocker: CompileJob
) -> None:
    for name, seconds, on in (("a", 3.0, HOST), ("b", 3.4, V3), ("c", 5.0, V3), ("d", 0.5, HOST)):
        remember(cache, name, seconds, 100, on)
    jobs = [
        job(cache, name, f"ok:{name}", on, command=fake)
        for name, on in (("a", HOST), ("b", V3), ("c", V3), ("d", HOST))
    ]
    # `c` is worth it. Its worker goes on with `b`; then `a` is worth it.
    assert order_of(cache, blocker, tmp_path, jobs) == "cbad"


@pytest.mark.parametrize("peak_mb", [3000, 30_000])
def test_jobs_that_do_not_fit_together_never_run_together(
    cache: DirectoryStore,
    fake: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    peak_mb: int,
) -> None:
    """Also those that alone need more than the machine has: they must run, and beside nothing."""
    monkeypatch.setattr(pool, "_available_bytes", lambda: 6 << 30)
    beside: list[tuple[str, ...]] = []
    compile_really = WorkerProcess.compile

    def watch(
        self: WorkerProcess, source: Source, toolchain: Toolchain, seconds: float
    ) -> Compiled:
        beside.append(tuple(sorted(each.job.program for each in workers._running)))
        return compile_really(self, source, toolchain, seconds)

    monkeypatch.setattr(WorkerProcess, "compile", watch)
    jobs = []
    for number, name in enumerate("abc"):
        remember(cache, name, 9.0 - number, peak_mb, HOST)
        jobs.append(job(cache, name, f"count:{tmp_path / name}", command=fake))
    small = [job(cache, name, f"count:{tmp_path / name}", command=fake) for name in "xy"]
    with WorkerPool(cache, workers=3) as workers:
        assert len(results(workers, *jobs, *small)) == 5
    large = [sum(name in "abc" for name in each) for each in beside]
    assert max(large) == 1
    if peak_mb == 3000:
        assert max(map(len, beside)) > 1, "small ones fit beside a large one"
    else:
        assert all(len(each) == 1 for each in beside if set(each) & set("abc"))


def test_memory_that_somebody_else_takes_is_not_given_to_jobs(
    cache: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for available, free in ((8 << 30, 7 << 30), (1 << 30, 1 << 30)):
        monkeypatch.setattr(pool, "_available_bytes", lambda: 8 << 30)
        workers = WorkerPool(cache, workers=2)
        monkeypatch.setattr(pool, "_available_bytes", lambda found=available: found)
        one = job(cache, "a", "ok:")
        need = replace(need_of(cache, one), bytes=1 << 30)
        workers._running.add(pool._Attempt(one, Future(), need))
        assert workers._free_bytes() == free


def test_a_job_whose_worker_is_killed_runs_once_more_beside_nothing(
    cache: DirectoryStore, fake: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its estimate was too low, or another program took the memory."""
    mark, beside = tmp_path / "mark", list[tuple[str, ...]]()
    compile_really = WorkerProcess.compile

    def watch(
        self: WorkerProcess, source: Source, toolchain: Toolchain, seconds: float
    ) -> Compiled:
        beside.append(tuple(sorted(each.job.program for each in workers._running)))
        return compile_really(self, source, toolchain, seconds)

    monkeypatch.setattr(WorkerProcess, "compile", watch)
    greedy = job(cache, "greedy", f"greedy:{mark}", command=fake)
    others = [job(cache, f"p{n}", f"count:{tmp_path}/{n}", command=fake) for n in range(6)]
    with WorkerPool(cache, workers=2) as workers:
        found = results(workers, greedy, *others)
        assert len(workers.compiled) == len(found) == 7
    assert [each for each in beside if "greedy" in each][-1] == ("greedy",)
    assert len(beside) == 8, "each of the others once, and it twice"


def test_a_job_that_the_store_has_asks_for_no_history(
    cache: DirectoryStore, fake: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build that changes nothing must not pay for it."""
    jobs = [job(cache, name, "ok:", command=fake) for name in "ab"]
    first = run(cache, fake, *jobs)
    monkeypatch.setattr(pool, "need_of", lambda store, job: pytest.fail("it was asked for"))
    assert run(cache, fake, *jobs) == first


def test_a_frame_says_its_size_and_notices_every_flipped_bit() -> None:
    content = bytes(range(256)) * 8
    frame = compress(content)
    assert compress(content) == frame
    parameters = zstandard.get_frame_parameters(frame)
    assert (parameters.content_size, parameters.has_checksum) == (len(content), True)
    for at in range(len(frame)):
        damaged = bytearray(frame)
        damaged[at] ^= 1
        try:
            found = zstandard.ZstdDecompressor().decompress(bytes(damaged))
        except zstandard.ZstdError:
            continue
        assert found == content, at  # a bit that means nothing


def test_a_job_of_another_build_stops_no_other_job(
    cache: DirectoryStore, fake: tuple[str, str], tmp_path: Path
) -> None:
    """The only lane must not wait for the other build while it could compile something."""
    first, second = (job(cache, name, f"count:{tmp_path / name}", command=fake) for name in "ab")
    with WorkerPool(cache, workers=1) as pool:
        with cache.making(first.key):
            waiting = pool.submit(first)
            assert pool.submit(second).result(60)
            assert not waiting.done()
        assert waiting.result(60)
    assert pool.compiled == {first.key.digest, second.key.digest}


def test_a_job_of_another_build_ends_with_the_pool(
    cache: DirectoryStore, fake: tuple[str, str], tmp_path: Path
) -> None:
    """One that was tried, and put off, must not leave anybody waiting for it."""
    first, second = (job(cache, name, f"count:{tmp_path / name}", command=fake) for name in "ab")
    with cache.making(first.key):
        with WorkerPool(cache, workers=1) as pool:
            waiting = pool.submit(first)
            assert pool.submit(second).result(60)
        with pytest.raises(CancelledError):
            waiting.result(60)
