"""Our models that read images against transformers' torch models: image_record.py recorded them."""

import itertools
import json
from dataclasses import asdict
from functools import partial

import jax
import numpy as np
import pytest
from tests.extent import sampled

from prejit.compiler.checkpoint.checkpoint import open_encoder
from prejit.compiler.models import image_config
from prejit.compiler.models.families.image_towers import normalized_pixels
from prejit.runtime.encoding.images import pixels_of
from prejit.runtime.format.bundle_schema import Images

from .encoder_results import with_weights
from .image_cases import PICTURES, REFERENCE, image_cases

REFERENCES = (REFERENCE,)
TOLERANCE = 3e-5
PIXEL_TOLERANCE = 5e-7
"""Of a pixel after it was normalized: rounding of one multiplication, subtraction and division."""


def is_sampled(case, form):
    """Return whether `make test` runs a case: the first of each family, and one of the portable form."""
    return case.name.endswith("-0") if form == "kernels" else case.name == "clip-1"


@pytest.mark.parametrize(
    ("case", "forms"),
    sampled(
        list(itertools.product(image_cases(), ["portable", "kernels"])),
        lambda each: is_sampled(*each),
    ),
    indirect=["forms"],
    ids=lambda each: getattr(each, "name", each),
)
def test_pixels_and_results_equal_those_of_transformers(case, reference, tmp_path, forms):
    case.write(tmp_path, json.loads(str(reference[f"{case.name} tensors"])))
    source = image_config.load_images(tmp_path)
    described = Images(**asdict(image_config.describe_images(source)))
    files = [tmp_path / f"picture{number}.png" for number in range(len(PICTURES))]
    pixels = np.stack([pixels_of(file, described, "picture") for file in files])
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


def test_every_case_is_recorded(reference):
    assert {name.split(" ")[0] for name in reference} == {case.name for case in image_cases()}
