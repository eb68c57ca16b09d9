"""One build by several processes, each on a machine of its own, that share nothing but a store."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from tests.warm import WarmProcess, WarmPython

BUCKETS = list(range(1, 6))
MANIFEST = f"""
[bundle]
name = "tiny"
[[program]]
name = "p"
function = "tiny_model:f"
args = {{ x = "float32[{{n}}]" }}
buckets = {{ n = {BUCKETS} }}
[[target]]
name = "cpu-x86-64-v2"
"""


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("project")
    (directory / "tiny_model.py").write_text(
        "def f(x): return x * 2 + 1\ndef g(x): return x * 3 - 1\n"
    )
    (directory / "tiny.toml").write_text(MANIFEST)
    return directory / "tiny.toml"


Start = Callable[..., WarmProcess]


@pytest.fixture
def start(warm: WarmPython, manifest: Path, tmp_path: Path) -> Start:
    """`start(shard, store)`: a build on a machine of its own."""

    def begin(
        shard: str | None,
        store: str | Path,
        machine: str | None = None,
        manifests: Sequence[Path] = (manifest,),
    ) -> WarmProcess:
        home = tmp_path / (machine or f"machine {shard or 0}".replace("/", " of "))
        options = ["--cache", home / "cache", "-o", home / "out", "--store", store, "--json"]
        options += [] if shard is None else ["--shard", shard]
        return warm.start("build", *manifests, *options, quick=True)

    return begin


def finished(*processes: WarmProcess) -> tuple[list[dict[str, Any]], Counter[str]]:
    """What all of them print, and what they compiled together."""
    found, programs = [], Counter[str]()
    for each in processes:
        output, errors = each.communicate()
        assert each.returncode == 0, errors
        found += json.loads(output)
        programs += Counter(re.findall(r"^compiled (\S+) for", errors, re.MULTILINE))
    return found, programs


def test_shards_of_several_manifests_compile_each_program_once(
    start: Start, manifest: Path, tmp_path: Path
) -> None:
    """All begin at once, and each bundle is packed by one shard, whatever the others pack."""
    other, text = manifest.with_name("other.toml"), MANIFEST
    for change in (('"tiny"', '"other"'), ('"p"', '"q"'), ("tiny_model:f", "tiny_model:g")):
        text = text.replace(*change)
    other.write_text(text)
    both = [manifest, other]
    shards = [start(f"{number}/3", tmp_path / "store", manifests=both) for number in (1, 2, 3)]
    built, programs = finished(*shards)
    assert programs == Counter(f"{name}/n{n}" for n in BUCKETS for name in ("tiny/p", "other/q"))
    assert sum(each["compiled"] for each in built) == 2 * len(BUCKETS)
    assert all(each["compiled"] + each["cached"] == len(BUCKETS) for each in built)
    digests = {}
    for name in ("tiny", "other"):
        ours = [each for each in built if Path(each["path"]).name == name]
        assert len({each["packed_by"] for each in ours}) == 1
        for each in ours:
            is_packer = each["packed_by"] == int(each["shard"].partition("/")[0])
            assert each["packed_here"] == is_packer == Path(each["path"]).exists()
        assert [each["packed_here"] for each in ours].count(True) == 1
        [digests[name]] = {each["digest"] for each in ours}
    # A build of the same without shards finds it all, and makes the same bundles.
    plain, programs = finished(start(None, tmp_path / "store", manifests=both))
    assert not programs
    assert {Path(each["path"]).name: each["digest"] for each in plain} == digests


def test_shards_that_never_start_are_not_missed(start: Start, tmp_path: Path) -> None:
    built, programs = finished(start("2/4", tmp_path / "store"))
    assert programs == Counter({f"p/n{n}": 1 for n in BUCKETS})
    assert built[0]["packed_by"] == 2


def test_a_shard_without_a_store_that_it_may_write_is_refused(
    warm: WarmPython, manifest: Path, tmp_path: Path
) -> None:
    def refused(*options: str | Path) -> CompletedProcess[str]:
        options = ("--cache", tmp_path / "cache", "-o", tmp_path / "out", *options)
        done = warm.prejit("build", manifest, "--shard", "1/2", *options)
        assert done.returncode == 2
        return done

    assert "expected a shared store that this build may write, found none" in refused().stderr
    reads = tmp_path / "reads.toml"
    reads.write_text(f'[[store]]\nurl = "{(tmp_path / "store").as_uri()}"\n')
    assert "found one that it only reads" in refused("--store", reads).stderr
    assert not (tmp_path / "out").exists()
