"""The worker pool: an error shows whatever happens to a worker, and costs no other program."""

import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import CancelledError
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import zstandard
from tests.extent import one_in
from tests.recipes import export
from tests.waiting import wait_for

from prejit.compiler.compile import pool, worker_process
from prejit.compiler.compile.compile_jobs import Compiled, CompileJob, Source, find_compiled
from prejit.compiler.compile.executor import collect, size_need
from prejit.compiler.compile.pool import WorkerPool, default_workers
from prejit.compiler.compile.worker_process import WorkerProcess
from prejit.compiler.progress import Plain
from prejit.compiler.store.build_cache_key import Key
from prejit.compiler.store.directory_store import DirectoryStore
from prejit.compiler.targets import cpu_count
from prejit.compiler.targets.build_host import jaxlib_version
from prejit.compiler.targets.target_table import target
from prejit.compiler.targets.toolchain import Toolchain, host_toolchain
from prejit.runtime.errors import BuildError, StoreError
from prejit.runtime.format.bundle_schema import Memory, Segment

VERSIONS = (("jax", "0.12.0"), ("jaxlib", "0.12.0"))
HOST, V3 = target("cpu-host"), target("cpu-x86-64-v3")
# A worker whose compiler does what its portable program says. Everything but XLA is real.
FAKE_WORKER = """
import ctypes, os, signal, sys, time
from pathlib import Path
from tests.waiting import wait_for
from prejit.compiler.compile.worker import worker_requests
from prejit.compiler.compile.worker.xla import CompiledProgram
from prejit.runtime.format.bundle_schema import Memory
from prejit.runtime.errors import BuildError
def compile_program(portable, machine):
    action, _, argument = portable.decode().partition(":")
    mark, *others = map(Path, argument.split(","))
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
    if action == "kill-worker":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    if action == "noise":
        os.write(1, b"{}\\nnot an answer")
        print("a warning of another program", file=sys.stderr)
    if action == "babble":
        answers.write(b"not an answer\\n")
        answers.flush()
        time.sleep(60)
    if action == "stop":  # neither it nor the process that waits for it ever does anything again
        os.kill(os.getppid(), signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
    if action == "nap":
        time.sleep(0.2)
    if action == "greedy" and not mark.exists():
        mark.touch()
        time.sleep(0.3)  # so that another program runs beside it
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "sleep" or action == "once" and not mark.exists():
        mark.write_text(f"{os.getpid()} {os.getppid()}")
        time.sleep(60)
    if action == "once":
        with others[0].open("a") as file:
            file.write("compiled\\n")
    if action == "meet":  # returns only if another program is compiled at the same time
        mark.touch()
        wait_for(others[0].exists)
    if action == "break-cache":
        mark.rename(argument + ".gone")
    return CompiledProgram(
        portable * 100, Memory(1, 2, 3, 4), (f"worker-{os.getppid()}", os.environ["XLA_FLAGS"])
    )
answers = open(os.dup(1), "wb")
worker_requests.import_compiler = lambda platform: None  # nothing here needs jaxlib
worker_requests.main(compile_program)
"""


@dataclass(frozen=True)
class Place:
    """A store, and jobs for the fake worker."""

    path: Path
    cache: DirectoryStore
    command: tuple[str, ...]

    def job(self, program, portable, on=HOST, *, real=False):
        """A job for a portable program, which is put into the store; `real`: for XLA itself."""
        digest = self.cache.put_blob(portable.encode() if isinstance(portable, str) else portable)
        key = Key("compile", f"{program}/{on.name}", (("portable", digest), ("target", on.name)))
        toolchain = Toolchain(on, self.command, VERSIONS)
        if real:
            toolchain = host_toolchain(on, {"jaxlib": jaxlib_version()})
        return CompileJob(program, toolchain, Source(digest, ()), key)

    def run(self, *jobs, **options):
        with WorkerPool(self.cache, **{"workers": 2, **options}) as workers:
            return results(workers, *jobs)


