"""A recording confirms the calls of the one before, or names the input in which they differ."""

import json

from prejit.compiler.recording import untraced_calls as untraced
from prejit.compiler.recording.untraced_calls import UNCONFIRMED, confirmed

CALL = {"name": "jit_f", "reason": None, "program": "p", "indices": [1]}
INPUTS = {
    **{"environment": {"MODE": "sum"}, "modules": {"zlib": "/zlib.so"}},
    **{"files": [["/data", 1, [5], "digest"]], "listings": [["/parts", 1, "names"]]},
    "orders": [["/ordered", 1, "names"]],
    **{"packages": [["/packages", 1, "names"]], "kinds": [["/out", 1, 0]]},
    **{"links": [["/now", 1, "v1"]], "absent": [["torch", 1, None]]},
}


def recording(**inputs):
    content = {"inputs": INPUTS | inputs, "calls": {"s": dict(CALL)}, "recordings": 1}
    return untraced.RecordedCalls("calls", content)


def test_an_input_in_which_two_recordings_differ_is_named():
    for inputs, said in (
        ({"environment": {"MODE": "max"}}, "the environment variable MODE was another"),
        ({"files": [["/data", 1, [5], "other"]]}, "the file /data was another"),
        ({"files": []}, "the file /data was not read"),
        ({"listings": [*INPUTS["listings"], ["/x", 1, ""]]}, "the directory /x was read, now not"),
        ({"orders": [["/ordered", 1, "x"]]}, "the order of directory /ordered was another"),
        ({"kinds": [["/out", 1, 1]]}, "the path /out was another"),
    ):
        [reason] = confirmed(recording(**inputs), recording()).reasons()
        assert reason == f"{UNCONFIRMED}; before, {said}"


def test_calls_of_a_process_that_could_not_be_watched_are_not_confirmed(tmp_path):
    lines = [
        {"command": ["/", "serve.py"], "environment": {}, "prefix": "/"},
        {"called": {**CALL, "signature": "s", "index": 1, "executable": {}, "results": []}},
        {"failure": "OSError: gone"},
    ]
    for count, confirmed_calls in ((2, 1), (3, 0)):
        (tmp_path / "1.jsonl").write_text("\n".join(map(json.dumps, lines[:count])))
        [calls] = untraced.read_calls(tmp_path)
        assert confirmed(calls, calls).count(confirmed=True) == confirmed_calls


def test_two_recordings_with_the_same_inputs_confirm_a_call():
    touched = recording(files=[["/data", 1, [6], "digest"]])
    assert confirmed(touched, recording()).count(confirmed=True) == 1
    first = confirmed(None, recording())
    assert first.reasons() == {UNCONFIRMED: ["jit_f"]}
    assert confirmed(first, recording()).count(confirmed=True) == 1
