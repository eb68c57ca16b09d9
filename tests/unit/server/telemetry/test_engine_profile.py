"""Whether a recording shows what ran under the names that users know, and leaves nothing behind."""

import collections
import contextlib
import gzip
import json
import time

import pytest
from starlette.testclient import TestClient
from tests.unit.server.running import running, wait_for

from prejit.runtime import UsageError, load
from prejit.runtime.cli.commands import run
from prejit.runtime.errors import NetworkError
from prejit.server import Engine
from prejit.server.cli.profile_command import _text
from prejit.server.gate.server_settings import Settings
from prejit.server.http.admin import make_admin
from prejit.server.served.served import Models, Served
from prejit.server.telemetry import profile_time_line
from prejit.server.telemetry.engine_profile import Spans, XlaSession, read_recording, record
from prejit.server.telemetry.profile_time_line import (
    TimeLine,
    XlaEvent,
    read_time_line,
    trace_events,
)

NEW = 12


@pytest.fixture(scope="module")
def bundle(decoder_dir):
    with load(decoder_dir) as bundle:
        yield bundle


@pytest.fixture(scope="module")
def engine(bundle):
    with contextlib.closing(Engine(bundle)) as engine:
        ask(engine)  # programs are loaded and run once
        yield engine


def ask(engine):
    result = engine.submit([1, 5, 9], max_new_tokens=NEW, stop_token_ids=()).result()
    return list(result.token_ids)


@pytest.fixture(scope="module")
def recorded(bundle, engine):
    expected, found = ask(engine), []
    recording = record([("tiny", bundle, engine)], lambda: found.append(ask(engine)))
    assert found == [expected]
    return read_time_line(*read_recording(recording))


def test_a_recording_has_our_names_in_its_tables_parts_and_trace(recorded, bundle):
    table = {program.name for program in bundle.config.programs}
    names = {total.program for total in recorded.programs}
    assert names <= table
    assert any(name.startswith("decode/") for name in names)
    assert {total.program for total in recorded.kernels} == names
    assert sum(total.share for total in recorded.kernels) == pytest.approx(1)
    assert not any(total.kernel.startswith(("while", "cond")) for total in recorded.kernels)
    assert all(0 < total.seconds < recorded.seconds for total in recorded.programs)
    assert recorded.tokens == NEW
    # Floats of so many nanoseconds have steps of 256.
    assert all(type(part.start) is type(part.end) is int for part in recorded.parts)
    groups = collections.defaultdict(list)
    for part in recorded.parts:
        groups[part.group].append(part)
    whole, *parts = groups["requests"]
    assert (whole.name, whole.about) == ("tiny: generate", {"tokens": NEW})
    assert [part.name for part in parts][-1] == "decode"
    assert whole.start <= parts[0].start < parts[-1].end <= whole.end + 1e5
    decoding = [part for part in groups["steps"] if part.name == "decode"]
    assert decoding
    # Each is put where its end was seen: a thread that had to wait for a core saw it late.
    assert all(abs(part.start - whole.start) < 1e9 for part in decoding)
    assert {part.name for part in groups["programs"]} == {t.program for t in recorded.programs}
    trace = json.loads(json.dumps(trace_events(recorded)))
    named = {(e["pid"], e.get("tid")) for e in trace["traceEvents"] if e["name"] == "thread_name"}
    whole = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(whole) == len(recorded.parts)
    assert min(event["ts"] for event in whole) == 0
    assert all(event["dur"] >= 0 and (event["pid"], event["tid"]) in named for event in whole)
    assert {event["cat"] for event in whole} == {"requests", "steps", "programs", "kernels"}


def test_nothing_is_left_when_a_recording_ends(bundle, engine):
    programs = bundle.decoder.programs
    before = {name: programs[name] for name in programs.obtained()}

    def fail():
        assert all(programs[name] is not before[name] for name in before)
        with pytest.raises(UsageError, match="not profiled"):
            record([("tiny", bundle, engine)], ask)
        raise KeyError

    with pytest.raises(KeyError):
        record([("tiny", bundle, engine)], fail)
    assert all(programs[name] is before[name] for name in before)
    XlaSession().stop()  # and the next one may begin


