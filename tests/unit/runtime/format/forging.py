"""What tests of several checks forge bundles with."""

import contextlib
import dataclasses
import functools

import pytest
from tests.layouts import GOLDEN, contents_of

from prejit.runtime.errors import RejectError
from prejit.runtime.loader import load

PATH = "somewhere/blob"
SCORE = "score/b2"


def refused(run, complaint):
    with pytest.raises(RejectError, match=complaint) as caught:
        run()
    assert caught.value.path == PATH


def reject(path, complaint):
    with pytest.raises(RejectError, match=complaint) as caught:
        load(path).prepare()
    return caught.value


@functools.cache
def golden_config(name, wanted=None):
    first, *_ = contents = contents_of(GOLDEN / name)
    return contents[wanted or first].config


def replaced(**changes):
    return lambda config: dataclasses.replace(config, **changes)


def changed(config, name, /, **changes):
    assert name in {program.name for program in config.programs}
    programs = (
        dataclasses.replace(program, **changes) if program.name == name else program
        for program in config.programs
    )
    return dataclasses.replace(config, programs=tuple(programs))


def program(name, /, **changes):
    return lambda config: changed(config, name, **changes)


def program_of(config, name):
    return next(program for program in config.programs if program.name == name)


@contextlib.contextmanager
def in_little_memory(limit):
    tracemalloc = pytest.importorskip("tracemalloc")
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()
