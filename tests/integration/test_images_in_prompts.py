"""A decoder whose prompts hold images, built through the command line and run from its bundle."""

import base64
import contextlib
import json
from dataclasses import replace

import httpx
import numpy as np
import pytest
from tests.manifests import write_manifest
from tests.parity.sight_cases import MESSAGES, PROMPTS, REFERENCE, STEPS, VOCABULARY, sight_cases
from tests.unit.server.running import running

from prejit.runtime import RejectError, UsageError, load
from prejit.runtime.base.typed_json import to_json
from prejit.runtime.cli.commands import run as command
from prejit.runtime.format.checks.program_table import check_config
from prejit.server.engine.engine import Engine
from prejit.server.gate.server_settings import Settings
from prejit.server.served.served import Models, Served

pytestmark = pytest.mark.thorough

CASES = {case.name: case for case in sight_cases()}
NAME = "gemma3-1"
SIZES = {"batch": (1, 3), "prompt": (16,), "context": (64, 128)}
GREEDY = {"max_new_tokens": STEPS, "stop_token_ids": ()}
QUESTION = {"type": "text", "text": "what is this?"}
ASKED = [{"role": "user", "content": [{"type": "image"}, QUESTION]}]


@contextlib.contextmanager
def serving(bundle):
    models = Models(Served("made", bundle, Engine(bundle), 0))
    with running(models, Settings()) as server:
        yield server
    models.close()


@pytest.fixture(scope="module")
def reference():
    with np.load(REFERENCE) as recorded:
        return dict(recorded)


@pytest.fixture(scope="module")
def model(reference, tmp_path_factory):
    directory = tmp_path_factory.mktemp("sight") / "model"
    CASES[NAME].write(directory, json.loads(str(reference[f"{NAME} tensors"])))
    return directory


def made_of(model, images="images = [24, 64]"):
    more = {"name": "made", "model": 'dtype = "float32"', "generate": images}
    return write_manifest(model.with_name("made.toml"), "model", **more, **SIZES)


@pytest.fixture(scope="module")
def bundle(run, model):
    run("build", made_of(model), "-o", model.with_name("out"), quick=True)
    with load(model.with_name("out") / "made", on_mismatch="error") as bundle:
        yield bundle


@pytest.fixture(scope="module")
def pictures(model):
    return [model / f"picture{number}.png" for number in range(3)]


def test_tokens_equal_those_of_transformers(bundle, reference, pictures):
    asked = [
        (text, {"images": [pictures[n] for n in chosen]} if chosen else {})
        for text, chosen in PROMPTS
    ]
    asked.append((bundle.apply_chat_template(MESSAGES), {"images": [pictures[2], pictures[0]]}))
    requests = [bundle.request(prompt, **images, **GREEDY) for prompt, images in asked]
    tokens = [reference[f"{NAME} tokens {number}"].tolist() for number in range(len(asked))]
    for number, (prompt, images) in enumerate(asked):
        expected = reference[f"{NAME} ids {number}"].tolist()
        assert list(requests[number].prompt) == expected, "the processor's ids"
        found = bundle.generate(prompt, **images, **GREEDY)
        assert list(found.token_ids) == tokens[number]
    together = [1, 4, 3]
    slots = bundle.batch(3)
    places = slots.insert(*(requests[number] for number in together))
    written = {place: [] for place in places}
    while given := slots.step():
        for token in given:
            written[token.slot] += [] if token.token_id is None else [token.token_id]
    assert [written[place] for place in places] == [tokens[number] for number in together]


def test_equal_tokens_of_other_images_share_nothing(bundle, pictures):
    ids = bundle.apply_chat_template(MESSAGES)
    longer, session = [*ids, 7, 8], bundle.session()

    def scores(made):
        return [one.logprob for one in made.logprobs]

    def both(images, prompt):
        given = {"images": [pictures[n] for n in images], "max_new_tokens": 4, "logprobs": 0}
        fresh = bundle.generate(prompt, stop_token_ids=(), **given)
        again = session.generate(prompt, stop_token_ids=(), **given)
        np.testing.assert_allclose(scores(fresh), scores(again), atol=1e-4)
        return again

    first = both((2, 0), ids)
    other = both((0, 2), longer)
    assert other.stats.reused_tokens == 0
    assert np.abs(np.subtract(scores(first), scores(other))).max() > 1e-3
    assert both((0, 2), [*longer, 9]).stats.reused_tokens >= len(longer)
    with contextlib.closing(Engine(bundle, slots=3)) as engine:
        for images in ((2, 0), (0, 2), (2, 0)):
            given = {"images": [pictures[n] for n in images], "max_new_tokens": 4, "logprobs": 0}
            found = engine.generate(longer, stop_token_ids=(), **given)
            alone = bundle.generate(longer, stop_token_ids=(), **given)
            np.testing.assert_allclose(scores(found), scores(alone), atol=1e-4)
        assert found.stats.reused_tokens > 0, "what the first request computed"


