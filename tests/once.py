"""What all workers of pytest-xdist share: directories that one of them makes."""

import fcntl
import os
import shutil

import pytest


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """Makes a directory once for all workers of pytest-xdist: `once("demo", make)` calls `make(path)`."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "made-once"
    shared.mkdir(exist_ok=True)

    def once(name, make):
        directory, made = shared / name, shared / f"{name}.made"
        with open(shared / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not made.exists():
                shutil.rmtree(directory, ignore_errors=True)  # of one who failed
                directory.mkdir()
                make(directory)
                made.touch()
        return directory

    return once
