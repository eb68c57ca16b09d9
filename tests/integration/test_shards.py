"""One build by several processes, each on a machine of its own, that share nothing but a store."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from tests.manifests import functions_manifest

pytestmark = pytest.mark.thorough

BUCKETS = list(range(1, 6))
NAMES = ("tiny", "other")


@pytest.fixture(scope="module")
def manifests(tmp_path_factory):
    directory = tmp_path_factory.mktemp("project")
    (directory / "shard_functions.py").write_text(
        "def tiny(x): return x * 2 + 1\ndef other(x): return x * 3 - 1\n"
    )
    keys = 'function = "shard_functions:%s"; args = { x = "float32[{n}]" }; buckets = { n = %s }'
    return [
        functions_manifest(
            directory / f"{name}.toml", {"p": keys % (name, BUCKETS)}, ["cpu-x86-64-v2"]
        )
        for name in NAMES
    ]


def finished(*processes):
    """What all of them print, and what they compiled together."""
    found, programs = [], Counter[str]()
    for each in processes:
        output, errors = each.communicate()
        assert each.returncode == 0, errors
        found += json.loads(output)
        programs += Counter(re.findall(r"^compiled (\S+) for", errors, re.MULTILINE))
    return found, programs


def test_shards_of_several_manifests_compile_each_program_once(warm, manifests, tmp_path):
    """All begin at once, and each bundle is packed by one shard, whatever the others pack."""

    def start(machine, *options):
        home = tmp_path / machine
        places = ("--cache", home / "cache", "-o", home / "out", "--store", tmp_path / "store")
        return warm.start("build", *manifests, *places, "--json", *options, quick=True)

    built, programs = finished(*(start(f"m{n}", "--shard", f"{n}/3") for n in (1, 2, 3)))
    assert programs == Counter(f"{name}/p/n{n}" for n in BUCKETS for name in NAMES)
    assert sum(each["compiled"] for each in built) == len(NAMES) * len(BUCKETS)
    assert all(each["compiled"] + each["cached"] == len(BUCKETS) for each in built)
    digests = {}
    for name in NAMES:
        ours = [each for each in built if Path(each["path"]).name == name]
        assert len({each["packed_by"] for each in ours}) == 1
        for each in ours:
            is_packer = each["packed_by"] == int(each["shard"].partition("/")[0])
            assert each["packed_here"] == is_packer == Path(each["path"]).exists()
        assert [each["packed_here"] for each in ours].count(True) == 1
        [digests[name]] = {each["digest"] for each in ours}
    # A build of the same without shards finds it all, and makes the same bundles.
    plain, programs = finished(start("alone"))
    assert not programs
    assert {Path(each["path"]).name: each["digest"] for each in plain} == digests


def test_a_shard_without_a_store_that_it_may_write_is_refused(warm, manifests, tmp_path):
    reads = tmp_path / "reads.toml"
    reads.write_text(f'[[store]]\nurl = "{(tmp_path / "store").as_uri()}"\n')
    command = ("build", manifests[0], "--shard", "1/2", "--cache", tmp_path / "cache")
    for options, found in (((), "found none"), (("--store", reads), "one that it only reads")):
        done = warm.prejit(*command, "-o", tmp_path / "out", *options)
        assert done.returncode == 2
        assert "expected a shared store that this build may write, " in done.stderr
        assert found in done.stderr
    assert not (tmp_path / "out").exists()
