"""Runs `prejit` in processes forked from one that has imported the build side: 3 s of CPU less a build."""

import gc
import importlib
import json
import os
import pkgutil
import select
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from . import quick_compiling


class WarmProcess:
    """A command that runs in a process of its own. Its methods are named as those of `subprocess.Popen`."""

    def __init__(self, python, pid, files):
        self._python, self.pid, self._files = python, pid, files
        self.returncode = None

    def wait(self, timeout=600):
        """Return the exit status, or minus the signal. Its group is killed after `timeout` seconds."""
        if self.returncode is None:
            self.returncode = self._python.status_of(self.pid, timeout)
        return self.returncode

    def communicate(self, timeout=600):
        """Wait for its end, and return all that it wrote to stdout and stderr."""
        self.wait(timeout)
        output, errors = (file.read_text() for file in self._files)
        return output, errors


class WarmPython:
    """A process that has imported the build side and forks for each command."""

    def __init__(self, directory):
        self._directory = directory
        self._process = None
        self._started = 0
        self._ended = {}

    def prejit(self, *arguments, env=None, timeout=600, quick=False):
        """Run `prejit ARGUMENTS` in a process of its own."""
        process = self.start(*arguments, env=env, quick=quick)
        output, errors = process.communicate(timeout)
        return subprocess.CompletedProcess([*arguments], process.returncode, output, errors)

    def start(self, *arguments, env=None, quick=False):
        """Start `prejit ARGUMENTS` in a process and a process group of its own. Arguments as `prejit`."""
        if quick and arguments[0] == "build":  # a second worker costs more than it saves
            arguments += ("--jobs", "1")
        self._started += 1
        files = tuple(self._directory / f"{name}{self._started}" for name in ("stdout", "stderr"))
        wanted = {"argv": [*map(str, arguments)], "env": {**os.environ, **(env or {})}}
        wanted |= {"cwd": os.getcwd(), "files": [*map(str, files)], "quick": quick}
        print(json.dumps(wanted), file=self._running().stdin, flush=True)
        while "started" not in (event := self._next_event()):
            self._ended[event["ended"]] = event["status"]
        return WarmProcess(self, event["started"], (files[0], files[1]))

    def status_of(self, pid, timeout):
        """How a process that was started ended. After so many seconds its group is killed."""
        late = threading.Timer(timeout, os.killpg, (pid, signal.SIGKILL))
        late.start()
        try:
            while pid not in self._ended:
                event = self._next_event()
                self._ended[event["ended"]] = event["status"]
        finally:
            late.cancel()
        return self._ended.pop(pid)

    def close(self):
        if self._process is not None:
            self._process.communicate()

    def _next_event(self):
        line = self._running().stdout.readline()
        assert line, "the warm process died"
        return json.loads(line)

    def _running(self):
        if self._process is None:
            # Threads of OpenBLAS would not be there after a fork.
            env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
            command, root = [sys.executable, "-m", "tests.warm"], Path(__file__).parents[1]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self._process = subprocess.Popen(command, cwd=root, env=env, **pipes)
        return self._process


@pytest.fixture(scope="session")
def warm(tmp_path_factory):
    """Runs commands of the build side: `warm.prejit("build", manifest)`."""
    python = WarmPython(tmp_path_factory.mktemp("warm"))
    yield python
    python.close()


def _serve():
    from transformers import AutoConfig  # noqa: F401 (transformers imports it when it is named)

    import prejit.compiler

    for module in pkgutil.walk_packages(prejit.compiler.__path__, "prejit.compiler."):
        importlib.import_module(module.name)
    gc.collect()
    gc.freeze()  # no child looks for garbage among what is imported
    assert len(os.listdir("/proc/self/task")) == 1, "a thread would not be there after a fork"
    requests = open(0, "rb", buffering=0)  # noqa: SIM115 (open until the process ends)
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes)
    while True:
        ready, _, _ = select.select([requests.fileno(), woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            _tell_who_ended()
        if requests.fileno() in ready:
            if not (line := requests.readline()):
                return
            child = os.fork()
            if child == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _run(json.loads(line))
            print(json.dumps({"started": child}), flush=True)


def _tell_who_ended():
    with suppress(ChildProcessError):
        while True:
            child, status = os.waitpid(-1, os.WNOHANG)
            if child == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            print(json.dumps({"ended": child, "status": code}), flush=True)


def _run(wanted):
    import atexit
    import faulthandler
    import traceback

    from prejit.runtime.__main__ import main

    status = 1
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for place, path in enumerate(wanted["files"], 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), place)
        faulthandler.enable(2)
        os.environ.clear()
        os.environ.update(wanted["env"])
        os.chdir(wanted["cwd"])
        sys.path[0] = wanted["cwd"]  # as `python -m` has it
        sys.argv[1:] = wanted["argv"]
        if wanted["quick"]:
            quick_compiling.compile_children_quickly()
        status = main(wanted["argv"])
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _serve()
