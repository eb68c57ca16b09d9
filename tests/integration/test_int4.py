"""Models in few bits, from the manifest to the tokens of fresh processes, and what they lose."""

import dataclasses
import hashlib
import json
import re
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from tests.extent import cases
from tests.manifests import encoder_manifest, write_manifest
from tests.parity.encoder_family_cases import WIDE_REFERENCE, add_pooling, wide_cases
from tests.parity.few_bits_cases import GPTQ, FewBits
from tests.parity.test_encoder_parity import write

from prejit.runtime import Fingerprint, load

from .conftest import ROOT

STORY = """\
One day, a boy named Tom went to the park with his mom. Tom had a big red ball. He liked to kick the
ball and run after it. "Look, Mom!" he said. "I can kick it very far!" His mom smiled and clapped
her hands.

Tom kicked the ball again. It went up, up, up, and it got stuck in a tall tree. Tom was sad. He did
not know what to do. He wanted to cry. "My ball is in the tree," he said. "I can not get it."

Then a little bird came. The bird saw that Tom was sad. "Why are you sad?" asked the bird. "My ball
is stuck in the tree," said Tom. "I can help you," said the bird. The bird flew up to the top of the
tree and pushed the ball. The ball fell down, and Tom was very happy. "Thank you, little bird!" he
said.

The next day, Tom came back to the park. He had some bread in his hand. He gave the bread to the
bird. "This is for you," he said. "You are my friend." The bird ate the bread and sang a pretty
song. From that day on, Tom and the bird played together every day. They learned that it is good to
help each other.

Lily and her brother Max lived in a small house near the forest. One morning, Lily found a shiny box
under her bed. She wanted to open it, but the box was locked. "Max, can you help me open the box?"
she asked. Max looked at the box. He tried to pull it and push it, but it did not open. "We need a
key," he said.

They looked for the key in the kitchen. They looked for the key in the garden. At last, Lily saw
something shiny near a flower. It was the key! She was so excited. She ran to the box and put the
key in it. The box opened, and inside there was a soft blue scarf and a note. The note said, "I love
you. Grandma." Lily hugged the scarf. She was warm and happy. Max was happy too. They went to visit
Grandma and gave her a big hug.
"""


def held_out_python(characters=12_000):
    """Files of the standard library that manifests/demo-model/train.py did not train on, by its rule."""
    library = Path(sysconfig.get_path("stdlib"))
    texts, found = [], 0
    for path in sorted(library.glob("*.py")):
        digest = hashlib.sha256(f"0:{path.name}".encode()).digest()
        if int.from_bytes(digest[:8], "big") % 100 < 5:
            texts.append(path.read_text(encoding="utf-8"))
            found += len(texts[-1])
    assert found >= characters, "another library than the model was trained on"
    return "".join(texts)[-characters:]


def rise(run, at, source, text, dtype, cache_dtype):
    """By how much the perplexity rises on a text: 0.01 for 1 %."""
    (at / "held.txt").write_text(text, encoding="utf-8")
    name = f"{dtype}-{cache_dtype}"
    model = f'dtype = "{dtype}"\nevaluation = "held.txt"'
    more = {"model": model, "generate": f'cache_dtype = "{cache_dtype}"'}
    sizes = {"prompt": (4,), "context": (16,)}
    manifest = write_manifest(at / f"{name}.toml", source, name=name, **sizes, **more)
    [told] = json.loads(run("build", manifest, "-o", at, "--json", quick=True).stdout)
    accuracy = told["accuracy"]
    assert (accuracy["weights"], accuracy["text"]) == (dtype, "held.txt")
    assert accuracy["tokens"] > 500
    (target,) = json.loads(run("inspect", at / name, "--json").stdout)["targets"]
    assert target["config"]["accuracy"].items() <= accuracy.items()
    ratio = accuracy["perplexity_millionths"] / accuracy["float32_perplexity_millionths"]
    return ratio - 1


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    cases(
        [("int8", "int8")],  # both round at once
        others=[("int8", "bfloat16"), ("float32", "int8"), ("bfloat16", "float32")],
    ),
)
def test_python_is_no_more_than_one_percent_less_likely(run, tmp_path, dtype, cache_dtype):
    source = ROOT / "manifests" / "demo-model"
    assert rise(run, tmp_path, source, held_out_python(), dtype, cache_dtype) <= 0.01


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


@pytest.mark.thorough
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


@pytest.mark.thorough
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


WIDE = {case.name: case for case in wide_cases()}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "dtype"),
    cases([("qwen3", "int4")], others=[("qwen3", "int8"), ("bert", "int4"), ("bert", "int8")]),
)
def test_an_encoder_in_few_bits_keeps_its_cosine(run, tmp_path, name, dtype):
    case, model = WIDE[name], tmp_path / "model"
    write(case, model)
    add_pooling(model)
    stored = f'dtype = "{dtype}"'
    manifest = encoder_manifest(tmp_path / "m.toml", "shapes = [[4, 32]]", model=stored)
    built = run("build", manifest, "-o", tmp_path, "--json", quick=True)
    [told] = json.loads(built.stdout)
    texts = [row[:length] for row, length in zip(case.tokens, case.lengths, strict=True)]
    with load(tmp_path / "m", on_mismatch="error") as bundle:
        found = bundle.encode(texts)
    with np.load(WIDE_REFERENCE) as recorded:
        expected = recorded[name]
    lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    cosine = (found * expected).sum(1) / lengths
    assert 0.999 <= cosine.min() < 0.99999
    accuracy = told["accuracy"]
    assert 999_000 <= accuracy["cosine_millionths"] < 1_000_000
    # All of them in int8 lose too much, which the build says everywhere.
    assert re.fullmatch(r"(\d+ int8 and \d+ )?bfloat16( \(\d+\.\d bits\))?", accuracy["weights"])
    assert f"stored matrices as {accuracy['weights']}" in told["int4"]
    shown = run("inspect", tmp_path / "m").stdout
    assert f"{accuracy['weights']} weights" in shown
    assert "least cosine of embeddings" in shown
    again = json.loads(run("build", manifest, "-o", tmp_path, "--json", quick=True).stdout)[0]
    assert (again["digest"], again["compiled"]) == (told["digest"], 0)
    assert "3 cached, 0 to compile" in run("plan", manifest, quick=True).stdout