def test_programs_of_two_models_are_told_apart(bundle, engine, decoder_dir):
    with load(decoder_dir) as other, contextlib.closing(Engine(other)) as second:
        ask(second)  # golden answers of first loads are no calls
        both = [("first", bundle, engine), ("second", other, second)]
        recording = record(both, lambda: (ask(engine), ask(second)))
    found = read_time_line(*read_recording(recording))
    names = {total.program.partition(": ")[0] for total in found.programs}
    assert names == {"first", "second"}
    assert found.tokens == 2 * NEW
    requests = {part.name for part in found.parts if part.group == "requests"}
    assert requests > {"first: generate", "second: generate"}


def test_a_bundle_that_is_closed_meanwhile_spoils_nothing(decoder_dir):
    closing = load(decoder_dir)
    engine = Engine(closing)
    ask(engine)
    recording = record([("tiny", closing, engine)], lambda: (ask(engine), closing.close()))
    xspace, spans = read_recording(recording)
    assert spans.runs
    assert read_time_line(xspace, spans).kernels  # under the names of XLA's modules
    XlaSession().stop()


def test_runs_that_no_call_fits_have_the_name_of_their_module():
    def event(kernel, run, start):
        return XlaEvent("lane", kernel, "jit_f", run, start, start + 1)

    kernels = {"a": {"add": ("prejit_norm.0123456789abcdef", "f/norm")}, "b": {"dot": ("", "")}}
    spans = Spans(0, 100, 0, [], [], [("b", 5), ("a", 6), ("a", 50)], kernels)
    events = [event("dot", 3, 1), event("add", 1, 7), event("dot", 2, 9), event("other", 4, 60)]
    names = profile_time_line._program_names(events, spans)
    assert names == {3: "jit_f", 1: "a", 2: "b", 4: "jit_f"}
    assert profile_time_line._kernel(events[1], names, kernels).name == "norm"


def test_the_command_writes_a_trace_and_xprofs_files_and_calls_functions_on_zeros(
    decoder_dir, bundle_dir, tmp_path, said
):
    trace, xprof = tmp_path / "trace.json.gz", tmp_path / "xprof"
    options = ["--seconds", "0.05", "-o", str(trace), "--xprof", str(xprof)]
    printed = said("profile", decoder_dir, *options)
    assert "new tokens" in printed
    assert "decode/b3-c" in printed
    assert json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    [plane] = xprof.glob("plugins/profile/*/*.xplane.pb")
    assert plane.stat().st_size > 1000
    found = json.loads(said("profile", bundle_dir, "--seconds", "0.02", "--json"))
    assert {"score/b2"} <= {total["program"] for total in found["programs"]}
    with pytest.raises(NetworkError, match="cannot ask the server"):
        run(["profile", f"unix:{tmp_path / 'none'}"])


def test_a_recording_of_nothing_says_so():
    assert "no program ran" in _text(TimeLine(2.0, 0, (), (), ()))


def test_a_server_records_at_its_admin_address_until_its_client_goes(bundle, engine):
    models = Models(Served("tiny", bundle, engine, 0))
    app = make_admin(models, Settings(), None, None, None)
    client = TestClient(app)
    answer = client.post("/profile", json={"seconds": 0.05})
    assert answer.status_code == 200
    assert read_recording(answer.content)[1].started_ns > 0
    for wrong in ({"seconds": 0}, {"seconds": 61}, {"second": 1}):
        assert client.post("/profile", json=wrong).status_code == 400
    session = XlaSession()
    try:
        busy = client.post("/profile", json={"seconds": 0.05})
    finally:
        session.stop()
    assert busy.status_code == 409
    assert "not profiled" in busy.json()["error"]["message"]
    programs = bundle.decoder.programs
    name = next(iter(programs.obtained()))
    before = programs[name]
    with running(models, Settings(), app) as server:
        with server.send("/profile", {"seconds": 60}):
            wait_for(lambda: programs[name] is not before)
        began = time.monotonic()
        wait_for(lambda: programs[name] is before)
        assert time.monotonic() - began < 30
