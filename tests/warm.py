"""Runs `prejit` in processes forked from one that has imported the build side: 3 s of CPU less a build."""

import atexit
import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from . import quick_compiling
from .campaigns import processes

PRELOADED = ("tests.warm", "tests.build_side")
_PATH = sys.path[1:]  # in the process that is forked: that of its start


class WarmProcess:
    """A command that runs in a process of its own. Its methods are named as those of `subprocess.Popen`."""

    def __init__(self, process, files):
        self._process, self._files = process, files

    @property
    def returncode(self):
        return self._process.exitcode

    def communicate(self, timeout=600):
        """Wait for its end, and return all that it wrote. Its group is killed after `timeout` seconds."""
        self._process.join(timeout)
        self.kill()
        output, errors = (file.read_text() for file in self._files)
        return output, errors

    def kill(self):
        """Kill its group, unless it has ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()  # it may have no group yet
            self._process.join()


class WarmPython:
    """Starts commands from a process that has imported the build side."""

    def __init__(self, directory):
        self._directory, self._started = directory, []

    def prejit(self, *arguments, env=None, timeout=600, quick=False):
        """Run `prejit ARGUMENTS` in a process of its own."""
        process = self.start(*arguments, env=env, quick=quick)
        output, errors = process.communicate(timeout)
        return subprocess.CompletedProcess([*arguments], process.returncode, output, errors)

    def start(self, *arguments, env=None, quick=False):
        """Start `prejit ARGUMENTS` in a process and a process group of its own. Arguments as `prejit`."""
        if quick and arguments[0] == "build":  # a second worker costs more than it saves
            arguments += ("--jobs", "1")
        number = len(self._started)
        files = [self._directory / f"{name}{number}" for name in ("stdout", "stderr")]
        given = ([*map(str, arguments)], {**os.environ, **(env or {})}, os.getcwd(), files, quick)
        # The process that is forked finds `tests` here. Threads of OpenBLAS would not be there after a fork.
        with contextlib.chdir(Path(__file__).parents[1]), pytest.MonkeyPatch.context() as patch:
            patch.setenv("OPENBLAS_NUM_THREADS", "1")
            process = processes.start(_run, *given, preloaded=PRELOADED)
        self._started.append(WarmProcess(process, files))
        return self._started[-1]

    def close(self):
        """Kill what a test has left: multiprocessing would wait for it at the end of Python."""
        for process in self._started:
            process.kill()


@pytest.fixture(scope="session")
def warm(tmp_path_factory):
    """Runs commands of the build side: `warm.prejit("build", manifest)`."""
    python = WarmPython(tmp_path_factory.mktemp("warm"))
    yield python
    python.close()


def _run(argv, env, cwd, files, quick):
    from prejit.runtime.__main__ import main

    status = 1
    try:
        os.setsid()
        for place, path in enumerate(files, 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), place)
        from . import build_side  # noqa: F401 (the server ignores an ImportError of what it imports first)

        faulthandler.enable(2)
        os.environ.clear()
        os.environ.update(env)
        os.chdir(cwd)
        sys.path[:] = [cwd, *_PATH]  # as `python -m` has it
        sys.argv[1:] = argv
        if quick:
            quick_compiling.compile_children_quickly()
        status = main(argv)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
