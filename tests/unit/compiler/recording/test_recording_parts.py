"""What a recording keeps, and how recordings merge."""

import atexit
import dataclasses
import gc
import hashlib
import json
import logging.handlers
import signal
import subprocess
import sys
import tempfile
import warnings
import zlib
from pathlib import Path

import pytest
import zstandard
from tests.layouts import GOLDEN

from prejit.compiler.pipeline.pack.bundle_files import assemble
from prejit.compiler.pipeline.pack.bundle_writing import write_layout
from prejit.compiler.recording import jax_cache_packing as packing
from prejit.compiler.recording.hook import process_watch, trace_effects
from prejit.compiler.recording.hook.call_recorder import executable_json
from prejit.compiler.recording.jax_cache_packing import collect, merged, packed, read_targets
from prejit.runtime.errors import RejectError, UsageError
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.recorded.hook import input_facts
from prejit.runtime.recorded.hook.kept_shardings import NotKeptError
from prejit.runtime.recorded.watched_command import JaxRequest, WatchedProcess

MACHINE = Fingerprint("cpu", "x86_64", ("avx2", "sse"), "1.2.3", "", 1, 1)
GPU = dataclasses.replace(
    MACHINE,
    **{"platform": "cuda", "plugin": "jax-cuda13-pjrt 1.2.3", "cuda": "13.0", "driver": "580.1"},
    **{"device_kind": "NVIDIA L4", "compute_capability": "8.9", "device_count": 2},
    device_memory_bytes=1 << 34,
)


def key_of(name):
    return f"{name}-{hashlib.sha256(name.encode()).hexdigest()}"


def file_of(name):
    return f"{key_of(name)}-cache"


def request(name, **more):
    made = {
        **{"name": name, "key": key_of(name), "outcome": "miss", "seconds": 0.1},
        **{"saved_seconds": None, "arguments": ("float32[8]",), "where": "serve.py:7"},
        **{"ingredients": {"computation": "0" * 64}, "conditions": {"platform": "cpu"}},
        **{"not_kept": None, "call": None},
    }
    return JaxRequest(**{**made, **more})


def process(*requests, jaxlib="1.2.3"):
    return WatchedProcess({"jax": "1", "jaxlib": jaxlib, "python": "3"}, None, requests)


def put(cache, name, content=None):
    content = zstandard.compress(name.encode() * 50) if content is None else content
    (cache / file_of(name)).write_bytes(content)
    return content


def test_files_go_to_the_target_of_the_process_that_made_them(tmp_path):
    contents = [put(tmp_path, name) for name in ("jit_a", "jit_b", "jit_c")]
    (tmp_path / "something else").write_text("")
    why = "Not writing persistent cache entry for 'jit_d' because it uses host callbacks"
    processes = [
        process(request("jit_a"), request("jit_d", not_kept=why)),
        process(request("jit_b"), jaxlib="4.5.6"),
    ]
    targets, left_out = collect(tmp_path, processes, MACHINE, known=())
    [first] = [target for target in targets if target.requirement.jaxlib == "1.2.3"]
    found = {target.requirement.jaxlib: sorted(target.programs) for target in targets}
    # No process reported of jit_c: it is of this machine's own jaxlib.
    assert found == {"1.2.3": [file_of("jit_a"), file_of("jit_c")], "4.5.6": [file_of("jit_b")]}
    assert left_out == (f"jit_d at serve.py:7: {why}",)
    entries = [file.entry for file in first.programs.values()]
    found = [(entry.name, entry.arguments) for entry in entries]
    assert found == [("jit_a", ("float32[8]",)), ("jit_c", None)]
    assert [each.content() for each in first.programs.values()] == [contents[0], contents[2]]
    # Files that were there before are not recorded again.
    known = {file for target in targets for file in target.programs}
    assert collect(tmp_path, [], MACHINE, known=known) == ((), ())


def test_a_torn_file_is_left_out(tmp_path):
    for compress in (zstandard.compress, zlib.compress):
        content = compress(b"what a program is" * 9)
        for damaged in (content + b"rest", content[:-3], b""):
            put(tmp_path, "jit_whole", content)
            put(tmp_path, "jit_torn", damaged)
            ([target], [reason]) = collect(tmp_path, [], MACHINE, known=())
            assert [file.entry.name for file in target.programs.values()] == ["jit_whole"]
            assert reason.startswith("jit_torn-")
            assert "record again" in reason


