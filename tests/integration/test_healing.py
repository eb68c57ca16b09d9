"""A build cache whose programs of a model are damaged: the next build makes them again, and says so."""

import json
import shutil

import pytest
from tests.decoders import build, write_random

from prejit.compiler.store.directory_store import DirectoryStore
from prejit.runtime import load

pytestmark = pytest.mark.thorough


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_damaged_programs_of_a_model_are_lowered_again_by_the_same_build(
    warm, fresh_cache, tmp_path
):
    """They are damaged in the cache, and what was made of them is not there: all is needed again."""
    model = write_random("gpt2", tmp_path / "gpt2")
    sizes = {"batch": (1,), "prompt": (8,), "context": (20,)}
    bundle = build(warm, model, tmp_path, fresh_cache, **sizes)
    digest = load(bundle).digest
    store, actions = DirectoryStore.open(fresh_cache), fresh_cache / "v1" / "actions"
    damaged = set[str]()
    for action in (actions / "lower").glob("*.json"):
        for each in json.loads(action.read_bytes().partition(b"\n")[2])["blobs"]:
            path = store.blob_path(each)
            if each not in damaged:
                flip(path)
            damaged.add(each)
    for kind in ("compile", "pack"):
        shutil.rmtree(actions / kind)
    shutil.rmtree(bundle)
    command = ("build", tmp_path / "decoder.toml", "-o", tmp_path, "--cache", fresh_cache)
    done = warm.prejit(*command, quick=True)
    assert done.returncode == 0, done.stderr
    programs = load(bundle).config.programs
    again = "was damaged or deleted in the build cache and is lowered again"
    told = [line for line in done.stderr.splitlines() if again in line]
    assert len(told) == len(programs)
    assert load(bundle).digest == digest
    for each in damaged:
        assert store.read_blob(each) is not None
