"""Kill a command, or fail one of its system calls, at any place; then look at what it left and mend it."""

import contextlib
import ctypes
import dataclasses
import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path

SHIM = Path(__file__).with_name("faults.c")
ERRORS = ("EIO", "ENOSPC", "EDQUOT", "EROFS", "EACCES", "EPERM", "ENOMEM", "EMFILE", "EINTR")
"""What a call fails with. CPython repeats a call that gave EINTR, so that one must not be noticed."""
INTERRUPTIBLE = frozenset(("open", "read", "write", "fsync", "lock"))
"""The calls that can give EINTR. No kernel interrupts the others."""
LASTING = ("ENOSPC", "EROFS", "EIO")
MAY_FAIL_ANYHOW = frozenset(("open", "write", "fsync", "rename", "link", "mmap"))
FEW_ERRORS = ("EIO", "EACCES", "EINTR")
LASTING_EVERY = 5  # errors that last begin at every n-th call
BUCKETS = (1, 2)
MANIFEST = f"""
[bundle]
name = "tiny"
[[program]]
name = "p"
function = "tiny_model:f"
args = {{ x = "float32[{{n}}]" }}
buckets = {{ n = {list(BUCKETS)} }}
[[target]]
name = "cpu-x86-64-v2"
"""
OLD, NEW = 2, 3
"""Factors of the function that is built, before and after. For ones it gives the factor and one more."""


@dataclass(frozen=True)
class Fault:
    at: int = 0
    error: str | None = None
    lasts: bool = False
    after_seconds: float | None = None
    clock_seconds: int = 0


def compile_shim(directory):
    """Return the shared library to preload. Skip the test where there is no C compiler."""
    import pytest  # not in each process that breaks

    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler: cc, gcc or clang")
    library = directory / "faults.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SHIM), "-ldl"]
    subprocess.run(command, check=True)
    return library


def write_project(directory, factor):
    (directory / "tiny.toml").write_text(MANIFEST)
    (directory / "tiny_model.py").write_text(f"def f(x):\n    return x * {factor:>20} + 1\n")
    shutil.rmtree(directory / "__pycache__", ignore_errors=True)  # it holds only for whole seconds


def _main(*arguments):
    from prejit.runtime.__main__ import main

    return main([*map(str, arguments)])


def build(directory):
    options = ("-o", directory / "out", "--cache", directory / "cache", "--json")
    return _main("build", directory / "tiny.toml", *options)


def collect(directory):
    """Collect the garbage of the build cache, and of the programs that this machine compiled."""
    return _main("gc", "--cache", directory / "cache", "--days", "30")


def write_key(directory):
    """Write a key to sign with, and the policy that wants its signature."""
    from tests.signers import key_table, private_pem, write_policy

    (directory / "key.pem").write_bytes(private_pem("chaos"))
    rule = '[[rules]]\nnames = ["*"]\nkeys = ["chaos"]\n'
    write_policy(directory / "trust.toml", key_table("chaos"), rule)


def sign(directory):
    return _main("sign", directory / "out" / "tiny", "--key", directory / "key.pem")


def use(directory, *, other_machine=False):
    """Print what the bundle gives here, or on a machine that is no target: it compiles and keeps programs."""
    from prejit.runtime.errors import PrejitError

    try:
        print(json.dumps({"value": value(directory, other_machine=other_machine)}))
    except PrejitError as error:
        print(f"error[{error.code}]: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def value(directory, *, other_machine=False):
    """Return what the bundle's programs give for ones, after all of it was verified."""
    bundle = directory / "out" / "tiny"
    return value_of(bundle, directory / "runtime", other_machine=other_machine)


def value_of(path, cache, *, other_machine=False):
    import numpy as np

    from prejit.runtime import Fingerprint, load

    os.environ["PREJIT_RUNTIME_CACHE"] = str(cache)
    other = dataclasses.replace(Fingerprint.current(), jaxlib="0.4.0")
    found = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with load(path, fingerprint=other if other_machine else None) as bundle:
            for n in BUCKETS:
                found.update(bundle.call("p", x=np.ones(n, np.float32)).tolist())
    [one] = found
    return one


COMMANDS = {
    "build": build,
    "collect": collect,
    "sign": sign,
    "use": use,
    "use_elsewhere": partial(use, other_machine=True),
}


def broken(order):
    """Run one of `COMMANDS` with a fault in a directory. The shim's files `state` and `log` are beside it."""
    command, directory, fault = order
    os.environ |= {
        "FAULTS_ROOT": str(directory),
        "FAULTS_STATE": str(directory.with_name("state")),
        "FAULTS_LOG": str(directory.with_name("log")),
        "FAULTS_AT": str(fault.at),
        "FAULTS_ERRNO": str(getattr(errno, fault.error)) if fault.error else "0",
        "FAULTS_LASTS": str(int(fault.lasts)),
        "FAULTS_CLOCK": str(fault.clock_seconds),
    }
    if fault.after_seconds is not None and not os.fork():
        time.sleep(fault.after_seconds)
        os.killpg(0, signal.SIGKILL)
    ctypes.CDLL(None).faults_begin()
    return COMMANDS[command](directory)


def heal(root):
    """Say what is there, build again, and say what is there then. The state is printed as JSON."""
    said = {"kept": len([*root.glob("cache/v1/actions/compile/*.json")])}
    bundle = root / "out" / "tiny"
    if (bundle / "index.json").exists():
        said["value"] = value(root)
        if (root / "key.pem").exists():
            status = sign(root) or _main("verify", bundle, "--trust", root / "trust.toml")
            if status:
                return status
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        status = build(root)
    if status:
        return status
    [built] = json.loads(printed.getvalue())
    said |= {"compiled": built["compiled"], "healed": value(root)}
    said["elsewhere"] = value(root, other_machine=True)
    patterns = ("out/**/*.tmp", "cache/v1/temp/*", "runtime/compiled/v1/*.tmp")
    temporary = [each for pattern in patterns for each in root.glob(pattern)]
    said["left"] = [str(each.relative_to(root)) for each in temporary]
    print(json.dumps(said))
    return 0


def every_fault(calls):
    """Return a kill at every call of a command, each error at every call, and errors that last."""
    faults = [Fault(at) for at in range(1, len(calls) + 1)]
    for at, name in enumerate(calls, 1):
        errors = ERRORS if name in MAY_FAIL_ANYHOW else FEW_ERRORS
        errors = [each for each in errors if each != "EINTR" or name in INTERRUPTIBLE]
        faults += [Fault(at, each) for each in errors]
        if at % LASTING_EVERY == 0:
            faults += [Fault(at, error, lasts=True) for error in LASTING]
    return faults
