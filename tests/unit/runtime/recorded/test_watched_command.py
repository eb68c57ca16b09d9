"""A command runs as if nothing stood between: its status, its signals, its own sitecustomize."""

import json
import os
import signal
import subprocess
import sys

import pytest
from tests.processes import ran

from prejit.runtime.errors import UsageError
from prejit.runtime.recorded.hook.watch import Orders
from prejit.runtime.recorded.watched_command import environment_for, run_to_end


def environment(**more):
    return environment_for(Orders({}), {**os.environ, **more})


def python(code, env, *argv, **options):
    return ran(sys.executable, "-c", code, *argv, env=env, **options)


@pytest.mark.parametrize(
    ("command", "status"),
    [("exit 0", 0), ("exit 7", 7), ("kill -TERM $$", 143), ("kill -KILL $$", 137)],
)
def test_the_status_is_that_of_the_command(command, status):
    assert run_to_end(["sh", "-c", command], dict(os.environ)) == status
    with pytest.raises(UsageError, match="no-such-command: cannot start the command: No such file"):
        run_to_end(["no-such-command"], dict(os.environ))


WRAPPER = """
import os, signal, sys
from prejit.runtime.recorded.watched_command import become, run_to_end
# A shell ignores one for what it starts in the background, nohup the other: the command would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
start = run_to_end if sys.argv[1] == "run" else become
sys.exit(start(sys.argv[2:], dict(os.environ)))
"""
TRAPPING = "trap 'echo got it; exit 9' {name}; echo ready; while :; do sleep 0.02; done"


@pytest.mark.parametrize(
    ("start", "name"), [("run", "INT"), ("run", "TERM"), ("run", "HUP"), ("become", "TERM")]
)
def test_a_signal_reaches_the_command(start, name):
    words = [sys.executable, "-c", WRAPPER, start, "sh", "-c", TRAPPING.format(name=name)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(getattr(signal, f"SIG{name}"))
        assert process.stdout.read() == "got it\n"
        assert process.wait(60) == 9


LATE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

// The wait of a process whose READY names a file begins after this file is there and a signal has come.
static void before_the_wait(void) {
  const char *ready = getenv("READY");
  if (ready == NULL) return;
  while (access(ready, F_OK) != 0) usleep(1000);
  unsetenv("READY");
  kill(getpid(), SIGUSR1);
}

pid_t waitpid(pid_t process, int *status, int options) {
  if ((options & WNOHANG) == 0) before_the_wait();
  pid_t (*real)(pid_t, int *, int) = dlsym(RTLD_NEXT, "waitpid");
  return real(process, status, options);
}

ssize_t read(int file, void *bytes, size_t count) {
  struct stat found;
  if (fstat(file, &found) == 0 && S_ISFIFO(found.st_mode)) before_the_wait();
  ssize_t (*real)(int, void *, size_t) = dlsym(RTLD_NEXT, "read");
  return real(file, bytes, count);
}
"""
WAITER = """
import os, sys
from prejit.runtime.recorded.watched_command import run_to_end
plain = dict(os.environ)
os.environ["READY"] = sys.argv[1]
sys.exit(run_to_end(["sh", "-c", sys.argv[2]], plain))
"""


def test_a_signal_that_comes_just_before_the_wait_reaches_the_command(tmp_path):
    ready, shim = tmp_path / "ready", tmp_path / "late.so"
    ran("gcc", "-shared", "-fPIC", "-O1", "-x", "c", "-", "-o", shim, "-ldl", input=LATE)
    trapping = f"trap 'exit 9' USR1; touch {ready}; for i in $(seq 500); do sleep 0.02; done"
    python(WAITER, {**os.environ, "LD_PRELOAD": str(shim)}, ready, trapping, status=9)


COUNTING = """
import signal, time
seen = []
signal.signal(signal.SIGINT, lambda *_: seen.append(1))
print('ready', flush=True)
while not seen: time.sleep(0.02)
time.sleep(0.6)  # until then a second one has come
print(len(seen), flush=True)
"""


def test_a_signal_of_the_terminal_reaches_the_command_once():
    """The terminal sends it to both. A server would take a second one as an order to drop its requests."""
    primary, secondary = os.openpty()
    words = [sys.executable, "-c", WRAPPER, "run", sys.executable, "-c", COUNTING]
    with subprocess.Popen(
        ["setsid", "--ctty", "--wait", *words], stdin=secondary, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        os.write(primary, b"\x03")
        assert process.stdout.read() == "1\n"
    os.close(primary)
    os.close(secondary)


@pytest.mark.parametrize("start", ["run", "become"])
def test_a_command_can_be_ended_by_a_broken_pipe(start):
    """Python ignores SIGPIPE, and what a process ignores its commands ignore, too."""
    shown = "grep SigIgn /proc/self/status"
    done = python(WRAPPER, dict(os.environ), start, "sh", "-c", shown)
    assert not int(done.stdout.split()[1], 16) & (1 << (signal.SIGPIPE - 1))


def test_a_program_without_jax_is_left_alone_and_a_hook_that_fails_is_a_line(tmp_path):
    """The same sys.path and the same modules, but for the finder that waits for jax."""
    code = "import json, sys\nprint(json.dumps([sys.path, [*sys.modules], len(sys.meta_path)]))"
    plain, hooked = (json.loads(python(code, env).stdout) for env in (os.environ, environment()))
    assert hooked[0] == plain[0]
    assert set(hooked[1]) - set(plain[1]) <= {"sitecustomize", "prejit_environment"}
    assert hooked[2] == plain[2] + 1
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text("NAME = 'not really jax'\n")
    code = "import jax; print(jax.NAME, hasattr(jax.__loader__, '__dict__'))"
    done = python(code, environment(PYTHONPATH=str(tmp_path)))
    assert done.stdout == "not really jax True\n"
    [line] = done.stderr.splitlines()
    assert line.startswith("prejit: cannot watch jax in this process: ImportError")


@pytest.mark.parametrize("theirs", ["import sys\nsys.theirs = 1\n", "import no_such_module\n"])
def test_the_sitecustomize_of_the_program_runs_as_ever(tmp_path, theirs):
    (tmp_path / "sitecustomize.py").write_text(theirs)
    own = {"PYTHONPATH": str(tmp_path)}
    for env in (os.environ | own, environment(**own)):
        done = python("import sys; print(getattr(sys, 'theirs', 0))", env)
        assert done.stdout == f"{int('theirs' in theirs)}\n"
        assert ("No module named 'no_such_module'" in done.stderr) == ("no_such" in theirs)
