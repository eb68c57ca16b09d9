"""Models that read images, alone or in prompts, built through the command line and run from their bundles."""

import base64
import contextlib
import io
import json
from dataclasses import replace

import httpx
import numpy as np
import pytest
from PIL import Image
from tests.extent import cases
from tests.format import second_reader
from tests.manifests import encoder_manifest, write_manifest
from tests.parity.image_cases import PICTURES, REFERENCE, image_cases
from tests.parity.sight_cases import MESSAGES, PROMPTS, STEPS, VOCABULARY, sight_cases
from tests.parity.sight_cases import REFERENCE as SIGHT
from tests.unit.server.running import running
from tokenizers import Tokenizer, pre_tokenizers, processors
from tokenizers.models import WordLevel

from prejit.runtime import RejectError, UsageError, load
from prejit.runtime.base.typed_json import to_json
from prejit.runtime.cli.commands import run as command
from prejit.runtime.format.checks.program_table import check_config
from prejit.server.engine.engine import Engine
from prejit.server.gate.server_settings import Settings
from prejit.server.served.served import Models, Served

CASES = {case.name: case for case in (*image_cases(), *sight_cases())}


@pytest.fixture(scope="module")
def reference():
    """Return the results that transformers gave."""
    found = {}
    for file in (REFERENCE, SIGHT):
        with np.load(file) as recorded:
            found |= dict(recorded)
    return found


@pytest.fixture(scope="module")
def built(run, reference, tmp_path_factory):
    """Return what builds a case: its directory, and its bundle."""

    def build(name, dtype, encode):
        directory = tmp_path_factory.mktemp(name)
        CASES[name].write(directory / "model", json.loads(str(reference[f"{name} tensors"])))
        if CASES[name].texts:
            write_tokenizer(directory / "model", 61)
        manifest = directory / "made.toml"
        encoder_manifest(manifest, encode, model=f'dtype = "{dtype}"')
        run("build", manifest, "-o", directory / "out", quick=True)
        return directory / "model", directory / "out" / "made"

    return build


