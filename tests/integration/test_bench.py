"""`prejit bench` on a decoder, an encoder and a second bundle: files, comparison, exit status."""

import json

import pytest

from prejit.runtime.__main__ import main

pytestmark = pytest.mark.thorough


def bench(*arguments, out, status=0, runs=3):
    """What `bench -o` writes. With fewer than three runs no time is compared."""
    options = ("--runs", runs, "--seconds", "0.2", "-o", out)
    assert main(["bench", *map(str, (*arguments, *options))]) == status
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def baseline(decoder_dir, tmp_path_factory):
    return bench(decoder_dir, out=tmp_path_factory.mktemp("baseline") / "b.json")


def test_everything_of_a_decoder_is_measured(baseline):
    rows = {row["name"]: row for row in baseline["rows"]}
    for name in (
        *("exec to first result", "load", "peak RSS", "private", "sum of 64 MB"),
        *("first token, prompt 16, alone", "further token, alone", "further token, 3 together"),
        *("prefill/b1-t3-c24", "prefill/b3-t10-c72", "decode/b1-c24", "decode/b3-c72"),
        *("16 requests, all of them", "16 requests, one's first token", "16 requests, padding"),
        "b3: c24 to c72",
    ):
        assert rows[name]["samples"] >= 1
        assert rows[name]["p50"] > 0
    assert rows["decode/b3-c72"]["per_second"] == pytest.approx(3 / rows["decode/b3-c72"]["p50"])
    last, every = rows["16 requests, one's last token"], rows["16 requests, all of them"]
    assert last["samples"] % 16 == 0
    assert last["p50"] <= every["maximum"]
    assert rows["exec to first result"]["p50"] > rows["load"]["p50"]
    assert rows["peak RSS"]["p50"] > rows["private"]["p50"]
    assert rows["16 requests, padding"]["minimum"] >= 1
    assert {program["source"] for program in baseline["programs"]} <= {"loaded", "unused"}
    assert baseline["comparison"] is None


def test_a_slower_bundle_fails(decoder_dir, baseline, tmp_path, capsys):
    file, page, told = tmp_path / "b.json", tmp_path / "p.html", tmp_path / "told.json"
    # 1,000 %: what is tested is not how quiet this machine is.
    compare = (decoder_dir, "--baseline", file, "--tolerance", "1000")
    quick = "exec to first result"
    for row in baseline["rows"]:
        if row["name"] == quick:
            for key in ("minimum", "p25", "p50", "p75", "maximum"):
                row[key] /= 100
        if row["name"] == "decode/b1-c24":
            row["name"] = "decode/b1-c16"
        if row["name"] == "peak RSS":
            row["work"] = "something else"
    file.write_text(json.dumps(baseline))
    comparison = bench(*compare, "--page", page, out=told, status=9)["comparison"]
    printed = capsys.readouterr()
    assert printed.err.rpartition("error[regression]: ")[2].count(" x)") == 1
    assert f"{quick}: expected" in printed.err
    for line in (
        "only before: decode/b1-c16",
        "only now: decode/b1-c24",
        "not compared, because the work differs: peak RSS: expected something else",
    ):
        assert line in printed.out
    assert "1 row worse" in page.read_text()
    assert [d["name"] for d in comparison["deltas"] if d["verdict"] == "worse"] == [quick]


def test_an_encoder_is_measured_by_shape_and_with_mixed_sentences(encoder_dir, tmp_path):
    found = bench(encoder_dir, out=tmp_path / "b.json", runs=1)["rows"]
    rows = {row["name"]: row for row in found if row["group"] == "encode"}
    mixed = "encode 32 of mixed lengths"
    assert list(rows) == ["encode 4x16", mixed, f"{mixed}, padding"]
    assert [row["items"] for row in rows.values()] == [4, 32, None]
    assert rows[f"{mixed}, padding"]["minimum"] > 1
    assert {"exec to first result", "peak RSS"} <= {row["name"] for row in found}


def test_a_full_disk_costs_the_file_and_not_what_was_measured(decoder_dir, ran):
    quick = ("--runs", "1", "--seconds", "0.1")
    said = ran("bench", decoder_dir, *quick, "-o", "/dev/full", status=6)
    assert "first token, prompt 16, alone" in said.out
    assert "/dev/full: cannot write: No space left on device" in said.err
