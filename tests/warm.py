"""Runs `prejit` in processes forked from one that has imported the build side: 3 s of CPU less a build.

Each command has a process of its own, as it has for a user, with its own memory, environment and exit
status. Only what is imported is there already. What a start-up costs, imports or leaves behind is tested with
real new processes.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from . import quick_compiling


class WarmPython:
    """A process that has imported the build side and forks for each command."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._process: subprocess.Popen[str] | None = None

    def prejit(
        self,
        *arguments: str | Path,
        env: Mapping[str, str] | None = None,
        timeout: float = 600,
        quick: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run `prejit ARGUMENTS` in a process of its own.

        Args:
            arguments: of the command.
            env: variables that are set beside those of this process.
            timeout: seconds after which it is killed.
            quick: compile with the flags of quick_compiling.py, without a word of them in the bundle.
        """
        command = [*map(str, arguments)]
        files = [self._directory / name for name in ("stdout", "stderr")]
        wanted = {
            "argv": command,
            "env": {**os.environ, **(env or {})},
            "cwd": os.getcwd(),
            "files": [*map(str, files)],
            "flags": quick_compiling.XLA_FLAGS if quick else None,
        }
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(wanted) + "\n")
        process.stdin.flush()
        late = threading.Timer(timeout, process.kill)
        late.start()
        try:
            answer = process.stdout.readline()
        finally:
            late.cancel()
        output, errors = (file.read_text() for file in files)
        assert answer, f"{command}: took more than {timeout} s, or the process died\n{errors}"
        return subprocess.CompletedProcess(command, int(answer), output, errors)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.communicate()

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            # Threads of OpenBLAS would not be there after a fork.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.warm"],
                cwd=Path(__file__).parents[1],
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        return self._process


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmPython]:
    """Runs commands of the build side: `warm.prejit("build", manifest)`."""
    python = WarmPython(tmp_path_factory.mktemp("warm"))
    yield python
    python.close()


def _serve() -> None:
    from transformers import AutoConfig  # noqa: F401 (transformers imports it when it is named)

    import prejit.compiler

    for module in pkgutil.walk_packages(prejit.compiler.__path__, "prejit.compiler."):
        importlib.import_module(module.name)
    assert len(os.listdir("/proc/self/task")) == 1, "a thread would not be there after a fork"
    for line in sys.stdin:
        wanted = json.loads(line)
        child = os.fork()
        if child == 0:
            _run(wanted)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(status, flush=True)


def _run(wanted: dict[str, Any]) -> None:
    """Run a command; never returns."""
    import atexit
    import traceback

    from prejit.runtime.__main__ import main
    from prejit.runtime.machine import environment

    status = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for place, path in enumerate(wanted["files"], 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), place)
        os.environ.clear()
        os.environ.update(wanted["env"])
        os.chdir(wanted["cwd"])
        sys.path[0] = wanted["cwd"]  # as `python -m` has it
        sys.argv[1:] = wanted["argv"]
        if wanted["flags"] is not None:
            os.environ["XLA_FLAGS"] = wanted["flags"]
            names = (flag.partition("=")[0] for flag in wanted["flags"].split())
            environment._FLAGS_WITHOUT_EFFECT += tuple(
                names
            )  # a loading process does not have them
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
