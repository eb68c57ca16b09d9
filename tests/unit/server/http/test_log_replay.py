"""A comparison that calls different tokens equal would make every replay green."""

import json

import numpy as np
import pytest

from prejit.runtime.errors import StoreError, UsageError
from prejit.server.http.log_replay import Report, _compare, _paths, replay
from prejit.server.releases.request_player import calls_of
from prejit.server.telemetry.requestlog import Entry, RecordedCall, describe_array

ARRAY = np.linspace(0, 1, 12, dtype=np.float32)


def compared(expected, found, status=200):
    report = Report()
    entry = Entry("0", "POST", "/v1/completions", {}, 0.0, status=status, calls=found)
    line = {"id": "7", "path": "/v1/completions", "calls": [each.described() for each in expected]}
    _compare(line, entry, report)
    return report


def tokens(*ids, reason="length"):
    return RecordedCall("generate", "demo", token_ids=list(ids), finish_reason=reason)


def arrays(**values):
    described = {name: describe_array(np.asarray(value)) for name, value in values.items()}
    return RecordedCall("call", "demo", "score", arrays=described)


def test_requests_are_equal_rounded_different_or_skipped():
    rounded = arrays(x=np.nextafter(ARRAY, np.float32(2)))
    for expected, found, counts in (
        (tokens(1, 2, 3), tokens(1, 2, 3), (1, 0, 0)),
        (tokens(reason=""), tokens(1, 2, 3), (1, 0, 0)),  # the client went before the first token
        (arrays(x=ARRAY), arrays(x=ARRAY.copy()), (1, 0, 0)),
        (arrays(x=ARRAY), rounded, (0, 1, 0)),
        (RecordedCall("generate", "demo"), tokens(1), (0, 0, 1)),
    ):
        report = compared([expected], [found])
        assert (report.equal, report.rounded, report.skipped, report.differences) == (*counts, [])
    [other] = compared([tokens(1, 2)], [tokens(1, 9)]).differences
    assert (other.id, other.path) == ("7", "/v1/completions")
    assert other.reason == "token 1: expected 2, found 9"
    assert compared([tokens(1)], [tokens(1)], status=500).differences


def test_a_bundle_takes_the_place_of_the_one_with_its_name():
    one = {"a": {"path": "/a"}}
    two = {"a": {"path": "/a"}, "b": {"path": "/b"}}
    assert _paths("log", one, [(None, "/new")]) == {"a": "/new"}
    assert _paths("log", two, [("b", "/new")]) == {"a": "/a", "b": "/new"}
    for name, message in ((None, "NAME=PATH"), ("c", "found 'c'")):
        with pytest.raises(UsageError, match=message):
            _paths("log", two, [(name, "/new")])


def test_a_bundle_that_was_moved_is_asked_for(tmp_path):
    log, moved = tmp_path / "log", str(tmp_path / "moved")
    model = {"name": "a", "path": moved, "digest": "sha256:0"}
    log.write_text(json.dumps({"event": "start", "models": [model]}) + "\n")
    with pytest.raises(StoreError) as refused:
        replay(str(log), [], print)
    assert refused.value.hint == "if the bundle was moved, give its place: --bundle a=PATH"


def test_a_log_of_a_server_that_was_never_ready_is_explained(tmp_path):
    log = tmp_path / "log"
    log.write_text(json.dumps({"event": "request", "path": "/health/ready"}) + "\n")
    with pytest.raises(UsageError) as refused:
        replay(str(log), [], print)
    assert "of a server that was ready" in str(refused.value.hint)


def test_calls_of_a_log_are_read_as_they_were_written():
    for call in (tokens(1, 2), arrays(x=ARRAY), RecordedCall("generate", "demo", seed=5)):
        call.stats = {}
        line = json.loads(json.dumps(call.described() | {"prompt_tokens": 3}))
        assert calls_of({"calls": [line]}) == [call]