def results(workers, *jobs):
    return collect({(one.program, one.target.name): workers.submit(one) for one in jobs})


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    (tmp_path / "fake_worker.py").write_text(FAKE_WORKER)
    command = (sys.executable, str(tmp_path / "fake_worker.py"))
    return Place(tmp_path, DirectoryStore.open(tmp_path / "cache"), command)


def is_alive(process):
    """Whether a process runs; a zombie that nobody has waited for does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # it ended before the file was opened, or read
        return False


def test_a_real_program_is_compiled_for_each_target_and_runs(place):
    from prejit.runtime.device.device import Device
    from prejit.runtime.device.transfer import to_numpy

    program, x = export(lambda x: x * 2 + 1, np.zeros(8, np.float32)), np.arange(8, dtype="float32")
    jobs = [place.job("f", program, on, real=True) for on in (HOST, V3)]
    found = place.run(*jobs)
    assert set(found) == {("f", "cpu-host"), ("f", "cpu-x86-64-v3")}
    device = Device()
    for result in found.values():
        segment = result.executable
        frame = place.cache.read_blob(segment.digest)
        serialized = zstandard.ZstdDecompressor().decompress(frame)
        assert (len(frame), len(serialized)) == (segment.size, segment.raw_size)
        (y,) = device.load(serialized, "f").run([device.put(x)])
        np.testing.assert_array_equal(to_numpy(y), x * 2 + 1)
        assert "sse2" in result.cpu_features or "avx" in result.cpu_features
        assert result.memory.argument_bytes == 32
    assert "avx512f" not in found["f", "cpu-x86-64-v3"].cpu_features
    # A build that changes nothing compiles nothing: no worker could be started with this command.
    gone = [replace(j, toolchain=replace(j.toolchain, command=("/nonexistent",))) for j in jobs]
    assert place.run(*gone) == found
    place.cache.put(jobs[0].key, {"executable": "of an older prejit"})
    assert find_compiled(place.cache, jobs[0].key) is None


def test_a_program_is_split_for_the_cpus_of_its_target(tmp_path, place):
    """They decided into how many parts loops are split, and in which order kernels are in the file."""
    import jax
    import jax.numpy as jnp

    def program(x):
        y = x
        for _ in range(20):
            y = y * y * 0.5 - x * y + 1.25  # enough for a part on every CPU
        z = jax.nn.softmax(x @ x) + jnp.sin(x).T @ x[:, :1]
        return y, jnp.tanh(x), jnp.sum(jnp.sin(x), axis=0), z

    portable = export(program, jax.ShapeDtypeStruct((1024, 1024), "float32"))
    host, found = os.sched_getaffinity(0), []
    for number, cpus in enumerate(({min(host)}, host)):
        here = replace(place, cache=DirectoryStore.open(tmp_path / f"cache {number}"))
        on = [HOST, *(replace(HOST, name=f"cpus-{n}", cpus=n) for n in (1, 100))]
        os.sched_setaffinity(0, cpus)
        try:
            done = here.run(*(here.job("p", portable, each, real=True) for each in on))
        finally:
            os.sched_setaffinity(0, host)
        found.append([each.executable.digest for each in done.values()])
    assert found[0] == found[1]
    assert len(set(found[0])) == 3
    assert cpu_count.seen_by_xla(HOST.cpus) == HOST.cpus, "without this, cores are in the key"


def test_without_a_filter_a_process_gives_up_cpus(monkeypatch):
    """A build for fewer CPUs than the host has is exact, and none is for other CPUs than its key."""
    monkeypatch.setattr(cpu_count, "_can_answer", lambda: False)
    host = os.sched_getaffinity(0)
    assert cpu_count.seen_by_xla(1) == 1
    assert cpu_count.seen_by_xla(len(host) + 1) == len(host)
    try:
        cpu_count.show(1, None)
        assert len(os.sched_getaffinity(0)) == 1
        with pytest.raises(BuildError, match=r"expected XLA to see 2 CPUs .* sees 1") as caught:
            cpu_count.show(2, None)
        assert "cpus = 1" in str(caught.value.hint)
    finally:
        os.sched_setaffinity(0, host)


KILLED = "its worker was killed by "
BAD = {
    "babble": ("babble:", [f"{KILLED}SIGKILL"]),
    "crash": ("crash:", [f"{KILLED}SIGSEGV"]),
    "exit": ("exit:7", ["its worker ended with exit code 7", "| noise", "| what went wrong"]),
    "kill": ("kill-worker:", [f"{KILLED}SIGKILL"]),
    "raise": ("raise:", ["XLA does not like it"]),
    "signal": ("signal:6", [f"{KILLED}SIGABRT", "| the last words"]),
}


def test_a_bad_program_costs_no_other(place, monkeypatch):
    monkeypatch.setattr(worker_process, "_ANSWER_SECONDS", 0.1)
    start = time.monotonic()
    good = [place.job(f"good{n}", f"noise:{n}", on) for n in range(2) for on in (HOST, V3)]
    bad = [place.job(name, portable, V3) for name, (portable, _) in BAD.items()]
    with pytest.raises(BuildError) as caught:
        place.run(good[0], *bad, *good[1:])
    assert time.monotonic() - start < 100  # forks that sleep for 60 s died with their workers
    assert all(place.cache.get(one.key, verify=True) for one in good)
    assert not any(place.cache.get(one.key) for one in bad)
    first, *parts = re.split(r"\n  (?=\w+ for cpu-x86-64-v3: )", str(caught.value))
    assert first == "6 of 10 programs did not compile"
    for part, (name, (_, lines)) in zip(parts, BAD.items(), strict=True):
        said, fatal, stack = part.partition("\n      | Fatal Python error: ")
        head, *rest = [line.strip() for line in said.splitlines()]
        assert [head, *rest] == [f"{name} for cpu-x86-64-v3: {lines[0]}", *lines[1:]]
        assert bool(fatal) == (name in ("crash", "signal"))
        assert not fatal or " in compile_program\n" in f"{stack}\n"
        assert len(stack.splitlines()) <= 15
    assert "a warning of another program" not in str(caught.value)
    hint = str(caught.value.hint)
    assert hint.endswith("4 finished and stay cached")
    assert all(x in hint for x in ("change it", "more memory than this machine has", "XLA crashed"))


def test_a_store_or_worker_without_use_is_told(place, monkeypatch):
    nowhere = replace(place, command=("/nonexistent",))
    with pytest.raises(BuildError, match="3 of 3 programs") as caught:
        place.run(*(nowhere.job(f"p{n}", f"ok:{n}") for n in range(3)))
    assert str(caught.value).count("cannot start a worker process, /nonexistent") == 3
    damaged, breaks = place.job("a", "ok:"), f"break-cache:{place.cache.root}/v1/temp"
    place.cache.blob_path(damaged.source.program).write_bytes(b"damaged")
    with pytest.raises(BuildError, match="expected sha256:"):
        place.run(damaged)
    with pytest.raises(StoreError, match="cannot write the build cache"):
        place.run(place.job("b", breaks))
    monkeypatch.setenv("XLA_FLAGS", "--xla_no_such_flag=1")
    whole = replace(place, cache=DirectoryStore.open(place.path / "another"))
    with pytest.raises(BuildError, match=r"Unknown flags? in XLA_FLAGS: --xla_no_such_flag=1"):
        whole.run(whole.job("f", b"whatever", real=True))


def test_jobs_come_while_others_run(place, capsys):
    a, b = place.path / "a", place.path / "b"
    with (
        Plain(sys.stderr, heartbeat_seconds=0.05) as progress,
        WorkerPool(place.cache, workers=2, progress=progress) as workers,
    ):
        first = workers.submit(place.job("a", f"meet:{a},{b}"))
        wait_for(a.exists)
        time.sleep(0.2)
        second = workers.submit(place.job("b", f"meet:{b},{a}"))
        first.result(60)
        second.result(60)
        workers.submit(place.job("c", "ok:")).result(60)
        assert len(workers.compiled) == 3
    out, err = capsys.readouterr()
    assert re.search(r"^still compiling a for cpu-host \(\d+ s\); 0/1$", err, re.MULTILINE)
    assert err.splitlines()[-1].startswith("compiled c for cpu-host in ")
    assert out == ""


BUILD = """
import signal, sys
from pathlib import Path
from tests.unit.compiler.compile.test_pool import DirectoryStore, Place
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
root, command, *portables = sys.argv[1:]
place = Place(Path(root), DirectoryStore.open(Path(root)), (sys.executable, command))
jobs = [place.job(portable, portable) for portable in portables]
place.run(*jobs, workers=len(jobs))
"""


def building(place, *portables):
    command = [sys.executable, "-c", BUILD, str(place.cache.root), place.command[1], *portables]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("number", one_in(2, [signal.SIGKILL, signal.SIGINT]))
def test_no_worker_outlives_its_build(place, number):
    marks = [place.path / "a", place.path / "b"]
    build = building(place, *(f"sleep:{mark}" for mark in marks))
    wait_for(lambda: all(mark.exists() and mark.read_text() for mark in marks))
    processes = [int(text) for mark in marks for text in mark.read_text().split()]
    assert all(map(is_alive, processes))
    build.send_signal(number)
    _, errors = build.communicate(timeout=60)
    if number == signal.SIGINT:
        assert errors.rstrip().endswith("KeyboardInterrupt")
    wait_for(lambda: not any(map(is_alive, processes)))
    assert list((DirectoryStore.open(place.cache.root).root / "v1" / "temp").iterdir()) == []


def test_a_worker_that_does_not_answer_is_killed_at_the_time_limit(place):
    mark = place.path / "mark"
    late = [place.job("sleep", f"sleep:{mark}", V3), place.job("stop", "stop:", V3)]
    with pytest.raises(BuildError) as caught:
        place.run(*late, place.job("good", "ok:", V3), timeout_seconds=3.0)
    said = "for cpu-x86-64-v3: its worker did not answer within 3 s and was killed"
    lines = ["2 of 3 programs did not compile", f"  sleep {said}", f"  stop {said}"]
    assert str(caught.value).splitlines() == lines
    assert "--timeout SECONDS" in str(caught.value.hint)
    wait_for(lambda: not any(is_alive(int(text)) for text in mark.read_text().split()))


def test_a_worker_may_die_while_it_measures(place):
    large = [{"executable": "x" * (1 << 20)}]  # more than a pipe holds
    ends = "import sys; sys.stdin.readline(); sys.exit('no such thing')"
    said = "target cpu-host: cannot measure its programs on this machine: its worker "
    for code, seconds, reason in (
        (ends, 60.0, "    | no such thing"),
        ("import time; time.sleep(60)", 1.0, "did not answer within 1 s and was killed"),
    ):
        toolchain = Toolchain(HOST, (sys.executable, "-c", code), VERSIONS)
        with WorkerProcess(toolchain, place.cache, os.environ) as worker:
            for part in (reason, ""):  # it is gone the second time
                with pytest.raises(BuildError) as caught:
                    worker.measure(large, Path("weights"), None, seconds)
                assert str(caught.value).startswith(said)
                assert part in str(caught.value)
                assert caught.value.hint


def test_a_build_that_is_killed_leaves_its_program_to_those_that_wait(place):
    mark, count = place.path / "mark", place.path / "count"
    text = f"once:{mark},{count}"  # it sleeps the first time that it is compiled
    first = building(place, text)
    wait_for(mark.exists)
    second = building(place, text)
    time.sleep(0.5)
    assert second.poll() is None, "it waits for the first"
    first.kill()
    first.communicate()
    second.communicate(timeout=60)
    assert second.returncode == 0
    assert count.read_text() == "compiled\n"


def test_closing_a_pool_cancels_what_runs_and_what_waits(place):
    mark, workers = place.path / "mark", WorkerPool(place.cache, workers=1)
    futures = [workers.submit(place.job(name, f"sleep:{mark}")) for name in ("runs", "waits")]
    wait_for(mark.exists)
    workers.close()
    for future in futures:
        with pytest.raises(CancelledError):
            future.result(timeout=60)


def test_a_job_of_another_build_stops_no_other_job_and_ends_with_the_pool(place):
    """The only lane must not wait for the other build while it could compile something."""
    first, second, third = (place.job(name, f"ok:{name}") for name in "abc")
    with place.cache.making(first.key) as held:
        assert held
        for others in ((), (second,)):  # nothing else is there to do; it is tried, and put off
            with WorkerPool(place.cache, workers=1) as workers:
                waiting = workers.submit(first)
                time.sleep(0.2)
                assert all(workers.submit(other).result(60) for other in others)
            with pytest.raises(CancelledError):
                waiting.result(60)
    with WorkerPool(place.cache, workers=1) as workers:
        with place.cache.making(first.key):
            waiting = workers.submit(first)
            assert workers.submit(third).result(60)
            assert not waiting.done()
        assert waiting.result(60)
    assert workers.compiled == {first.key.digest, third.key.digest}


def test_a_small_machine_has_fewer_workers_than_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    for available, workers in ((0, 1), (3 * size_need(0).bytes, 3), (1 << 50, 16)):
        monkeypatch.setattr(pool, "_available_bytes", lambda found=available: found)
        assert default_workers() == workers


def remember(place, program, seconds, peak_mb):
    """Puts a compile of an older version of a program into the cache."""
    digest, time_ms = place.cache.put_blob(b"executable"), round(1000 * seconds)
    segment, memory = Segment(0, 10, digest, 10, digest), Memory(1, 2, 3, 4)
    found = asdict(Compiled(segment, (), memory, time_ms, time_ms, peak_mb << 20))
    key = Key("compile", f"{program}/cpu-host", (("portable", f"an older {program}"),))
    place.cache.put(key, found, blobs=[digest])


@pytest.fixture
def beside(monkeypatch):
    """Gets, for each compile that begins, the programs that are compiled then."""
    found, pools = [], set()
    compile_really, lane_begins = WorkerProcess.compile, WorkerPool._run_lane

    def run_lane(self):
        pools.add(self)
        lane_begins(self)

    def watch(self, *request):
        [only] = pools
        found.append(tuple(sorted(each.job.program for each in only._running)))
        return compile_really(self, *request)

    monkeypatch.setattr(WorkerPool, "_run_lane", run_lane)
    monkeypatch.setattr(WorkerProcess, "compile", watch)
    return found


@pytest.mark.parametrize("peak_mb", [3000, 30_000])
def test_jobs_that_do_not_fit_together_never_run_together(place, monkeypatch, beside, peak_mb):
    """Also those that alone need more than the machine has: they must run, and beside nothing."""
    monkeypatch.setattr(pool, "_available_bytes", lambda: 6 << 30)
    for number, name in enumerate("ab"):
        remember(place, name, 9.0 - number, peak_mb)
    jobs = [place.job(name, f"nap:{name}") for name in "abxy"]
    assert len(place.run(*jobs, workers=3)) == 4
    assert max(sum(name in "ab" for name in each) for each in beside) == 1
    if peak_mb == 3000:
        assert max(map(len, beside)) > 1, "small ones fit beside a large one"
    else:
        assert all(len(each) == 1 for each in beside if set(each) & set("ab"))


def test_a_killed_job_runs_again_alone(place, beside):
    """Its estimate was too low, or another program took the memory."""
    greedy = place.job("greedy", f"greedy:{place.path / 'mark'}")
    others = [place.job(f"p{n}", f"nap:{n}") for n in range(4)]
    with WorkerPool(place.cache, workers=2) as workers:
        found = results(workers, greedy, *others)
        assert len(workers.compiled) == len(found) == 5
    assert [each for each in beside if "greedy" in each][-1] == ("greedy",)
    assert len(beside) == 6, "each of the others once, and it twice"
