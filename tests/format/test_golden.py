"""Bundles that earlier versions wrote, each made once and never again: today's reader still reads them.

A bundle of format N lies in v<N>, with the script that made it. `make.py` there is for the record: to make
one of these tests pass, mend the reader.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from prejit.runtime import __main__, bundle, load
from prejit.runtime.errors import FallbackWarning, RejectError
from prejit.runtime.fingerprint import Fingerprint
from prejit.runtime.loaded import Bundle

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


def fallen_back(path: Path) -> Bundle:
    """Loaded as by a machine that is none of its targets: what runs is the portable form."""
    machine = dataclasses.replace(Fingerprint.current(), jaxlib="0.0.1")
    with pytest.warns(FallbackWarning, match="jaxlib: needs"):
        return load(path, fingerprint=machine)


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
    """Written from docs/bundle-format.md alone, with the libraries of safetensors and zstd."""
    zstandard, safetensors = pytest.importorskip("zstandard"), pytest.importorskip("safetensors")
    blobs = golden / "blobs" / "sha256"

    def blob(descriptor: dict[str, Any]) -> bytes:
        content = (blobs / descriptor["digest"].removeprefix("sha256:")).read_bytes()
        assert descriptor["digest"] == f"sha256:{hashlib.sha256(content).hexdigest()}"
        assert descriptor["size"] == len(content)
        return content

    def canonical(value: object) -> bytes:
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii")

    index = json.loads((golden / "index.json").read_bytes())
    assert (golden / "index.json").read_bytes() == canonical(index)
    digest = index["annotations"].pop("dev.prejit.index-digest")
    assert digest == f"sha256:{hashlib.sha256(canonical(index)).hexdigest()}"
    for target in index["manifests"]:
        manifest = json.loads(blob(target))
        config = json.loads(blob(manifest["config"]))
        assert blob(manifest["config"]) == canonical(config)
        assert (
            canonical(config["requirement"]).decode()
            == (target["annotations"]["dev.prejit.requirement"])
        )
        layers = {
            layer["mediaType"].removeprefix("application/vnd.prejit."): blob(layer)
            for layer in manifest["layers"]
        }
        for program in config["programs"]:
            for pack, key in (("executables", "executable"), ("stablehlo", "portable")):
                segment = program[key]
                start = segment["offset"]
                frame = layers[f"{pack}.v1+zstd"][start : start + segment["size"]]
                assert segment["digest"] == f"sha256:{hashlib.sha256(frame).hexdigest()}"
                raw = zstandard.ZstdDecompressor().decompress(frame)
                assert len(raw) == segment["raw_size"]
                assert segment["raw_digest"] == f"sha256:{hashlib.sha256(raw).hexdigest()}"
            assert raw.startswith(b"ML\xefR"), "a portable artifact is MLIR bytecode"
        weights = layers["weights.v1.safetensors"]
        header = int.from_bytes(weights[:8], "little")
        found = dict(safetensors.deserialize(weights))
        for names in config["weight_sets"].values():
            for name in names:
                start, _ = json.loads(weights[8 : 8 + header])[name]["data_offsets"]
                assert (8 + header + start) % 64 == 0
                assert found[name]["dtype"] == "F32"


def test_v1_programs_compile_from_their_portable_form(v1: Path) -> None:
    loaded = fallen_back(v1 / "call")
    np.testing.assert_allclose(
        loaded.call("score", x=X), expected(v1 / "call")["score"], rtol=1e-5, atol=1e-6
    )
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


def test_v1_executables_still_run_on_the_jaxlib_that_they_are_for(v1: Path) -> None:
    wanted = expected(v1 / "call")["score"]
    machine = Fingerprint.current()
    if machine.jaxlib != "0.10.2" or machine.architecture != "x86_64":
        pytest.skip(f"they are for jaxlib 0.10.2 on x86_64, this is {machine.jaxlib}")
    loaded = load(v1 / "call", on_mismatch="error")
    np.testing.assert_allclose(loaded.call("score", x=X), wanted, rtol=1e-5, atol=1e-6)
    assert {report.source for report in loaded.report()} == {"loaded", "unused"}