def test_a_recording_requires_what_jax_does_not_compare_and_has_a_name(tmp_path, monkeypatch):
    def of(machine, **more):
        return packing.requirement_of(process(), request("jit_a", **more), machine)

    needs, on_gpu = of(MACHINE), of(GPU, conditions={"platform": "gpu"})
    assert (needs.platform, needs.cpu_features, needs.jaxlib) == ("cpu", ("avx2", "sse"), "1.2.3")
    expected = ("cuda", "NVIDIA L4", "jax-cuda13-pjrt 1.2.3")
    assert (on_gpu.platform, on_gpu.device_kind, on_gpu.plugin) == expected
    for found in (needs, on_gpu):
        left = (found.xla_flags, found.environment, found.device_count, found.driver)
        assert left == (None, None, None, None)
    assert of(GPU) == needs
    for command, name in (
        ("python serve.py --port 80", "serve"),
        ("python -m my_package.My_Server", "my-server"),
        ("/usr/bin/gunicorn serve:app", "gunicorn"),
        ("./Start.sh", "start"),
        ("python ---.py", "recorded"),
    ):
        assert packing.default_name(command.split()) == packing.bundle_name(name) == name
    monkeypatch.chdir(tmp_path)
    name = packing.bundle_name(tmp_path.name)
    assert packing.name_at(Path()) == packing.name_at(tmp_path) == name


def target_with(at, *names, jaxlib="1.2.3"):
    at.mkdir(exist_ok=True)
    for old in at.iterdir():
        old.unlink()
    for name in names:
        put(at, name)
    found = process(*map(request, names), jaxlib=jaxlib)
    ([target], _) = collect(at, [found], MACHINE, known=())
    return target


def assembled(targets):
    return assemble("b", [packed(target, "b") for target in targets])


def test_recordings_are_merged_and_read_back(tmp_path):
    first = target_with(tmp_path / "cache", "jit_a", "jit_b")
    second = target_with(tmp_path / "cache", "jit_b", "jit_c")
    other = target_with(tmp_path / "cache", "jit_a", jaxlib="4.5.6")
    one, two = merged([first], [second, other]), merged([other], [second, first])
    assert [sorted(target.programs) for target in one] == [
        [file_of(name) for name in ("jit_a", "jit_b", "jit_c")],
        [file_of("jit_a")],
    ]
    assert assembled(one) == assembled(two)
    targets = merged([], [target_with(tmp_path / "cache", "jit_a", "jit_b")])
    write_layout(tmp_path / "b", *assembled(targets))
    assert assembled(read_targets(tmp_path / "b")) == assembled(targets)
    assert read_targets(tmp_path / "nothing") == ()
    # A first writer whose disk was full, or that was killed: the next one may write there.
    unfinished = tmp_path / "unfinished"
    (unfinished / "blobs" / "sha256").mkdir(parents=True)
    (unfinished / ".index.json.1.ab.tmp").touch()
    assert read_targets(unfinished) == ()
    (unfinished / "notes.txt").touch()  # no bundle's: nothing is written beside it
    with pytest.raises(RejectError):
        read_targets(unfinished)
    with pytest.raises(UsageError, match="found one of `prejit build`"):
        read_targets(GOLDEN / "chunks")


def watched(tmp_path, code, paths=("/etc/passwd",), **env):
    """Return by the name of its module what a code reads of variables and these paths, and its effects."""
    (tmp_path / "watched.py").write_text(
        "import importlib.util, json, os, sys\n"
        "def load(path):\n"
        "    spec = importlib.util.spec_from_file_location('part', path)\n"
        "    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))\n"
        "    return module\n"
        f"watch = load({process_watch.__file__!r})\n"
        f"watch.start([], load({input_facts.__file__!r}))\n"
        f"exec({code!r}, {{'os': os, 'watch': watch.watch, '__name__': sys.argv[1]}})\n"
        "read = {n: v for k, n, v in watch.watch.taken() if k == 'variables' or n in sys.argv}\n"
        "print(json.dumps([read, watch.watch.effects]))\n"
    )
    found = {}
    for name in ("own", "tqdm.utils"):
        command = (sys.executable, "-I", tmp_path / "watched.py", name, *paths)
        found[name] = json.loads(subprocess.check_output(command, env=env))
    return found


