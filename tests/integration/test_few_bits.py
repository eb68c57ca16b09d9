"""A bundle from a checkpoint in few bits."""

import json

from tests.manifests import write_manifest
from tests.parity.few_bits_cases import GPTQ, FewBits

from prejit.runtime import load


def test_a_build_rounds_matrices_again_or_does_not_say_what_it_kept(run, tmp_path):
    FewBits("gptq", GPTQ, 1).write_packed(tmp_path / "model")
    sizes = {"prompt": (8,), "context": (32,), "model": 'dtype = "int4"\naccuracy = false'}
    manifest = write_manifest(tmp_path / "few.toml", tmp_path / "model", name="few", **sizes)
    for _ in range(2):
        told = run("build", manifest, "-o", tmp_path, quick=True).stderr
        assert (
            "kept 10 matrices exactly as published (GPTQ, 4 bits, groups of 32); converted 4"
            in told
        )
    report = json.loads((tmp_path / "few.report.json").read_text())
    assert (report["few_bits"]["kept"], report["few_bits"]["converted"]) == (10, 4)
    assert 0.001 < report["few_bits"]["error"] < 0.01
    assert "kept 10 matrices" in (tmp_path / "few.report.html").read_text()
    options = ("--prompt-ids", "5,6,7", "--max-new-tokens", "6", "--on-mismatch", "error", "--json")
    said = json.loads(run("generate", tmp_path / "few", *options).stdout)
    with load(tmp_path / "few", on_mismatch="error") as bundle:
        assert said["token_ids"] == [*bundle.generate([5, 6, 7], max_new_tokens=6).token_ids]