def write_tokenizer(directory, vocab_size):
    """Write a tokenizer of words `w3`, `w4`, ..., with the last token at the end of each text."""
    names = {f"w{number}": number for number in range(vocab_size)}
    made = Tokenizer(WordLevel(names, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    end = vocab_size - 1
    made.post_processor = processors.TemplateProcessing("$A end", special_tokens=[("end", end)])
    made.save(str(directory / "tokenizer.json"))
    settings = {"padding_side": "right", "model_input_names": ["input_ids"], "tokenizer_class": "T"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


@contextlib.contextmanager
def serving(bundle):
    models = Models(Served("made", bundle, Engine(bundle), 0))
    with running(models, Settings()) as server:
        yield server
    models.close()


def least_cosine(found, expected):
    lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    return ((found * expected).sum(1) / lengths).min()


@pytest.mark.parametrize(("name", "length"), cases([("clip-0", 8)], others=[("siglip-0", 13)]))
def test_images_and_texts_are_embedded_in_one_space(built, reference, name, length):
    model, bundle_path = built(name, "int8", f"images = [1, 4]\nshapes = [[2, {length}], [4, 13]]")
    files = [model / f"picture{number}.png" for number in range(len(PICTURES))]
    expected = {part: reference[f"{name} {part}"] for part in ("images", "texts", "logits")}
    [target] = second_reader.read(bundle_path)
    assert target.config["images"]["size"] == [21, 21]
    with load(bundle_path, on_mismatch="error") as bundle:
        images = bundle.embed_images(files)
        assert least_cosine(images, expected["images"]) > 0.999
        ids = CASES[name].texts
        words = [" ".join(f"w{number}" for number in text[:-1]) for text in ids]
        texts = bundle.encode(words)
        np.testing.assert_array_equal(texts, bundle.encode(ids))
        assert least_cosine(texts, expected["texts"]) > 0.999
        if name == "clip-0":  # which pools at the first end
            np.testing.assert_array_equal(bundle.encode([[*ids[0], 5, 60, 6]]), texts[:1])
            with pytest.raises(UsageError, match=r"\[1\]: expected the end of .* 60, in it"):
                bundle.encode([ids[0], [5, 6]])
        logits = bundle.score_images(files, words, logits=True)
        assert np.abs(logits - expected["logits"]).max() < 0.1
        found = bundle.score_images(files[0], words)
        exact = np.exp(logits[:1].astype(np.float64))
        exact = exact / exact.sum() if name == "clip-0" else exact / (1 + exact)
        np.testing.assert_allclose(found, exact, rtol=1e-5)
        with pytest.raises(UsageError, match="texts: expected texts to compare images with"):
            bundle.score_images(files)
        check_refusals(bundle.config)
        check_server(bundle, files, words, images, texts)


def check_server(bundle, files, words, images, texts):
    large = io.BytesIO()
    Image.new("1", (9_400, 9_400)).save(large, "PNG")
    large = base64.b64encode(large.getvalue()).decode()
    with serving(bundle) as server:
        data = [base64.b64encode(file.read_bytes()).decode() for file in files]
        parts = [{"image": f"data:image/png;base64,{data[0]}"}, {"text": words[1]}]
        parts.append({"image": data[2]})

        def answer(given, **others):
            body = {"model": "made", "input": given, **others}
            return httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=60).json()

        found = [each["embedding"] for each in answer(parts)["data"]]
        np.testing.assert_allclose(found, [images[0], texts[1], images[2]], atol=1e-6)
        for given, message in (
            ([{"image": "https://example.org/a.png"}], "expected a data URL in base64"),
            ([{"image": data[0], "text": "b"}], "each with an image or a text"),
            ([parts[0], "a text"], "found both in one list"),
            ([{"image": "%"}], "expected base64"),
            ([{"image": large}] * 4, "at most 268435456 pixels in all images, found 353440000"),
            ([{"image": base64.b64encode(b"no image").decode()}], "an image that Pillow reads"),
        ):
            assert message in answer(given)["error"]["message"]


def check_refusals(config):
    """What a reader refuses in the description of images and in their programs."""
    images, programs = config.images, config.programs
    read = {program.name: program for program in programs}["images/b4"]
    others = tuple(each for each in programs if each.kind != "image")
    sets = {name: tensors for name, tensors in config.weight_sets.items() if "match" not in name}
    for changes, message in (
        ({"images": None}, "images/b1: expected 'images' in the config, found none"),
        ({"images": replace(images, size=(21,))}, r"images/b1: arguments\[0\]: expected"),
        ({"images": replace(images, size=(21, 22))}, r"images/b1: arguments\[0\]: expected"),
        ({"images": replace(images, resize=(1, 2, 3))}, "images: resize: expected"),
        ({"images": replace(images, resample=6)}, "images: resample: expected 0 to 5, found 6"),
        ({"images": replace(images, scores="identity")}, "images: scores: expected softmax"),
        ({"images": replace(images, scores=None)}, "images: scores: expected softmax"),
        ({"images": replace(images, labels=("a",))}, "images: labels: expected"),
        ({"images": replace(images, width=0)}, r"images/b1: results\[0\]: expected"),
        ({"weight_sets": sets}, "images: expected the weight set 'model:match'"),
        ({"encoder": replace(config.encoder, padding=61)}, "encoder: padding: expected a token"),
        ({"programs": others}, "expected programs for images, found none"),
        ({"programs": (*programs, replace(read, name="b"))}, "b: expected one image program"),
    ):
        changed = to_json(replace(config, **changes))
        with pytest.raises(RejectError, match=message):
            check_config(changed, config.target, config.requirement, "config")


@pytest.fixture(scope="module")
def labels(built):
    model, path = built("vit-1", "float32", "images = [2]")
    with load(path, on_mismatch="error") as bundle:
        yield model, bundle


@pytest.mark.thorough
def test_labels_have_probabilities(labels, reference):
    model, bundle = labels
    files = [str(model / f"picture{number}.png") for number in range(len(PICTURES))]
    assert np.abs(bundle.score_images(files, logits=True) - reference["vit-1 images"]).max() < 1e-4
    found = bundle.score_images(files)
    np.testing.assert_allclose(found.sum(1), 1, rtol=1e-6)
    assert bundle.image_labels == tuple(f"label {n}" for n in range(5))
    with pytest.raises(UsageError, match="found one that names what they show"):
        bundle.embed_images(files)
    with pytest.raises(UsageError, match=r"read images with `Bundle\.embed_images`"):
        bundle.encode("a sentence")
    assert bundle.score_images([]).shape == (0, 5)


def test_every_form_of_a_picture_gives_the_pixels_of_transformers(labels):
    _, bundle = labels
    random = np.random.default_rng(3)
    pixels = random.integers(0, 256, (21, 21, 3), dtype=np.uint8)
    expected = bundle.score_images(pixels)  # of the model's size: no Pillow

    def png(image, kind="png", **options):
        file = io.BytesIO()
        image.save(file, kind, **options)
        return file.getvalue()

    image, alpha = Image.fromarray(pixels), random.integers(0, 256, (21, 21), dtype=np.uint8)
    clear = image.copy()
    clear.putalpha(Image.fromarray(alpha))
    white = np.asarray(Image.alpha_composite(Image.new("RGBA", (21, 21), "white"), clear))[..., :3]
    turned = Image.Exif()
    turned[0x0112] = 6  # a quarter turn
    gray, palette = image.convert("L"), image.convert("P")
    for given, wanted in [
        (image, pixels),
        (png(image), pixels),
        (clear, white),  # as transformers: an image lies on white, a file loses its alpha
        (png(clear), pixels),
        (png(image, exif=turned), np.rot90(pixels, -1)),
        (png(gray), np.asarray(gray.convert("RGB"))),
        (palette, np.asarray(palette.convert("RGB"))),
    ]:
        found = bundle.score_images([given])
        np.testing.assert_array_equal(found, bundle.score_images(wanted.copy()))
    np.testing.assert_array_equal(bundle.score_images([pixels] * 3), np.repeat(expected, 3, 0))
    moving = png(image, "gif", save_all=True, append_images=[gray.convert("P")])
    for wrong, message in [
        (moving, r"images\[0\]: expected an image of one frame, not 2"),
        (b"no image", r"images\[0\]: expected an image that Pillow reads"),
        ("missing.png", "No such file"),
        (pixels / 255, r"images\[0\]: .* uint8 \[H, W, 3\], found float64\[21, 21, 3\]"),
        (pixels[..., :2].copy(), r"found uint8\[21, 21, 2\]"),
        (pixels[:0], "with pixels"),
        ([None], r"images\[0\]: .* found None"),
        (7, "images: expected a list of images, found 7"),
    ]:
        with pytest.raises(UsageError, match=message):
            bundle.score_images(wrong)


NAME = "gemma3-1"
SIZES = {"batch": (1, 3), "prompt": (16,), "context": (64, 128)}
GREEDY = {"max_new_tokens": STEPS, "stop_token_ids": ()}
QUESTION = {"type": "text", "text": "what is this?"}
ASKED = [{"role": "user", "content": [{"type": "image"}, QUESTION]}]


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


@pytest.mark.thorough
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


@pytest.mark.thorough
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


@pytest.mark.thorough
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
    with pytest.raises(UsageError, match="found one that scores no images"):
        bundle.score_images(pictures[0])
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


@pytest.mark.thorough
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

        def respond(role):
            body = {"model": "made", "max_output_tokens": 9, "temperature": 0}
            body["input"] = [{"role": role, "content": parts}]
            return httpx.post(f"{server.url}/v1/responses", json=body, timeout=60).json()

        by_user, by_system = respond("user"), respond("system")
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


@pytest.mark.thorough
def test_the_command_reads_images_before_a_message(bundle, model, pictures, capsys):
    path, most = str(model.with_name("out") / "made"), ("--max-new-tokens", "9", "--json")
    asked = ("--chat", QUESTION["text"], "--image", str(pictures[1]))
    assert command(["generate", path, *asked, *most]) == 0
    expected = bundle.generate(
        bundle.apply_chat_template(ASKED), images=pictures[1], max_new_tokens=9
    )
    assert json.loads(capsys.readouterr().out)["token_ids"] == [*expected.token_ids]


@pytest.mark.thorough
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