def test_what_is_wrong_with_images_is_refused(bundle, pictures):
    text, image = PROMPTS[0][0], VOCABULARY.index("<image_soft_token>")
    for prompt, images, message in (
        (text, pictures[:2], "once for each of 2 images, found it 1 times"),
        ([1, *[image] * 9], pictures[:1], "another token behind each image"),
        ([1, *[image] * 8, 2], pictures[:1], "expected 1 times 9 tokens"),
        ([*[image] * 5, 1, *[image] * 4, 2], pictures[:1], "one after the other"),
        ([*[image] * 18, 2], pictures[:2], "another token behind each image"),
        (text, [b"no image"], "an image that Pillow reads"),
    ):
        with pytest.raises(UsageError, match=message):
            bundle.generate(prompt, images=images)
    plain = bundle.generate([1, 2, 3], images=[], **GREEDY)
    assert plain.token_ids == bundle.generate([1, 2, 3], **GREEDY).token_ids
    for empty in ({}, {"images": ()}):
        with pytest.raises(UsageError, match=f"prompt: expected no token {image}, which stands"):
            bundle.generate([1, *[image] * 9, 2], **empty)
    with pytest.raises(UsageError, match="prefix: expected none beside images"):
        bundle.generate(text, images=pictures[:1], prefix=bundle.prefix("see"))
    with pytest.raises(UsageError, match="found one that writes about them"):
        bundle.embed_images(pictures[0])
    config = bundle.config
    images = config.images
    spare = [p for p in config.programs if p.name != "image-prefill/b1-t64-c64"]
    check_config(to_json(replace(config, programs=spare)), "cpu-host", config.requirement, "made")
    fewer = [p for p in spare if p.name != "image-prefill/b1-t24-c64"]
    for changes, message in (
        ({"images": replace(images, tokens=7)}, r"arguments\[3\]: expected .*float32.1,24,25"),
        ({"images": replace(images, token_id=-1)}, "token_id: expected one of the decoder's"),
        ({"images": replace(images, marks=("a", "b"))}, "marks: expected three texts"),
        ({"images": replace(images, tokens=None)}, "expected 'images' with tokens"),
        ({"programs": fewer}, "image-prefill of context 64: expected one"),
    ):
        changed = to_json(replace(config, **changes))
        with pytest.raises(RejectError, match=message):
            check_config(changed, "cpu-host", config.requirement, "made")


def test_chats_about_images_are_served(bundle, reference, pictures):
    data = [base64.b64encode(file.read_bytes()).decode() for file in pictures]

    def message(image):
        url = image if isinstance(image, str) else f"data:image/png;base64,{data[image]}"
        part = {"type": "image_url", "image_url": {"url": url, "detail": "auto"}}
        return {"role": "user", "content": [part, QUESTION]}

    with serving(bundle) as server:

        def answer(*messages, **others):
            body = {"model": "made", "messages": messages, "max_tokens": 9, **others}
            url = f"{server.url}/v1/chat/completions"
            return httpx.post(url, json={"temperature": 0, **body}, timeout=60)

        asked = message(1)
        found = answer(asked, logprobs=True).json()
        ids = bundle.apply_chat_template(ASKED)
        expected = bundle.generate(ids, images=pictures[1], max_new_tokens=9)
        assert found["choices"][0]["message"]["content"] == expected.text
        assert found["usage"]["prompt_tokens"] == len(ids)
        events = [
            json.loads(line.removeprefix("data: "))
            for line in answer(asked, stream=True).text.splitlines()
            if line.startswith("data: {")
        ]
        deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
        assert "".join(delta.get("content") or "" for delta in deltas) == expected.text
        others = answer(message(0), logprobs=True).json()
        scores = [
            [each["logprob"] for each in one["choices"][0]["logprobs"]["content"]]
            for one in (found, others)
        ]
        assert scores[0] != scores[1]
        parts = [
            {"type": "input_image", "image_url": f"data:image/png;base64,{data[1]}"},
            {"type": "input_text", "text": QUESTION["text"]},
        ]
        body = {"model": "made", "max_output_tokens": 9, "temperature": 0}
        by_user, by_system = (
            httpx.post(
                f"{server.url}/v1/responses",
                json={**body, "input": [{"role": role, "content": parts}]},
                timeout=60,
            ).json()
            for role in ("user", "system")
        )
        assert by_user["output"][0]["content"][0]["text"] == expected.text
        refusal = "[0].content[0]: expected images of a user alone"
        assert refusal in by_system["error"]["message"]
        refused = (
            (message("https://example.org/a.png"), "expected a data URL in base64"),
            (message("data:image/png;base64,AAAA"), "an image that Pillow reads"),
            ({**asked, "role": "assistant"}, "expected images of a user alone"),
        )
        for each, text in refused:
            response = answer(each)
            assert response.status_code == 400
            assert text in response.json()["error"]["message"]
        assert "none beside images" in answer(asked, prompt_logprobs=1).json()["error"]["message"]


def test_the_command_reads_images_before_a_message(bundle, model, pictures, capsys):
    path, most = str(model.with_name("out") / "made"), ("--max-new-tokens", "9", "--json")
    asked = ("--chat", QUESTION["text"], "--image", str(pictures[1]))
    assert command(["generate", path, *asked, *most]) == 0
    expected = bundle.generate(
        bundle.apply_chat_template(ASKED), images=pictures[1], max_new_tokens=9
    )
    assert json.loads(capsys.readouterr().out)["token_ids"] == [*expected.token_ids]


def test_a_model_without_images_refuses_them(run, model, pictures, tmp_path):
    run("build", made_of(model, ""), "-o", tmp_path, quick=True)
    with load(tmp_path / "made", on_mismatch="error") as bundle:
        assert bundle.config.images is None
        with pytest.raises(UsageError, match="images: expected none, as the prompts of made"):
            bundle.generate(PROMPTS[0][0], images=pictures[:1])
        with serving(bundle) as server:
            part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
            body = {"model": "made", "messages": [{"role": "user", "content": [part]}]}
            found = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
        assert found.status_code == 400
        message = "messages: [0].content[0]: expected text, found an image, and 'made' reads texts"
        assert found.json()["error"]["message"].startswith(message)
