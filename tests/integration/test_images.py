"""Models that read images, built through the command line and run from their bundles."""

import base64
import io
import json
from dataclasses import replace

import httpx
import numpy as np
import pytest
from PIL import Image
from tests.extent import cases
from tests.format import second_reader
from tests.manifests import encoder_manifest
from tests.parity.image_cases import PICTURES, REFERENCE, image_cases
from tests.unit.server.running import running
from tokenizers import Tokenizer, pre_tokenizers, processors
from tokenizers.models import WordLevel

from prejit.runtime import RejectError, UsageError, load
from prejit.runtime.base.typed_json import to_json
from prejit.runtime.format.checks.program_table import check_config
from prejit.server.engine.engine import Engine
from prejit.server.gate.server_settings import Settings
from prejit.server.served.served import Models, Served

CASES = {case.name: case for case in image_cases()}


@pytest.fixture(scope="module")
def reference():
    with np.load(REFERENCE) as recorded:
        return dict(recorded)


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
    models = Models(Served("both", bundle, Engine(bundle), 0))
    large = io.BytesIO()
    Image.new("1", (9_400, 9_400)).save(large, "PNG")
    large = base64.b64encode(large.getvalue()).decode()
    with running(models, Settings()) as server:
        data = [base64.b64encode(file.read_bytes()).decode() for file in files]
        parts = [{"image": f"data:image/png;base64,{data[0]}"}, {"text": words[1]}]
        parts.append({"image": data[2]})

        def answer(given, **others):
            body = {"model": "both", "input": given, **others}
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
    models.close()


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
