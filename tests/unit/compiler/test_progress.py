"""Progress: lines where nobody looks, a live display where somebody does."""

import io
import logging
import os
import re
import subprocess
import sys
import time

import pytest
from tests.waiting import wait_for

from prejit.compiler import progress as progress_module
from prejit.compiler.progress import Plain, Quiet, open_progress


@pytest.fixture(autouse=True)
def silent_log():
    """The log is off: where it is on the display is plain, and another test may have left it on."""
    logger = logging.getLogger("prejit")
    level = logger.level
    logger.setLevel(logging.WARNING)
    yield
    logger.setLevel(level)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def build(progress):
    progress.expect(4)
    progress.add()
    progress.cached()
    for program in ("a", "b", "c"):
        progress.started(program, "cpu-host")
    progress.finished("a", "cpu-host", 0.0)
    progress.failed("b", "cpu-host", "XLA does not like it\nat all")
    progress.finished("c", "cpu-host", 0.0)


def without_times(text):
    return re.sub(r"\d+(\.\d+)? s\b", "N s", text)


def test_plain_lines_tell_every_program_once_and_break_silence():
    stream = io.StringIO()
    with Plain(stream) as progress:
        build(progress)
        progress.note("packed 3 programs")
    assert without_times(stream.getvalue()) == (
        "compiled a for cpu-host in N s (2/4)\n"
        "failed: b for cpu-host after N s: XLA does not like it (3/4)\n"
        "compiled c for cpu-host in N s (4/4)\n"
        "packed 3 programs\n"
    )
    stream = io.StringIO()
    with Plain(stream, heartbeat_seconds=0.03) as progress:
        time.sleep(0.1)
        assert stream.getvalue() == ""  # nothing runs: nothing to tell
        progress.add(1)
        with progress.phase("lowering decode"):
            wait_for(lambda: "\n" in stream.getvalue())
        told = stream.getvalue()
        time.sleep(0.1)
    assert "still lowering decode (N s); 0/1\n" in without_times(told)
    assert stream.getvalue() == told
    many = io.StringIO()
    with Plain(many, heartbeat_seconds=0.03) as progress:
        for number in range(6):
            progress.started(f"p{number}", "t")
        wait_for(lambda: "and 2 more" in many.getvalue())
    assert "compiling p3 for t (N s) and 2 more\n" in without_times(many.getvalue())
    assert "p4" not in many.getvalue()


def test_quiet_is_so(capsys, monkeypatch):
    """So is a process without a stream at all."""
    with Quiet() as progress:
        build(progress)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys, "stderr", None)  # as Python has it for `2>&-`
    assert type(open_progress()) is Quiet
    progress_module.tell("nobody reads this")


class Broken(Terminal):
    """A stream whose reader has gone after the first character."""

    error: Exception
    has_failed = False

    def write(self, text):
        if self.tell():
            self.has_failed = True
            raise self.error
        return super().write(text)


@pytest.mark.parametrize("term", ["dumb", "xterm-256color"])
def test_a_broken_stream_breaks_no_build(term, monkeypatch):
    monkeypatch.setenv("TERM", term)
    for error in (BrokenPipeError(32, "Broken pipe"), OSError(28, "disk full")):
        stream = Broken()
        stream.error = error
        with open_progress(stream) as progress:
            build(progress)
            build(progress)
            progress.note("a note")
        assert stream.has_failed, "nothing was written: the test shows nothing"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_process_whose_reader_has_gone_ends_well(stream):
    reader, writer = os.pipe()
    os.close(reader)
    code = f"import sys\nfrom prejit.compiler.progress import tell\ntell('a line', sys.{stream})"
    command = [sys.executable, "-c", code]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environ, check=False, **{stream: writer})
    os.close(writer)
    assert done.returncode == 0
