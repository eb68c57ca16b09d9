"""Loads of a bundle while another process replaces it, in each of the ways in which bundles are replaced."""

import ctypes
import itertools
import json
import os
import shutil
import traceback

from tests.layouts import blobs_of, index_file

from prejit.compiler.pipeline.layout_writing import write_layout

from . import faults
from .races import attach_note

_EXCHANGE = 2  # RENAME_EXCHANGE of renameat2


def load_often(given):
    """Load bundles until each was replaced in each way, call their programs, and print what they gave."""
    paths, least, right, cache, counts_file = given
    counts = {}
    errors = []
    for number, path in enumerate(itertools.cycle(paths)):
        is_enough = number >= least and counts_file.exists()
        if is_enough and all(json.loads(counts_file.read_text()).values()):
            break
        try:
            found = faults.value_of(path, cache)
            assert found in right, f"{path}: {found}"
            counts[str(found)] = counts.get(str(found), 0) + 1
        except Exception:
            errors.append(traceback.format_exc())
    print(json.dumps({"counts": counts, "errors": errors}))
    return 0


def replace_often(given):
    """Replace bundles in each of the ways of `WAYS`, in turn, for ever."""
    sources, direct, turned, counts_file = given
    counts = dict.fromkeys((way.__name__ for way in WAYS), 0)
    for number, source in enumerate(itertools.cycle(sources)):
        way = WAYS[number // len(sources) % len(WAYS)]
        way(source, turned if way is link else direct, number)
        counts[way.__name__] += 1
        at = counts_file.with_name("counts.new")
        at.write_text(json.dumps(counts))
        at.replace(counts_file)
    return 0


def rebuild(source, path, number):
    write_layout(path, index_file(source).read_bytes(), blobs_of(source))


def annotate(source, path, number):
    attach_note(path, number % 5)


def exchange(source, path, number):
    new = path.with_name(f"{path.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    shutil.copytree(source, new)
    call = ctypes.CDLL(None, use_errno=True).renameat2
    at_cwd = -100
    if call(at_cwd, os.fsencode(new), at_cwd, os.fsencode(path), _EXCHANGE):
        raise OSError(ctypes.get_errno(), "renameat2")
    shutil.rmtree(new)


def pull(source, path, number):
    """Write as a client of a registry does: blobs by rename, then the index, then stale blobs go."""
    for file in [*(source / "blobs" / "sha256").iterdir(), source / "index.json"]:
        to = path / file.relative_to(source)
        part = to.with_name(f".{to.name}.part")
        shutil.copyfile(file, part)
        part.replace(to)
    kept = {file.name for file in (source / "blobs" / "sha256").iterdir()}
    for file in (path / "blobs" / "sha256").iterdir():
        if file.name not in kept:
            file.unlink()


def link(source, path, number):
    copy = path.with_name(f"{path.name}.{number}")
    shutil.copytree(source, copy)
    before = os.readlink(path) if path.is_symlink() else None
    new = path.with_name(f"{path.name}.link")
    new.unlink(missing_ok=True)
    new.symlink_to(copy)
    new.replace(path)
    if before is not None:
        shutil.rmtree(before)


WAYS = (rebuild, annotate, exchange, pull, link)  # how a bundle is replaced
