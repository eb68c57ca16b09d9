"""Whether `prejit diff` names what differs between two bundles, and nothing else."""

import json
import shutil

import jax.numpy as jnp
import pytest
from tests.layouts import GOLDEN
from tests.unit.runtime.format.forging import replaced

from prejit.compiler import Program, build
from prejit.compiler.bench.bench_report import Ratio
from prejit.compiler.comparing.difference import compare_bundles, read_bundle
from prejit.compiler.comparing.speed import compare_speed, verdict
from prejit.runtime.errors import RejectError
from prejit.runtime.format.names import EXECUTABLES_MEDIA_TYPE


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    """A bundle, and the same one with a function added, one removed and one changed."""
    root = tmp_path_factory.mktemp("diff")
    paths = []
    for score, other, added, dtype in (
        (lambda x: jnp.tanh(x @ x), lambda x: x - 1, "gone", "float32[3]"),
        (lambda x: jnp.tanh(x @ x @ x), lambda x: x * 5, "new", "int32[3]"),
    ):
        x, w = "float32[64, 64]", {"w": jnp.full(3, float(len(added)))}
        programs = [
            Program("score", fn=score, args=[x]),
            Program("same", fn=lambda x: x + 1, args=[x]),
            Program(added, fn=other, args=[x]),
            Program("scaled", fn=lambda params, x: params["w"] * x, args=[dtype], params=w),
        ]
        options = {"cache": root / "cache", "workers": 1, "quiet": True}
        paths.append(build(programs, root / added, name="demo", **options).path)
    return paths[0], paths[1]


def test_what_changed_is_named_and_the_command_has_the_status_of_diff(bundles, said):
    found = compare_bundles(*map(read_bundle, bundles))
    assert not found.is_equal
    assert (found.added, found.removed) == (("new for cpu-host",), ("gone for cpu-host",))
    assert found.same == 1
    (scaled, changed) = sorted(found.changed, key=lambda each: each.program)
    assert scaled.program == "scaled"
    assert "int32[3]" in scaled.fields["arguments"][1]
    assert (changed.program, changed.target) == ("score", "cpu-host")
    assert (changed.has_new_program, changed.has_new_executable) == (True, True)
    assert changed.operations == {"stablehlo.dot_general tensor<64x64xf32>": (1, 2)}
    assert changed.fields.keys() == {"state"}  # the place of the lambda in its file
    before, after = changed.code
    assert before.digest == after.digest  # a product is a routine of XLA's, called once more
    assert min(before.code_bytes, sum(before.instructions.values())) > 0
    assert found.versions == found.requirements == {}
    [layer] = found.layers["cpu-host"]
    assert "weights" in layer
    before, after = map(str, bundles)
    assert said("diff", before, before).startswith("equal: sha256:")
    printed = said("diff", before, after, status=1)
    assert "programs: 1 added, 1 removed, 2 changed, 0 compiled differently, 1 the same" in printed
    assert "StableHLO: stablehlo.dot_general tensor<64x64xf32> 1 -> 2" in printed
    described = json.loads(said("diff", before, after, "--json", status=1))
    assert (described["equal"], described["speed"]) == (False, None)
    changed = {each["program"]: each["operations"] for each in described["changed"]}
    assert changed["score"] == {"stablehlo.dot_general tensor<64x64xf32>": [1, 2]}


def test_names_of_a_bundle_send_nothing_to_a_terminal(recipe, tmp_path, said):
    wrong = recipe.configured(replaced(versions={"jax": "\x1b[31m\u202e"})).write(tmp_path / "b")
    assert r"\x1b[31m\u202e" in said("diff", recipe.write(tmp_path / "a"), wrong, status=1)


def test_damage_is_an_error_no_difference(bundles, tmp_path):
    found = compare_bundles(read_bundle(GOLDEN / "kernels"), read_bundle(GOLDEN / "decoder"))
    assert not found.is_equal
    assert found.added or found.changed
    shutil.copytree(bundles[1], tmp_path / "damaged")
    damaged = read_bundle(tmp_path / "damaged")
    (target,) = damaged.targets.values()
    at = target.contents.manifest.layer(EXECUTABLES_MEDIA_TYPE).digest.removeprefix("sha256:")
    path = tmp_path / "damaged" / "blobs" / "sha256" / at
    content = bytearray(path.read_bytes())
    for program_ in target.contents.config.programs:
        content[program_.executable.offset + program_.executable.size // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(content)
    with pytest.raises(RejectError):
        compare_bundles(read_bundle(bundles[0]), damaged)


def test_both_bundles_are_measured_in_turns_and_slower_exceeds_spread_and_tolerance(bundles):
    said = []
    speed = compare_speed(*map(read_bundle, bundles), said.append, rounds=2)
    assert speed.why_not == ""
    assert {row.name for row in speed.rows} == {"call score", "call same", "call scaled"}
    assert all(row.before > 0 and row.after > 0 for row in speed.rows)
    assert said[-1] == "round 2 of 2"
    for ratio, found in (
        (Ratio(1.2, 1.2, 1.1, 1.3), "slower"),
        (Ratio(1.2, 1.2, 0.9, 1.3), "same"),  # the spread reaches below 1
        (Ratio(1.0, 1.2, 1.1, 1.3), "same"),  # the best runs are as fast
        (Ratio(1.04, 1.04, 1.01, 1.1), "same"),  # within the tolerance
        (Ratio(0.8, 0.8, 0.7, 0.9), "faster"),
        (Ratio(0.99, 0.8, 0.7, 0.9), "same"),
    ):
        assert verdict(ratio) == found
