"""Our decoder that reads images against transformers' torch model: sight_record.py recorded it."""

import itertools
import json
from dataclasses import asdict
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.extent import sampled

from prejit.compiler.checkpoint.checkpoint import open_checkpoint
from prejit.compiler.models import config_file, model_registry, sight_config
from prejit.compiler.models.families.decoders import PlacedImages
from prejit.runtime.encoding.images import pixels_of
from prejit.runtime.format.bundle_schema import Images
from prejit.runtime.generation.image_prompts import PromptImages

from .encoder_results import with_weights
from .image_cases import PICTURES
from .sight_cases import PROMPTS, REFERENCE, STEPS, sight_cases

REFERENCES = (REFERENCE,)
TOLERANCE = 1e-4
"""Of logits that vary by 2.5."""

LONGEST = 96
"""Tokens of the longest prompt, and some more."""


@pytest.mark.parametrize(
    ("case", "forms"),
    sampled(
        list(itertools.product(sight_cases(), ["portable", "kernels"])),
        lambda each: each[0].name.endswith("-1") and each[1] == "kernels",
    ),
    indirect=["forms"],
    ids=lambda each: getattr(each, "name", each),
)
def test_logits_equal_those_of_transformers(case, reference, tmp_path, forms):
    case.write(tmp_path, json.loads(str(reference[f"{case.name} tensors"])))
    config = config_file.load_config(tmp_path, images=True)
    module = model_registry.make_decoder(config, out_in=forms is not None)
    described = Images(**asdict(sight_config.describe_sight(config.sight, config.hidden_size)))
    files = [tmp_path / f"picture{number}.png" for number in range(len(PICTURES))]
    pixels = np.stack([pixels_of(file, described, "picture") for file in files])
    checkpoint = open_checkpoint(tmp_path, out_in=forms is not None, images=True)
    weights, call = with_weights(module, checkpoint, forms)
    run = jax.jit(partial(call, "__call__"))
    read = np.asarray(jax.jit(partial(call, "image"))(weights, pixels))
    read = read.reshape(len(files), described.tokens, -1)
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
            assert np.abs(np.asarray(logits[0]) - expected[place]).max() <= TOLERANCE
            logits, cache = run(weights, token[None, None], count + place, one, cache)
