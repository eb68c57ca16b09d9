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

CALLS = {
    "generate": lambda bundle: bundle.generate(PROMPT, max_new_tokens=1),
    "generate_n": lambda bundle: bundle.generate_n(PROMPT, 2, max_new_tokens=1),
    "generate_batch": lambda bundle: bundle.generate_batch([PROMPT]),
    "stream": lambda bundle: bundle.stream(PROMPT),
    "session": lambda bundle: bundle.session(),
    "prefix": lambda bundle: bundle.prefix(PROMPT),
    "batch": lambda bundle: bundle.batch(1),
    "close_first": lambda bundle: Engine(bundle),
    "sleep": lambda bundle: bundle.sleep(),
    "wake": lambda bundle: bundle.wake(),
    "request": lambda bundle: bundle.request(PROMPT),
    "decoder": lambda bundle: bundle.decoder,
    "tokenizer": lambda bundle: bundle.tokenizer,
    "has_tokenizer": lambda bundle: bundle.has_tokenizer,
    "apply_chat_template": lambda bundle: bundle.apply_chat_template([]),
    "encode": lambda bundle: bundle.encode("a"),
    "encode_batch": lambda bundle: bundle.encode_batch(["a"]),
    "score": lambda bundle: bundle.score("a", ["b"]),
    "adapters": lambda bundle: bundle.adapters,
    "embed_images": lambda bundle: bundle.embed_images(np.zeros((2, 2, 3), "u1")),
    "score_images": lambda bundle: bundle.score_images(np.zeros((2, 2, 3), "u1")),
    "image_labels": lambda bundle: bundle.image_labels,
    "call": lambda bundle: bundle.call("f", np.ones(4, "f")),
    "call_async": lambda bundle: bundle.call_async("f", np.ones(4, "f")),
    "call_on_device": lambda bundle: bundle.call_on_device("f", np.ones(4, "f")),
    "call_by_path": lambda bundle: bundle.call_by_path("f", {(0,): np.ones(4, "f")}),
    "bind": lambda bundle: bundle.bind("f", np.ones(4, "f")),
    "prepare": lambda bundle: bundle.prepare(),
    "check_answers": lambda bundle: list(bundle.check_answers()),
    "wrong_answers": lambda bundle: list(bundle.wrong_answers()),
    "report": lambda bundle: bundle.report(),
    "start_report": lambda bundle: bundle.start_report(),
    "device_memory_bytes": lambda bundle: bundle.device_memory_bytes(),
    "on_jax": lambda bundle: bundle.on_jax,
    "generator": lambda bundle: bundle.generator,
    "user_programs": lambda bundle: bundle.user_programs,
    "dispatched": lambda bundle: bundle.dispatched,
    "text": lambda bundle: bundle.text,
}


@pytest.fixture(scope="module")
def functions_dir(build_programs):
    weights = np.arange(4.0, dtype="f")
    return build_programs(Program("f", lambda w, x: x * w, ["float32[4]"], params=weights))


def test_a_closed_bundle_says_that_it_is_closed(decoder_dir):
    bundle = load(decoder_dir)
    bundle.close()
    for way, call in CALLS.items():
        try:
            with pytest.raises(ClosedError, match=r"^decoder: expected an open bundle, found one"):
                call(bundle)
        except BaseException as error:
            error.add_note(way)
            raise
    assert bundle.name == "decoder"
    # A new method must be closed too.
    others = {"close", "defaults", "encoder", "images", "has_chat_template", "render_chat_template"}
    others |= {"runner_with_zeros", "check_finite", "timed_runner", "watch_runs", "finish"}
    others |= {"kernel_names"}
    assert {name for name in dir(Bundle) if not name.startswith("_")} == {*CALLS} | others


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