def test_code_that_lists_all_variables_reads_them_unless_its_prefix_is_known(tmp_path):
    def read(code, **env):
        return {name: found[0] for name, found in watched(tmp_path, code, **env).items()}

    env = {"A": "1", "TQDM_B": "2", "LC_ALL": "C.UTF-8", "_": "x"}
    listed = {"=": ["A", "TQDM_B"], "A": "1", "TQDM_B": "2", "LC_ALL": "C.UTF-8"}
    prefixed = {"TQDM_=": ["TQDM_B"], "TQDM_B": "2"}
    assert read("dict(os.environ.items())", **env) == {"own": listed, "tqdm.utils": prefixed}
    thread = "import _thread, time; _thread.start_new_thread(list, (os.environ,)); time.sleep(0.2)"
    other = "def of(prefix): return [k for k, v in os.environ.items()]\nof('APP_')"
    names = {"=": ["A", "TQDM_B"]}
    for code, module, expected in (
        ("{**os.environ}", "own", listed),
        ("[*os.environ]", "own", names),
        (thread, "tqdm.utils", names),
        (other, "tqdm.utils", listed),
        ("len(os.environ)", "own", names),
        ("os.getenvb(b'A')", "own", {"A": "1"}),
        ("import subprocess; subprocess.run(['true'])", "own", {"PATH": None}),
        ("os.environ['A']; os.environ.copy()", "tqdm.utils", {"A": "1"}),
    ):
        assert read(code, **env)[module] == expected, code
    beside = (  # a thread that is inside the watch hides nothing of another one
        "import threading, time\n"
        "watch._change['listings'] = lambda path: time.sleep(0.4)\n"
        "threading.Thread(target=os.listdir, args=('/',)).start()\n"
        "time.sleep(0.1), open('/etc/passwd').close()"
    )
    assert [*read(beside, **env)["own"]] == ["/etc/passwd"]


