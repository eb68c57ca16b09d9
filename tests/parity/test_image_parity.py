"""Models that read images, alone or in prompts, against transformers' torch models: see image_record.py."""

import json
from dataclasses import asdict
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from prejit.compiler.checkpoint.checkpoint import open_checkpoint, open_encoder
from prejit.compiler.models import config_file, image_config, model_registry
from prejit.compiler.models.families.decoders import PlacedImages
from prejit.compiler.models.families.image_towers import normalized_pixels
from prejit.runtime.encoding.images import pixels_of
from prejit.runtime.format.bundle_schema import Images
from prejit.runtime.generation.image_prompts import PromptImages

from . import image_cases as images
from .encoder_results import in_both_forms, with_weights
from .image_cases import PICTURES, image_cases
from .sight_cases import PROMPTS, REFERENCE, STEPS, sight_cases

REFERENCES = (images.REFERENCE, REFERENCE)
TOLERANCE = 3e-5
PIXEL_TOLERANCE = 5e-7
"""Of a pixel after it was normalized: rounding of one multiplication, subtraction and division."""
LOGIT_TOLERANCE = 1e-4
"""Of logits that vary by 2.5."""
LONGEST = 96
"""Tokens of the longest prompt, and some more."""


def is_sampled(case, form):
    """Return whether `make test` runs a case: the first of each family, and one of the portable form."""
    return case.name.endswith("-0") if form == "kernels" else case.name == "clip-1"


def pictures(directory, description):
    """Return the description of a model's pictures as a bundle has it, and the pixels of those of a case."""
    described = Images(**asdict(description))
    files = [directory / f"picture{number}.png" for number in range(len(PICTURES))]
    return described, np.stack([pixels_of(file, described, "picture") for file in files])


@in_both_forms(image_cases(), is_sampled)
def test_pixels_and_results_equal_those_of_transformers(case, reference, tmp_path, forms):
    case.write(tmp_path, json.loads(str(reference[f"{case.name} tensors"])))
    source = image_config.load_images(tmp_path)
    _, pixels = pictures(tmp_path, image_config.describe_images(source))
    given = np.moveaxis(reference[f"{case.name} pixels"], 1, -1)
    normalized = np.asarray(normalized_pixels(pixels, source.processing))
    assert np.abs(normalized - given).max() <= PIXEL_TOLERANCE * max(1, np.abs(given).max())

    out_in = forms is not None
    checkpoint = open_encoder(tmp_path, out_in=out_in, images=True)
    weights, call = with_weights(image_config.make_images(source, out_in=out_in), checkpoint, forms)
    found = np.asarray(jax.jit(partial(call, "image"))(weights, pixels))
    expected = reference[f"{case.name} images"]
    assert expected.std() > 100 * TOLERANCE, "a constant would pass"
    assert np.abs(found - expected).max() <= TOLERANCE
    if not case.texts:
        return
    shape = image_config.describe_texts(source)
    assert shape is not None
    most, fill = shape.max_tokens, 0 if shape.padding is None else shape.padding
    tokens = np.array([[*ids, *[fill] * (most - len(ids))] for ids in case.texts], np.int32)
    counted = [len(ids) if shape.padding is None else most for ids in case.texts]
    run = jax.jit(partial(call, "__call__"))
    embedded = np.asarray(run(weights, tokens, np.array(counted, np.int32)))
    assert np.abs(embedded - reference[f"{case.name} texts"]).max() <= TOLERANCE


@in_both_forms(sight_cases(), lambda case, form: case.name.endswith("-1") and form == "kernels")
def test_logits_equal_those_of_transformers(case, reference, tmp_path, forms):
    case.write(tmp_path, json.loads(str(reference[f"{case.name} tensors"])))
    config = config_file.load_config(tmp_path, images=True)
    module = model_registry.make_decoder(config, out_in=forms is not None)
    sight = image_config.describe_sight(config.sight, config.hidden_size)
    described, pixels = pictures(tmp_path, sight)
    checkpoint = open_checkpoint(tmp_path, out_in=forms is not None, images=True)
    weights, call = with_weights(module, checkpoint, forms)
    run = jax.jit(partial(call, "__call__"))
    read = np.asarray(jax.jit(partial(call, "image"))(weights, pixels))
    read = read.reshape(len(pixels), described.tokens, -1)
    room, one = LONGEST, np.ones(1, np.int32)
    for number, (_, chosen) in enumerate((*PROMPTS, ("a conversation", (2, 0)))):
        ids = reference[f"{case.name} ids {number}"].astype(np.int32)
        count = np.full(1, len(ids), np.int32)
        embeddings = read[list(chosen)].reshape(-1, read.shape[-1])
        found = PromptImages(embeddings, "", described).ends(ids.tolist())
        padded, ends = np.zeros((1, room), np.int32), np.full((1, room), -1, np.int32)
        padded[0, : len(ids)], ends[0, : len(ids)] = ids, found
        placed = np.zeros((1, room, read.shape[-1]), np.float32)
        placed[ends >= 0] = embeddings
        cache = call("make_cache", weights, 1, room + STEPS, "float32")
        given = PlacedImages(jnp.asarray(placed), jnp.asarray(ends)) if chosen else None
        logits, cache = run(weights, padded, one - 1, count, cache, images=given)
        expected = reference[f"{case.name} logits {number}"]
        for place, token in enumerate(reference[f"{case.name} tokens {number}"].astype(np.int32)):
            assert np.abs(np.asarray(logits[0]) - expected[place]).max() <= LOGIT_TOLERANCE
            logits, cache = run(weights, token[None, None], count + place, one, cache)


def test_every_case_is_recorded(reference):
    cases = {case.name for case in (*image_cases(), *sight_cases())}
    assert {name.split(" ")[0] for name in reference} == cases
