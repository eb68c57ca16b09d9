"""Requests to slots of a batch, and what comes out of them."""

import numpy as np

from prejit.runtime.device.transfer import to_numpy
from prejit.runtime.generation.kv_cache import KVCache
from prejit.runtime.generation.options import Request
from prejit.runtime.generation.rows import Token

VOCAB, CONTEXT = 48, 72
TEXT = np.random.default_rng(3).integers(0, VOCAB, CONTEXT).tolist()


def request(prompt, count=8, **options):
    return Request(prompt, max_new_tokens=count, **{"stop_token_ids": (), **options})


Found = dict[int, list[Token]]
"""What came of each slot."""


def step(batch, found):
    """Add what the next step gives."""
    tokens = batch.step()
    for token in tokens:
        found.setdefault(token.slot, []).append(token)
    return tokens


def finish(batch, found=None):
    """What comes of each slot until all are free."""
    found = {} if found is None else found
    while step(batch, found):
        pass
    assert batch.free == batch.slots
    return found


def ids(tokens):
    return [token.token_id for token in tokens if token.token_id is not None]


def filled(bundle, batch, context, offset=0):
    """A cache in which all values differ."""
    cache = KVCache(bundle.decoder, batch, context)
    for place, array in enumerate(values(cache)):
        numbers = np.arange(array.size, dtype=array.dtype).reshape(array.shape)
        cache.arrays[place] = bundle.decoder.device.copy(numbers + 1e6 * place + offset)
    return cache


def values(cache):
    return [np.array(to_numpy(array)) for array in cache.arrays]
