"""`prejit bench` on a real decoder and a real second bundle: files, comparison, exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.extent import ALL
from tests.parity.encoder_cases import Case

from .conftest import Run, write_manifest

QUICK = ("--runs", "3", "--seconds", "0.2")


@pytest.fixture(scope="module")
def bundles(
    run: Run, stories: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """Two bundles of one model; the second has one batch less, and is built for `make test-all` alone."""
    directory = tmp_path_factory.mktemp("bench")
    manifests = []
    for name, batch in (("one", (1, 2)), ("two", (1,))):
        sizes: dict[str, Any] = {"batch": batch, "prompt": (4,), "context": (32, 64)}
        manifests.append(write_manifest(directory / f"{name}.toml", stories[0], name=name, **sizes))
    run("build", *(manifests if ALL else manifests[:1]), "-o", directory, quick=True)
    return directory / "one", directory / "two"


@pytest.fixture(scope="module")
def baseline(
    run: Run, bundles: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What `bench -o` wrote of the first."""
    out = tmp_path_factory.mktemp("baseline") / "b.json"
    said = run("bench", bundles[0], *QUICK, "-o", out).stdout
    plain: dict[str, Any] = json.loads(out.read_text())
    for row in plain["rows"]:
        assert row["name"] in said
    return plain


def test_everything_of_a_decoder_is_measured(baseline: dict[str, Any]) -> None:
    rows = {row["name"]: row for row in baseline["rows"]}
    for name in (
        *("exec to first result", "load", "peak RSS", "private", "sum of 64 MB"),
        *("first token, prompt 16, alone", "further token, alone", "further token, 2 together"),
        *("prefill/b1-t4-c32", "prefill/b2-t4-c64", "decode/b1-c32", "decode/b2-c64"),
        *("16 requests, all of them", "16 requests, one's first token", "16 requests, padding"),
        "b2: c32 to c64",
    ):
        assert rows[name]["samples"] >= 1
        assert rows[name]["p50"] > 0
    assert rows["decode/b2-c64"]["per_second"] == pytest.approx(2 / rows["decode/b2-c64"]["p50"])
    assert rows["16 requests, one's last token"]["samples"] % 16 == 0
    assert (
        rows["16 requests, one's last token"]["p50"] <= rows["16 requests, all of them"]["maximum"]
    )
    assert rows["exec to first result"]["p50"] > rows["load"]["p50"]
    assert rows["peak RSS"]["p50"] > rows["private"]["p50"]
    assert rows["16 requests, padding"]["minimum"] >= 1
    assert {program["source"] for program in baseline["programs"]} <= {"loaded", "unused"}
    assert baseline["comparison"] is None


def test_a_slower_bundle_fails_and_an_equal_one_passes(
    run: Run, bundles: tuple[Path, Path], baseline: dict[str, Any], tmp_path: Path
) -> None:
    file, page, told = tmp_path / "b.json", tmp_path / "p.html", tmp_path / "told.json"
    file.write_text(json.dumps(baseline))
    # 1,000 %: what is tested is not how quiet this machine is.
    compare = ("bench", bundles[0], *QUICK, "--baseline", file, "--tolerance", "1000")
    said = run(*compare).stdout
    assert "no rows worse" in said
    quick = "exec to first result"
    for row in baseline["rows"]:
        if row["name"] == quick:
            for key in ("minimum", "p25", "p50", "p75", "maximum"):
                row[key] /= 100
        if row["name"] == "decode/b1-c32":
            row["name"] = "decode/b1-c16"
        if row["name"] == "peak RSS":
            row["work"] = "something else"
    file.write_text(json.dumps(baseline))
    failed = run(*compare, "--page", page, "-o", told, status=9)
    assert failed.stderr.rpartition("error[regression]: ")[2].count(" x)") == 1
    assert f"{quick}: expected" in failed.stderr
    assert "only before: decode/b1-c16" in failed.stdout
    assert "only now: decode/b1-c32" in failed.stdout
    assert (
        "not compared, because the work differs: peak RSS: expected something else" in failed.stdout
    )
    assert "1 row worse" in page.read_text()
    comparison = json.loads(told.read_text())["comparison"]
    assert [d["name"] for d in comparison["deltas"] if d["verdict"] == "worse"] == [quick]


@pytest.mark.thorough
def test_two_bundles_are_measured_in_turns(
    run: Run, bundles: tuple[Path, Path], tmp_path: Path
) -> None:
    out = tmp_path / "b.json"
    one, two = bundles
    done = run("bench", one, "--against", two, *QUICK, "--tolerance", "1000", "-o", out, "--json")
    plain = json.loads(out.read_text())
    assert plain == json.loads(done.stdout)
    comparison = plain["comparison"]
    assert comparison["other"] == str(two)
    assert comparison["drift"] == 1
    assert comparison["is_same_machine"]
    deltas = {delta["name"]: delta for delta in comparison["deltas"]}
    assert {"exec to first result", "decode/b1-c64", "further token, alone"} <= deltas.keys()
    assert "decode/b2-c64" in comparison["only_after"]
    assert "bundle: expected two, found one" in comparison["differences"]
    for delta in deltas.values():
        assert delta["ratio"]["low"] <= delta["ratio"]["middle"] <= delta["ratio"]["high"]


def test_an_encoder_is_measured_by_shape_and_with_mixed_sentences(run: Run, tmp_path: Path) -> None:
    config = {
        **{"model_type": "bert", "architectures": ["BertModel"], "hidden_act": "gelu"},
        **{"hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2},
        **{"num_attention_heads": 3, "vocab_size": 40, "max_position_embeddings": 64},
        **{"type_vocab_size": 2, "layer_norm_eps": 1e-12, "pad_token_id": 0},
    }
    Case("tiny", config, 77, pooling=("mean_tokens",), normalize=True).write(tmp_path / "model")
    manifest = tmp_path / "encoder.toml"
    manifest.write_text(
        '[bundle]\nname = "encoder"\n[model]\nsource = "model"\n'
        '[encode]\nshapes = [[1, 8], [2, 16]]\n[[target]]\nname = "cpu-host"\n'
    )
    run("build", manifest, "-o", tmp_path, quick=True)
    plain = json.loads(run("bench", tmp_path / "encoder", *QUICK, "--json").stdout)
    rows = {row["name"]: row for row in plain["rows"] if row["group"] == "encode"}
    assert list(rows) == [
        *("encode 1x8", "encode 2x16", "encode 32 of mixed lengths"),
        "encode 32 of mixed lengths, padding",
    ]
    assert [row["items"] for row in rows.values()] == [1, 2, 32, None]
    assert rows["encode 32 of mixed lengths, padding"]["minimum"] > 1
    assert {"exec to first result", "peak RSS"} <= {row["name"] for row in plain["rows"]}
