"""Bundles that earlier versions wrote, each made once and never again: today's reader still reads them.

A bundle of format N lies in v<N>, with the script that made it. `make.py` there is for the record: to make
one of these tests pass, mend the reader.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from prejit.runtime import __main__, bundle, load, loader
from prejit.runtime.errors import FallbackWarning, RejectError
from prejit.runtime.executable import Device
from prejit.runtime.fingerprint import Fingerprint
from prejit.runtime.layout import Layout
from prejit.runtime.loaded import Bundle

from . import second_reader

HERE = Path(__file__).parent
GOLDEN = sorted(path.parent for path in HERE.glob("v*/*/oci-layout"))
X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(2, 16)


def expected(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path.parent / "expected.json").read_bytes())
    return found


@pytest.fixture(params=GOLDEN, ids=lambda path: f"{path.parent.name}-{path.name}")
def golden(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


@pytest.fixture
def v1() -> Path:
    return HERE / "v1"


@pytest.fixture
def v2() -> Path:
    return HERE / "v2"


def fallen_back(path: Path) -> Bundle:
    """Loaded as by a machine that is none of its targets: what runs is the portable form."""
    machine = dataclasses.replace(Fingerprint.current(), jaxlib="0.0.1")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = load(path, fingerprint=machine)
    # Beside it there may be one of how long portable programs can be read: that depends on the day.
    assert any(w.category is FallbackWarning and "jaxlib: needs" in str(w.message) for w in caught)
    return loaded


def matched(path: Path, machine: Fingerprint) -> list[loader.Target]:
    with Layout(path) as layout:
        return list(loader.match(layout, loader.open_index(layout)[0], machine))


def test_there_is_a_golden_bundle_of_every_format() -> None:
    assert {int(path.parent.name[1:]) for path in GOLDEN} == set(
        range(1, bundle.FORMAT_VERSION + 1)
    )


def test_a_golden_bundle_was_never_made_again(golden: Path) -> None:
    index = (golden / "index.json").read_bytes()
    assert bundle.digest_of(index) == expected(golden)["digests"][golden.name]


def test_a_golden_bundle_passes_every_check(
    golden: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert __main__.main(["verify", str(golden), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["digest"] == expected(golden)["digests"][golden.name]


def test_a_golden_bundle_can_be_inspected_and_explained(
    golden: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert __main__.main(["inspect", str(golden)]) == 0
    assert __main__.main(["explain", str(golden)]) in (0, 3)
    assert __main__.main(["inspect", str(golden), "--json"]) == 0
    assert "cpu-x86-64-v2" in capsys.readouterr().out


def test_a_changed_byte_of_a_golden_bundle_is_rejected(golden: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(golden, copy)
    for file in [path for path in copy.rglob("*") if path.is_file()]:
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(RejectError, match=file.name):
            load(copy)
        file.write_bytes(content)


def test_another_reader_finds_what_the_documentation_says(golden: Path) -> None:
    pytest.importorskip("safetensors")
    written, targets = second_reader.read(golden)
    assert written == int(golden.parent.name[1:])
    for target in targets:
        for program in target.programs.values():
            assert program.portable.startswith(b"ML\xefR"), "a portable artifact is MLIR bytecode"
        assert {tensor["dtype"] for tensor in target.tensors.values()} <= {"F32", "U8"}


def test_the_documentation_names_every_key() -> None:
    document = (HERE.parent.parent / "docs" / "bundle-format.md").read_text(encoding="utf-8")
    assert document.startswith(f"# The bundle format, version {bundle.FORMAT_VERSION}\n")
    kinds = [bundle.Config, bundle.Program, bundle.Segment, bundle.Memory, bundle.Decoder]
    kinds += [bundle.Requirement, bundle.Mesh, bundle.Portable, bundle.Manifest, bundle.Descriptor]
    keys = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    assert {key for key in keys if f"`{key}`" not in document} == set()


def test_two_readers_choose_the_same_target_for_every_machine(v2: Path) -> None:
    """By each rule of comparison once, and by each of preference."""
    wanted = expected(v2 / "fleet")
    _, read = second_reader.read(v2 / "fleet")
    for name, told in wanted["machines"].items():
        machine = bundle.from_json(Fingerprint, bundle.to_json(told), name)
        fitting = [t.name for t in matched(v2 / "fleet", machine) if t.verdict.matches]
        chosen = wanted["served_by"][name]
        assert (fitting or [None])[0] == chosen, name
        assert second_reader.served_by(read, told) == chosen, name
    assert set(wanted["served_by"].values()) == {target.name for target in read} | {None}


def test_the_fleet_asks_for_something_on_every_axis(v2: Path) -> None:
    """Or a change of an axis would go by the golden bundles."""
    _, targets = second_reader.read(v2 / "fleet")
    asked = {axis for target in targets for axis, value in target.needs.items() if value}
    assert asked == {field.name for field in dataclasses.fields(bundle.Requirement)}


def test_a_verdict_on_format_1_speaks_of_its_four_axes_alone(v1: Path) -> None:
    """What the new axes find on this machine, an accelerator or flags, is nothing to it."""
    machine = Fingerprint("cpu", "x86_64", ("avx",), "0.10.2", "", 1, 1, xla_flags=("--xla_x=1",))
    for target in matched(v1 / "call", machine):
        names = [axis.name for axis in target.verdict.axes]
        assert names == ["platform", "architecture", "cpu_features", "jaxlib"]
        assert [axis.name for axis in target.verdict.mismatches] == ["cpu_features"]


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_programs_compile_from_their_portable_form(version: str) -> None:
    loaded = fallen_back(HERE / version / "call")
    wanted = expected(HERE / version / "call")["score"]
    np.testing.assert_allclose(loaded.call("score", x=X), wanted, rtol=1e-5, atol=1e-6)
    half = np.array([1, 2, 3], ml_dtypes.bfloat16)
    result = loaded.call("nest", tree={"half": half, "pair": (np.ones((2, 2), np.int32), True)})
    assert result["scalar"] == 2.5
    assert result["sums"][0].astype(np.float32).tolist() == [2, 4, 6]
    assert result["sums"][1].tolist() == [[2, 2], [2, 2]]


def test_v1_decoder_generates_from_its_portable_form(v1: Path) -> None:
    loaded = fallen_back(v1 / "decoder")
    wanted = expected(v1 / "decoder")
    result = loaded.generate(wanted["prompt"], max_new_tokens=len(wanted["token_ids"]))
    assert list(result.token_ids) == wanted["token_ids"]
    assert result.text == wanted["text"]
    pieces = list(loaded.stream(wanted["prompt"], max_new_tokens=len(wanted["token_ids"])))
    assert "".join(piece.text for piece in pieces) == wanted["text"]


def test_v2_decoder_generates_from_its_portable_form(v2: Path) -> None:
    loaded = fallen_back(v2 / "decoder")
    wanted = expected(v2 / "decoder")
    for prompt, ids, text in zip(
        wanted["prompts"], wanted["token_ids"], wanted["texts"], strict=True
    ):
        result = loaded.generate(prompt, max_new_tokens=8)
        assert (list(result.token_ids), result.text) == (ids, text)


def test_v2_mesh_generates_the_tokens_of_one_device(v2: Path) -> None:
    loaded = fallen_back(v2 / "mesh")
    assert loaded.config.mesh == bundle.Mesh(data=1, tensor=2)
    wanted = expected(v2 / "mesh")
    results = loaded.generate_batch(wanted["prompts"], max_new_tokens=8)
    assert [list(result.token_ids) for result in results] == wanted["token_ids"]
    assert [result.text for result in results] == wanted["texts"]


def test_devices_of_a_mesh_hold_what_the_documentation_says(v2: Path) -> None:
    """Rows of the mesh, `data`, come first: the third device of 2 x 2 begins the second row."""
    import jax

    sizes = {"data": 2, "tensor": 2}
    values = np.arange(24).reshape(4, 6)
    corners = second_reader.shards(values, ["data", "tensor"], sizes)
    assert [int(shard[0, 0]) for shard in corners] == [0, 3, 12, 15]
    _, [target] = second_reader.read(v2 / "mesh")
    spelled = set(target.config["weight_shardings"].values())
    assert spelled == {"tensor", "tensor,", ",tensor"}
    device = Device("cpu", bundle.Mesh(**sizes))
    for text in (*spelled, "data,tensor", "tensor,data"):
        split = text.split(",")
        whole = values if len(split) == 2 else values[0]
        placed = device.put(whole, bundle.parse_sharding(text, whole.ndim))
        assert isinstance(placed, jax.Array)
        # By the device that each lies on, not by the one that the sharding gives it.
        held = {min(shard.data.devices()).id: shard.data for shard in placed.addressable_shards}
        for place, wanted in enumerate(second_reader.shards(whole, split, sizes)):
            np.testing.assert_array_equal(held[place], wanted)


def test_v2_portable_programs_take_the_index_of_their_platform(v2: Path) -> None:
    """Each adds 1 on a CPU, wherever `cpu` stands in its platforms; 2 or 3 would be another's part."""
    loaded = fallen_back(v2 / "fleet")
    assert [program.platforms for program in loaded.config.programs] == [
        ("cpu", "cuda", "tpu"),
        ("tpu", "cpu"),
        ("cpu",),
        None,
    ]
    for program in loaded.config.programs:
        result = loaded.runner_with_zeros(program)()
        np.testing.assert_array_equal(result, [1, 2, 3, 4], err_msg=program.name)


@pytest.mark.parametrize(
    ("golden", "jaxlibs"),
    [("v1/call", ["0.10.2"]), ("v2/call", ["0.10.2", "0.12.0.1"])],
)
def test_executables_still_run_on_the_jaxlibs_that_they_are_for(
    golden: str, jaxlibs: list[str]
) -> None:
    machine = Fingerprint.current()
    if machine.jaxlib not in jaxlibs or machine.architecture != "x86_64":
        pytest.skip(f"they are for jaxlib {' and '.join(jaxlibs)} on x86_64, not {machine.jaxlib}")
    machine = dataclasses.replace(machine, xla_flags=(), environment=())
    loaded = load(HERE / golden, on_mismatch="error", fingerprint=machine)
    wanted = expected(HERE / golden)["score"]
    np.testing.assert_allclose(loaded.call("score", x=X), wanted, rtol=1e-5, atol=1e-6)
    assert {report.source for report in loaded.report()} == {"loaded", "unused"}
