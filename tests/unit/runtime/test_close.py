"""`Bundle.close`: memory, files and threads are given back, and a closed bundle says that it is closed."""

import contextlib
import copy
import json
import pickle

import numpy as np
import pytest
from tests.threads import in_threads

from prejit.compiler import Program
from prejit.runtime import Bundle, ClosedError, jit, load
from prejit.server.engine.engine import Engine

PROMPT = [1, 2, 3]

X, PIXELS = np.ones(4, "f"), np.zeros((2, 2, 3), "u1")
METHODS = {
    **dict.fromkeys(("generate", "stream", "prefix", "request"), (PROMPT,)),
    **dict.fromkeys(("session", "sleep", "wake", "prepare", "report", "start_report"), ()),
    **dict.fromkeys(("check_answers", "wrong_answers", "device_memory_bytes"), ()),
    **dict.fromkeys(("call", "call_async", "call_on_device", "bind"), ("f", X)),
    **dict.fromkeys(("embed_images", "score_images"), (PIXELS,)),
    **{"generate_n": (PROMPT, 2), "generate_batch": ([PROMPT],), "batch": (1,)},
    **{"apply_chat_template": ([],), "encode": ("a",), "encode_batch": (["a"],)},
    **{"score": ("a", ["b"]), "call_by_path": ("f", {(0,): X})},
}
"""Each method with arguments."""
PROPERTIES = {"decoder", "tokenizer", "has_tokenizer", "adapters", "image_labels", "on_jax"}
PROPERTIES |= {"generator", "user_programs", "dispatched", "text"}


@pytest.fixture(scope="module")
def functions_dir(build_programs):
    weights = np.arange(4.0, dtype="f")
    return build_programs(Program("f", lambda w, x: x * w, ["float32[4]"], params=weights))


def test_a_closed_bundle_says_that_it_is_closed(decoder_dir):
    bundle = load(decoder_dir)
    bundle.close()

    def ask(name):
        found = getattr(bundle, name)
        if name in METHODS:
            found = found(*METHODS[name])
        return list(found)  # a generator says it at its first value

    for name in (*METHODS, *PROPERTIES):
        try:
            with pytest.raises(ClosedError, match=r"^decoder: expected an open bundle, found one"):
                ask(name)
        except BaseException as error:
            error.add_note(name)
            raise
    with pytest.raises(ClosedError, match=r"^decoder: expected an open bundle, found one"):
        Engine(bundle)
    assert bundle.name == "decoder"
    # A new method must be closed too.
    others = {
        "close",
        "close_first",
        "defaults",
        "encoder",
        "images",
        "has_chat_template",
        "finish",
    }
    others |= {"render_chat_template", "runner_with_zeros", "check_finite", "timed_runner"}
    others |= {"watch_runs", "hlo_modules"}
    assert {n for n in dir(Bundle) if not n.startswith("_")} == {*METHODS} | PROPERTIES | others


_FORKING = """
import os, sys
import numpy as np
from prejit.runtime import ClosedError, load
from prejit.server import Engine
path, x = sys.argv[1], np.ones(4, np.float32)
bundle = load(path)
bound, engine = bundle.bind("f", x), Engine(bundle)
expected = [float(call("f", x).sum()) for call in (bundle.call, engine.call, bundle.call)]
tried = [
    lambda: bundle.call("f", x),
    lambda: bundle.call_async("f", x),
    lambda: bundle.report(),
    lambda: Engine(bundle).call("f", x),
    lambda: engine.call("f", x),
    lambda: engine.submit_call("f", x),
    lambda: bound(),
]
if os.fork() == 0:
    for each in tried:
        try:
            each()
        except ClosedError as error:
            assert "forked from" in str(error) and "spawn" in error.hint, error
        else:
            raise SystemExit("a fork used a bundle")
    engine.close()
    bundle.close()
    assert float(load(path).call("f", x).sum()) == expected[0]
    sys.exit(7)  # as usual, so that objects are freed
_, status = os.wait()
assert float(engine.call("f", x).sum()) == expected[0]
print(os.waitstatus_to_exitcode(status))
"""


def test_a_fork_neither_waits_nor_crashes(functions_dir, run_python):
    """It has none of the threads of XLA: a call waited for ever, and so did its end."""
    found = run_python(_FORKING, functions_dir, env={"PYTHONWARNINGS": "ignore"}, timeout=60)
    assert found.stdout == "7\n"


