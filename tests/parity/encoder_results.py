"""What our encoders give, in the form in which torch's results are recorded."""

import jax
import numpy as np
from flax import nnx

from prejit.compiler.checkpoint.checkpoint import open_encoder
from prejit.compiler.models import config_file, model_registry
from prejit.compiler.models.layers.product_forms import using
from prejit.compiler.models.parameters import with_parameters

PADDING = 5
"""How many more tokens of padding stand behind every row than torch had."""


def encoder_results(directory, tokens, lengths, forms, *, pooled, packed=False):
    """As torch_result; with more padding behind every row and a row without any token, or all rows packed."""
    out_in = forms is not None
    checkpoint = open_encoder(directory, out_in=out_in)
    source = config_file.load_encoder(directory)
    graph, state = nnx.split(model_registry.make_encoder(source, out_in=out_in))
    weights = {name: checkpoint.read(name) for name in checkpoint.names}
    padded = np.pad(tokens, ((0, 1), (0, PADDING)), constant_values=5)
    length = np.append(lengths, np.int32(0))
    if packed:
        joined = tokens[np.arange(tokens.shape[1]) < lengths[:, None]]
        padded = np.pad(joined, (0, PADDING), constant_values=5)[None]

    def run(weights, tokens, length):
        module = nnx.merge(graph, with_parameters(state, weights))
        with using(forms):
            return (module if pooled else module.hidden)(tokens, length)

    result = np.asarray(jax.jit(run)(weights, padded, length))
    assert np.isfinite(result).all(), "a row of padding alone must not be NaN"
    result = result[:-1]
    if pooled:
        return result
    count = tokens.shape[1]
    return result[:, :count] * (np.arange(count) < lengths[:, None])[..., None]
