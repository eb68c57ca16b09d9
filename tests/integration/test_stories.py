"""The main promise on a real model: a fresh process gives the published text, however it gets there."""

import json

import numpy as np
import pytest
from tests.extent import cases
from tests.manifests import write_manifest

from prejit.runtime import load

TARGETS = cases(["cpu-host"], others=["cpu-x86-64-v3", "cpu-x86-64-v2"])


@pytest.fixture(scope="module")
def bundles(run, stories, tmp_path_factory):
    directory = tmp_path_factory.mktemp("stories")
    for target in TARGETS:
        of_target = {"name": target, "targets": (target,)}
        manifest = write_manifest(directory / f"{target}.toml", stories[0], **of_target)
        run("build", manifest, "-o", directory)
    return {target: directory / target for target in TARGETS}


@pytest.mark.parametrize("target", TARGETS)
def test_fresh_process_writes_the_published_text(run, bundles, stories, target):
    expected = stories[1]
    prompt = ",".join(map(str, expected["prompt_ids"]))
    done = run(
        *("generate", bundles[target], "--prompt-ids", prompt, "--json"),
        *("--max-new-tokens", str(len(expected["ids"])), "--on-mismatch", "error"),
    )
    # XLA's threads drop the last references while the interpreter shuts down: see Device.put.
    assert done.stderr == ""
    result = json.loads(done.stdout)
    assert result["token_ids"] == expected["ids"]
    assert result["text"] == expected["text"]
    assert result["finish_reason"] == "length"
    assert {p["source"] for p in result["programs"]} <= {"loaded", "unused"}


def test_positions_that_were_decoded_have_the_bits_of_computed_ones(run, stories, tmp_path):
    """Rounding rows to int8 would enlarge the last bits in which two orders of sums differ."""
    more = {"name": "int8", "prompt": (16, 128), "model": 'dtype = "int8"'}
    manifest = write_manifest(tmp_path / "m.toml", stories[0], **more)
    run("build", manifest, "-o", tmp_path)
    bundle, prompt = load(tmp_path / "int8", on_mismatch="error"), stories[1]["prompt_ids"]

    def tokens(batch, prompt, count):
        [slot] = batch.insert(bundle.request(prompt, max_new_tokens=count, logprobs=3))
        found = batch.step()
        while found[-1].finish_reason is None:
            found += batch.step()
        assert {each.slot for each in found} == {slot}
        return found

    for count in (83, 123, 127, 131):
        batch = bundle.batch(1)
        decoded = [*prompt, *(each.token_id for each in tokens(batch, prompt, count))]
        kept, computed = (tokens(each, decoded, 4) for each in (batch, bundle.batch(1)))
        assert kept[0].usage.reused_tokens > computed[0].usage.reused_tokens == 0
        assert [each.logprob for each in kept] == [each.logprob for each in computed]


def test_a_message_goes_through_the_template_and_a_stop_string_ends_the_answer(run, stories_dir):
    options = ("--max-new-tokens", "40", "--json", "--on-mismatch", "error")
    chat = ("generate", stories_dir, "--chat", "Once upon a time", *options)
    said = json.loads(run(*chat).stdout)
    bundle = load(stories_dir, on_mismatch="error")
    same = bundle.generate("Once upon a time", max_new_tokens=40)
    # The template spells the BOS that the tokenizer adds to a prompt: it must not come twice.
    assert (said["token_ids"], said["text"]) == ([*same.token_ids], same.text)
    stop = said["text"][20:26]
    cut = json.loads(run(*chat, "--stop", stop).stdout)
    assert (cut["text"], cut["finish_reason"]) == (said["text"].partition(stop)[0], "stop")
    assert len(cut["token_ids"]) < len(said["token_ids"])
    both = run("generate", stories_dir, "--chat", "a", "--prompt", "b", status=2)
    assert (
        "expected one of --prompt, --prompt-ids, --chat, found --prompt and --chat" in both.stderr
    )


def test_a_text_that_ends_amid_a_character_shows_that(stories_bundle):
    """Its last bytes were kept back for what never came."""
    names, count = stories_bundle.tokenizer.token_bytes, stories_bundle.config.decoder.vocab_size
    begins = np.array([names[token_id] == b"\xc3" for token_id in range(count)])
    options = {"max_new_tokens": 1, "token_mask": lambda _: begins}
    for more in ({}, {"stop": "never"}, {"stop": "\ufffd or"}):
        assert stories_bundle.generate("Once", **options, **more).text == "\ufffd"
    [piece] = stories_bundle.stream("Once", **options)
    assert (piece.text, piece.finish_reason) == ("\ufffd", "length")