def _doubled(x):
    return x * 2


def test_a_closed_bundle_is_dispatched_and_sent_no_more(functions_dir):
    with load(functions_dir) as bundle:
        held = bundle.bind("f", np.ones(4, np.float32))
        pending = bundle.call_async("f", np.ones(4, np.float32))
        result = bundle.call_on_device("f", np.ones(4, np.float32))
        for each in (bundle, Engine(bundle), held, pending, result):
            for way in (pickle.dumps, copy.deepcopy):
                with pytest.raises(TypeError, match="send the path of the bundle"):
                    way([each])
        with pytest.raises(TypeError, match="send the path of the bundle"):
            pickle.dumps(jit(_doubled, bundle=bundle, name="f"))
    bundle = load(functions_dir, on_mismatch="error")
    for _ in range(3):  # the second goes through jaxlib's dispatch
        kept = bundle.call("f", np.ones(4, "f"))
    bundle.close()
    with pytest.raises(ClosedError):
        bundle.call("f", np.ones(4, "f"))
    np.testing.assert_array_equal(kept, np.arange(4))


def test_a_bundle_is_closed_while_it_generates_twice_and_loaded_again(decoder_dir):
    bundle = load(decoder_dir)
    stream = bundle.stream(PROMPT, max_new_tokens=60)
    next(stream)
    engine = Engine(bundle, slots=1)
    waiting = engine.submit(PROMPT, max_new_tokens=60)
    bundle.close()
    for late in (lambda: list(stream), lambda: engine.submit(PROMPT)):
        with pytest.raises(ClosedError):
            late()
    assert waiting.done()
    found = set()
    for _ in range(2):
        with load(decoder_dir) as bundle:
            found.add(bundle.generate(PROMPT, max_new_tokens=5).token_ids)
        bundle.close()
    assert len(found) == 1


def test_threads_that_call_while_it_closes_get_a_result_or_the_error(functions_dir):
    for _ in range(2):
        bundle = load(functions_dir)

        def call(number, bundle=bundle):
            if not number:
                bundle.close()
                return
            with contextlib.suppress(ClosedError):
                while True:
                    assert bundle.call("f", np.ones(4, "f")).tolist() == [0, 1, 2, 3]

        in_threads(5, call)


ROUNDS = """
import gc, json, os, sys, threading, time
import numpy
from prejit.runtime import load
from prejit.server import Engine
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
def tasks():
    return len(os.listdir("/proc/self/task"))
def settled():
    # jaxlib's threads end by themselves, soon after their client.
    until = time.monotonic() + 60
    while len(found) > 2 and tasks() > found[1][3] and time.monotonic() < until:
        time.sleep(0.01)
        gc.collect()  # in an unlucky moment the client is part of a cycle
    return tasks()
found = []
for turn in range(12):
    bundle = load(sys.argv[1])
    if bundle.config.decoder is None:
        for _ in range(3):
            bundle.call("f", numpy.ones(4, "f"))
    else:
        bundle.generate([1, 2, 3], max_new_tokens=8)
        engine = Engine(bundle, slots=1)
        engine.generate([1, 2, 3], max_new_tokens=8)
    bundle.close()
    maps = open("/proc/self/maps").read().count(sys.argv[1])
    found.append((resident(), len(os.listdir("/proc/self/fd")), threading.active_count(),
                  settled(), maps))
print(json.dumps(found))
"""


@pytest.mark.parametrize("kind", ["decoder", "functions"])
def test_memory_files_and_threads_stay_flat(decoder_dir, functions_dir, kind, run_python):
    path = decoder_dir if kind == "decoder" else functions_dir
    rounds = json.loads(run_python(ROUNDS, path, timeout=600).stdout)
    memory, files, threads, tasks, maps = zip(*rounds, strict=True)
    assert set(files[1:]) == {files[1]}, "open files"
    # An engine starts the one thread of all finalizers.
    assert set(threads) == {2 if kind == "decoder" else 1}, "threads of Python"
    assert max(tasks[6:]) <= max(tasks[1:6]), "threads of jaxlib"
    assert set(maps) == {0}, "mapped files of the bundle"
    # The allocator keeps some of what was freed: six more rounds take less than 5 MB.
    assert memory[-1] - memory[5] < 5 << 20
