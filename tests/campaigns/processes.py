"""Run functions in processes of their own, with time and growth of memory measured and bounded."""

import json
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
import traceback
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace

PRELOADED = (
    *("prejit.compiler.cli.build_commands", "prejit.compiler.pipeline.build_run"),
    *("prejit.compiler.lowering.export", "prejit.compiler.models"),
    *("prejit.runtime.cli.inspect_command", "transformers", "tokenizers"),
)
"""Modules that a campaign's server imports. A campaign may name others before its first process."""
_servers = {}
"""Fork servers by the modules that they import and their LD_PRELOAD. multiprocessing has only one."""
UNEXPECTED = 70
"""Exit status after an exception that reached the top; `sysexits.h` calls it EX_SOFTWARE."""
one_reader = threading.Lock()
"""The exit status of a process can be read once. `start` reads those of all others, in any thread, and
whoever comes second gets 255."""


def start(function, *arguments, daemon=False, preloaded=None):
    """Start a function of a module that can be imported by name in a fork of a server.

    The server imports the modules `preloaded`, or PRELOADED, before its first fork.
    """
    modules = preloaded or PRELOADED
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=function, args=arguments, daemon=daemon)
    with one_reader:
        wanted = (modules, os.environ.get("LD_PRELOAD"))
        server = _servers.setdefault(wanted, forkserver.ForkServer())
        server.set_forkserver_preload(list(modules))
        forkserver.connect_to_new_process = server.connect_to_new_process  # what `start` calls
        process.start()
    return process


def run(function, argument, directory, *, limit_seconds):
    """Run a function in a fork; its status is negative for a signal, and None for the time limit."""
    growth = directory / "growth.json"
    for file in (directory / "stdout", directory / "stderr", growth):
        file.unlink(missing_ok=True)
    started = time.monotonic()
    process = start(_child, function, argument, str(directory), dict(os.environ))
    wait([process.sentinel], limit_seconds)
    seconds = time.monotonic() - started
    with one_reader:
        status = process.exitcode
        if status is None and process.pid is not None:
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
    said = {name: (directory / name).read_text(errors="replace") for name in ("stdout", "stderr")}
    grown = json.loads(growth.read_text()) if growth.exists() else 0
    return SimpleNamespace(status=status, **said, seconds=seconds, growth_bytes=grown)


@contextmanager
def until_the_end(function, argument, directory):
    """Run a function in a fork for as long as a block lasts, then kill it. Arguments as of `run`."""
    process = start(_child, function, argument, str(directory), dict(os.environ))
    try:
        yield
    finally:
        with one_reader:
            process.kill()
            process.join()


def _child(function, argument, directory, environ):
    os.setsid()  # its compile workers are killed with it
    os.environ.clear()  # those of the server are of its first campaign
    os.environ.update(environ)
    os.chdir(directory)
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        opened = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(opened, descriptor)
        os.close(opened)
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    status = UNEXPECTED
    try:
        status = function(argument)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    Path("growth.json").write_text(json.dumps(max(own, children, 0)))
    os._exit(status)
