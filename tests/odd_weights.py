"""Weights that are not numbers, for what looks for them."""

import numpy as np

from prejit.runtime.device.transfer import to_numpy


def spoil_weights(bundle):
    """Put NaN into a vector of the weights that a decode step of a loaded bundle reads."""
    programs = bundle.decoder.programs
    decode = next(each for each in bundle.config.programs if each.kind == "decode")
    weights = programs.weights(decode.weights)
    values = [to_numpy(each) for each in weights]
    place = next(n for n, each in enumerate(values) if each.ndim == 1)
    weights[place] = programs.device.copy(np.full_like(values[place], np.nan))
