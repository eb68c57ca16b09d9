"""A trained decoder in four bits, from the manifest to the tokens of fresh processes."""

import dataclasses
import json

import pytest
from tests.manifests import write_manifest

from prejit.runtime import Fingerprint, load

from .test_accuracy import STORY

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def built(run, stories, tmp_path_factory):
    at = tmp_path_factory.mktemp("int4")
    (at / "held.txt").write_text(4 * STORY, encoding="utf-8")  # the last 2,048 tokens only measure
    sizes = {"batch": (1, 4), "prompt": (32,), "context": (128,)}
    lines = 'dtype = "int4"\nevaluation = "held.txt"'
    manifest = write_manifest(at / "four.toml", stories[0], name="four", model=lines, **sizes)
    told = run("build", manifest, "-o", at, quick=True)
    assert "int4: rounded 20 matrices by the first" in told.stderr
    return at / "four"


def test_a_story_in_four_bits_is_hardly_less_likely_and_the_same_in_a_fresh_process(run, built):
    (target,) = json.loads(run("inspect", built, "--json").stdout)["targets"]
    config = target["config"]
    accuracy = config["accuracy"]
    assert accuracy["weights"] == "int4"
    # Of 64 inputs; the 172 of the MLP's last matrix are not whole groups.
    rise = accuracy["perplexity_millionths"] / accuracy["float32_perplexity_millionths"] - 1
    assert 0 < rise < 0.02
    products = {each["product"].partition(" ")[0] for each in config.get("forms", ())}
    assert products in ({"int4", "int8"}, set())
    options = ("--prompt-ids", "1", "--max-new-tokens", "60", "--on-mismatch", "error", "--json")
    first, second = (json.loads(run("generate", built, *options).stdout) for _ in range(2))
    assert first["token_ids"] == second["token_ids"]
    assert first["text"].startswith("Once upon a time")
    bundle = load(built, on_mismatch="error")
    prompts = [[1], [1, 403, 407], first["token_ids"][:20], first["token_ids"][:9]]
    alone = [bundle.generate(each, max_new_tokens=30).token_ids for each in prompts]
    assert alone[0] == tuple(first["token_ids"][:30])
    assert [each.token_ids for each in bundle.generate_batch(prompts, max_new_tokens=30)] == alone


def test_tokens_of_avx2_depend_on_no_batch_or_cut(run, stories, tmp_path, no_warnings_of_fallback):
    """x is rounded to bytes, which no other row and no prompt's end may change."""
    sizes = {"batch": (1, 4), "prompt": (8, 32), "context": (128,)}
    more = {"targets": ("cpu-x86-64-v3",), "model": 'dtype = "int4"\naccuracy = false'}
    manifest = write_manifest(tmp_path / "avx2.toml", stories[0], name="avx2", **sizes, **more)
    run("build", manifest, "-o", tmp_path, quick=True)
    with load(tmp_path / "avx2", on_mismatch="error") as bundle:
        prompts = [[1], [1, 403, 407], [1, *range(300, 340)]]
        alone = [bundle.generate(each, max_new_tokens=30).token_ids for each in prompts]
        together = bundle.generate_batch(prompts, max_new_tokens=30)
        assert [each.token_ids for each in together] == alone
        for cut in (1, 6, 20):
            begun = [[*each, *ids[:cut]] for each, ids in zip(prompts, alone, strict=True)]
            rest = [bundle.generate(each, max_new_tokens=30 - cut).token_ids for each in begun]
            assert rest == [each[cut:] for each in alone]
    other = dataclasses.replace(Fingerprint.current(), jaxlib="0.0.1")
    with load(tmp_path / "avx2", fingerprint=other) as bundle:  # which rounds nothing
        answers = list(bundle.check_answers())
    assert {each.ran for each in answers} == {"portable"}
    assert max(each.share for each in answers) < 0.5
