"""What our encoders give, in the form in which torch's results are recorded."""

import itertools
from functools import partial

import jax
import numpy as np
import pytest
from flax import nnx
from tests.extent import sampled

from prejit.compiler.checkpoint.checkpoint import open_encoder
from prejit.compiler.models import config_file, model_registry
from prejit.compiler.models.layers.kernel_calls import using
from prejit.compiler.models.parameters import with_parameters

PADDING = 5
"""How many more tokens of padding stand behind every row than torch had."""


def in_both_forms(cases, is_sampled):
    """Parametrize with cases and forms; `make test` runs those for which `is_sampled(case, form)`."""
    every = itertools.product(cases, ["portable", "kernels"])
    return pytest.mark.parametrize(
        ("case", "forms"),
        sampled(every, lambda each: is_sampled(*each)),
        indirect=["forms"],
        ids=lambda each: getattr(each, "name", each),
    )


def with_weights(module, checkpoint, forms):
    """Return the weights of a checkpoint, and a function that calls a method of the module with weights."""
    graph, state = nnx.split(module)

    def call(name, weights, *arguments, **options):
        with using(forms):
            bound = nnx.merge(graph, with_parameters(state, weights))
            return getattr(bound, name)(*arguments, **options)

    return {name: checkpoint.read(name) for name in checkpoint.names}, call


def encoder_results(directory, tokens, lengths, forms, *, pooled, packed=False):
    """As torch_result; with more padding behind every row and a row without any token, or all rows packed."""
    out_in = forms is not None
    module = model_registry.make_encoder(config_file.load_encoder(directory), out_in=out_in)
    weights, call = with_weights(module, open_encoder(directory, out_in=out_in), forms)
    padded = np.pad(tokens, ((0, 1), (0, PADDING)), constant_values=5)
    length = np.append(lengths, np.int32(0))
    if packed:
        joined = tokens[np.arange(tokens.shape[1]) < lengths[:, None]]
        padded = np.pad(joined, (0, PADDING), constant_values=5)[None]
    run = jax.jit(partial(call, "__call__" if pooled else "hidden"))
    result = np.asarray(run(weights, padded, length))
    assert np.isfinite(result).all(), "a row of padding alone must not be NaN"
    result = result[:-1]
    if pooled:
        return result
    count = tokens.shape[1]
    return result[:, :count] * (np.arange(count) < lengths[:, None])[..., None]