def test_what_code_asks_of_paths_without_an_event_is_noted(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").touch()
    (tmp_path / "now").symlink_to("real")
    now, file = str(tmp_path / "now"), str(tmp_path / "real" / "file")
    code = (
        f"os.path.realpath({now!r}), os.access({file + 'x'!r}, os.R_OK)\n"
        f"os.path.lexists({file + 'y'!r})\n"
        f"directory = os.open({str(tmp_path / 'real')!r}, os.O_RDONLY)\n"
        "os.close(os.open('file', os.O_RDONLY, dir_fd=directory))\n"
        "assert os.stat in os.supports_dir_fd and os.stat(0)\n"
    )
    read, effects = watched(tmp_path, code, (now, file, file + "x", file + "y"))["own"]
    assert read == {now: "real", file + "x": 0, file + "y": 0, file: input_facts.identity_of(file)}
    assert effects is None


def test_what_a_trace_asks_of_the_process_is_an_effect(tmp_path):
    code = (
        "os.cpu_count(), os.write(2, b'')\n"
        "watch.effects = []\n"
        "os.cpu_count(), os.sched_getaffinity(0), os.write(2, b''), os.uname(), os.chdir('.')\n"
        "try: import no_such_module\n"
        "except ImportError: import colorsys\n"
    )
    read, effects = watched(tmp_path, code, ("no_such_module", "colorsys"))["own"]
    calls = ("cpu_count", "sched_getaffinity", "write", "uname", "chdir")
    assert (read, effects) == ({"no_such_module": None}, [f"os.{call}" for call in calls])


def test_what_each_trace_reads_is_noted_again(tmp_path):
    """Else a run would not see that a file has changed since the trace before."""
    twice = "open('/etc/passwd').close(), watch.taken(), open('/etc/passwd').close()\n"
    for first, expected in (("", []), ("watch.effects = []\n", ["/etc/passwd"])):
        assert [*watched(tmp_path, first + twice)["own"][0]] == expected


def test_packages_and_files_that_code_asks_for_without_an_import_are_noted(tmp_path):
    (tmp_path / "one-1.0.dist-info").mkdir()
    place, shared, base = str(tmp_path), "/dev/shm/prejit_no_such_file", str(tmp_path / "a b")
    code = (
        "import importlib.metadata, importlib.util, sqlite3\n"
        "importlib.util.find_spec('no_such_module'), importlib.util.find_spec('colorsys')\n"
        f"[*importlib.metadata.distributions(path=[{place!r}])], os.path.exists({shared!r})\n"
        f"sqlite3.connect('file:{tmp_path}/a%20b?mode=rwc', uri=True)\n"
    )
    absent = ("no_such_module", base, base + "-wal")
    read, _ = watched(tmp_path, code, (*absent, "colorsys", place, shared))["own"]
    expected = {place: input_facts.packages_digest(place), shared: 0}
    assert read == {**dict.fromkeys(absent), **expected}


def test_traces_in_threads_miss_no_effect_of_one_another(monkeypatch, capsys):
    first, second = (trace_effects.TraceEffects(len) for _ in range(2))
    assert first.found() is None
    print("from the second")
    assert second.found() == "its trace writes to stdout"
    assert "write" not in vars(sys.stdout)


def warned(record):
    with warnings.catch_warnings(record=record):
        warnings.simplefilter("always")
        warnings.warn("slow", stacklevel=1)


class Tee:
    """A stream that people set as sys.stdout, so that a file gets all that is printed, too."""

    def __init__(self, stream):
        object.__setattr__(self, "stream", stream)

    def write(self, text):
        self.stream.write(text)


class Elsewhere(Tee):
    """A stream like tqdm's, whose attributes are those of another one."""

    def __setattr__(self, name, value):
        setattr(self.stream, name, value)


@pytest.mark.parametrize("wrapped", [lambda stream: stream, Tee, Elsewhere])
@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_what_a_trace_writes_is_seen_on_its_way_out(name, wrapped, monkeypatch, tmp_path):
    with (tmp_path / "file").open("w") as file:
        monkeypatch.setattr(sys, f"__{name}__", file)
        monkeypatch.setattr(sys, name, wrapped(file))
        for does in (
            lambda: getattr(sys, name).write("a"),
            lambda: print("a", file=getattr(sys, f"__{name}__")),
            lambda: getattr(sys, f"__{name}__").buffer.write(b"a"),
        ):
            effects = trace_effects.TraceEffects(len)
            does()
            assert effects.found() == f"its trace writes to {name}"
        assert trace_effects.TraceEffects(len).found() is None
        assert not any("write" in vars(each) for each in (file, file.buffer))


@pytest.mark.parametrize(
    ("does", "found"),
    [
        (lambda: logging.getLogger("mine").error("traced"), "its trace logs"),
        (lambda: logging.getLogger("jax._src.pjit").error("traced"), None),
        (lambda: logging.getLogger("mine").debug("unseen"), None),
        (lambda: warnings.warn("slow", stacklevel=1), "its trace warns"),
        (lambda: warned(record=True), None),
        (lambda: sys.setrecursionlimit(9999), "its trace changes the limit of recursion"),
        (lambda: signal.signal(signal.SIGUSR2, print), "its trace changes the handlers of signals"),
        (lambda: warnings.simplefilter("once"), "its trace changes the filters of warnings"),
        (lambda: logging.getLogger("new"), None),
        (
            lambda: logging.getLogger("mine").setLevel(logging.ERROR),
            "its trace changes the levels and handlers of loggers",
        ),
        (lambda: sys.argv.append("-v"), "its trace changes sys.argv"),
        (lambda: setattr(sys, "excepthook", print), "its trace changes an attribute of sys"),
        (gc.disable, "its trace changes whether garbage is collected"),
        (lambda: atexit.register(len, ()), "its trace registers a function for the exit"),
    ],
)
def test_what_a_trace_logs_and_warns_and_sets_is_seen(does, found):
    """People log in a function how often jax traces it; only a handler's file, or a list, has that."""
    handler = logging.handlers.BufferingHandler(100)
    loggers = [logging.getLogger(name) for name in ("mine", "jax._src.pjit")]
    arguments, hook = [*sys.argv], sys.excepthook
    before = sys.getrecursionlimit(), signal.getsignal(signal.SIGUSR2), logging.Handler.handle
    for logger in loggers:
        logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            effects = trace_effects.TraceEffects(len)
            does()
            assert effects.found() == found
    finally:
        gc.enable()
        sys.argv[:], sys.excepthook = arguments, hook
        loggers[0].setLevel(logging.NOTSET)
        atexit.unregister(len)
        sys.setrecursionlimit(before[0])
        signal.signal(signal.SIGUSR2, before[1])
        for logger in loggers:
            logger.removeHandler(handler)
    assert logging.Handler.handle is before[2]


def test_a_program_that_changes_a_reference_is_not_described():
    import jax

    def change(ref, x):
        ref[...] = x
        return x

    x = jax.numpy.ones(3)
    executable = jax.jit(change).lower(jax.new_ref(x), x).compile()._executable
    with pytest.raises(NotKeptError, match="it changes a reference of jax"):
        executable_json(executable)
    assert executable_json(jax.jit(lambda x: x).lower(x).compile()._executable)["outputs"]


def test_a_listing_counts_with_its_order_inside_a_trace(tmp_path):
    listed = tmp_path / "listed"
    listed.mkdir()
    for name in "bca":
        (listed / name).touch()
    digests = {"None": input_facts.listing_digest, "[]": input_facts.order_digest}
    for effects, digest in digests.items():
        code = f"watch.effects = {effects}; os.listdir({str(listed)!r})"
        read, _ = watched(tmp_path, code, (str(listed),))["own"]
        assert read == {str(listed): digest(listed)}, effects


def test_shared_memory_that_a_trace_maps_is_noted(tmp_path):
    with tempfile.NamedTemporaryFile(dir=input_facts.FILES_OF_MEMORY) as file:
        file.write(b"shared")
        file.flush()
        for effects, expected in (
            ("None", {}),
            ("[]", {file.name: input_facts.identity_of(file.name)}),
        ):
            code = (
                "import _posixshmem, mmap\n"
                f"watch.effects = {effects}\n"
                f"opened = _posixshmem.shm_open({Path(file.name).name!r}, os.O_RDONLY, 0o600)\n"
                "mmap.mmap(opened, 0, access=mmap.ACCESS_READ)\n"
            )
            assert watched(tmp_path, code, (file.name,))["own"][0] == expected
