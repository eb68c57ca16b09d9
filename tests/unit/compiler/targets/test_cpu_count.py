"""The answers to a process's system calls are written where the call waits for them, and nowhere else."""

import os
import select
import socket
import subprocess
import sys

import pytest

from prejit.compiler.targets import cpu_count

CALLS = 300
INTERRUPTED = """
import ctypes, signal, socket, sys, time
from prejit.compiler.targets import cpu_count
cpu_count.show(int(sys.argv[2]), socket.socket(fileno=int(sys.argv[1])))
signal.signal(signal.SIGALRM, lambda *_: None)
libc, overwritten = ctypes.CDLL(None), 0
for _ in range(int(sys.argv[3])):
    memory = ctypes.create_string_buffer(128)
    signal.setitimer(signal.ITIMER_REAL, 1e-4)
    if libc.sched_getaffinity(0, 128, memory) == 0:
        continue
    ctypes.memset(memory, 0x55, 128)  # an interrupted call has returned: its memory has another use
    time.sleep(2e-3)
    overwritten += memory.raw != b"\\x55" * 128
print(overwritten)
"""


@pytest.mark.skipif(not cpu_count._can_answer(), reason="needs filters of system calls")
def test_an_answer_that_comes_after_the_call_was_interrupted_writes_nothing():
    ours, its = socket.socketpair()
    command = [sys.executable, "-c", INTERRUPTED, str(its.fileno()), "3", str(CALLS)]
    options = {"pass_fds": [its.fileno()], "stdout": subprocess.PIPE, "text": True}
    with ours, its, subprocess.Popen(command, **options) as child:
        _, [listener], _, _ = socket.recv_fds(ours, 1, 1)
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        while poll.poll()[0][1] & select.POLLIN:
            cpu_count.answer(listener, 3)
        os.close(listener)
        assert child.communicate()[0] == "0\n"
