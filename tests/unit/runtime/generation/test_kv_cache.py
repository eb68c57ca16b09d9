"""Copies between caches: the rows that were asked for, at the beginning, and nothing else."""

import numpy as np
import pytest

from prejit.runtime.device.transfer import dtype_of, to_numpy
from prejit.runtime.errors import UsageError
from prejit.runtime.format.arrays import Array
from prejit.runtime.generation import host_caches
from prejit.runtime.generation.decoder_programs import DecoderPrograms
from prejit.runtime.records import replace

from .batches import filled, values


@pytest.mark.parametrize("by_host", [True, False])
@pytest.mark.parametrize(
    ("batch", "context", "rows"), [(3, 24, {0: 2, 2: 1}), (1, 72, {0: 0, 1: 0})]
)
def test_rows_go_to_their_slots_and_others_stay(bundle, batch, context, rows, by_host, monkeypatch):
    monkeypatch.setattr(bundle.decoder, "copies_rows", by_host)
    source, target = filled(bundle, batch, context), filled(bundle, 3, 72, offset=7)
    given, expected = values(source), values(target)
    target.copy_rows(source, rows)
    for new, old, copied in zip(values(target), expected, given, strict=True):
        for to, row in rows.items():
            old[to, :, :context] = copied[row]
        np.testing.assert_array_equal(new, old)
    for now, then in zip(values(source), given, strict=True):
        np.testing.assert_array_equal(now, then)


def test_the_host_copies_the_positions_that_count(bundle):
    source, target = filled(bundle, 3, 24), filled(bundle, 3, 72, offset=7)
    expected = values(target)
    target.copy_rows(source, {0: 2, 1: 0}, {0: 5, 1: 24})
    for new, old, copied in zip(values(target), expected, values(source), strict=True):
        old[0, :, :5], old[1, :, :24] = copied[2, :, :5], copied[0]
        np.testing.assert_array_equal(new, old)


def test_the_host_copies_an_array_of_one_value_for_each_row(bundle):
    """An encoder-decoder has one: how long each source is."""
    device = bundle.decoder.device
    layout = (Array(("cache", 0), "int32", (1,), variables=("batch",)),)
    given, held = (device.copy(np.array(values, np.int32)) for values in ([3, 4], [5, 6, 7]))
    host_caches.copy_rows(layout, [given], [held], {2: 0}, {2: 9})
    np.testing.assert_array_equal(to_numpy(held), [5, 6, 3])


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16"])
def test_the_host_copies_and_wipes_dtypes_that_numpy_does_not_have(bundle, dtype):
    device = bundle.decoder.device
    layout = (Array(("cache", "keys"), dtype, (1, 1, 4), variables=("batch", "context", "")),)
    numbers = (np.arange(24).reshape(3, 2, 4) % 7).astype(dtype_of(dtype))
    given, zeros = device.copy(numbers), device.zeros((2, 5, 4), dtype_of(dtype))
    host_caches.copy_rows(layout, [given], [zeros], {0: 2, 1: 1}, {0: 1, 1: 2})
    expected = np.zeros((2, 5, 4), np.float32)
    expected[0, :1], expected[1, :2] = numbers[2, :1], numbers[1]
    np.testing.assert_array_equal(to_numpy(zeros).astype(np.float32), expected)
    host_caches.wipe([zeros])
    np.testing.assert_array_equal(to_numpy(zeros).astype(np.float32), 0)


def test_programs_copy_caches_of_values_that_share_a_byte(bundle):
    """The host would write into a copy: jaxlib unpacks them."""
    assert bundle.decoder.copies_rows
    known = bundle.decoder.decoder
    packed = replace(known, cache=[text.replace("float32", "int4") for text in known.cache])
    assert packed != known
    assert not DecoderPrograms(packed, bundle.decoder.programs).copies_rows


def test_a_cache_that_grows_keeps_its_rows_and_is_kept_once(bundle):
    cache = filled(bundle, 3, 24)
    before = values(cache)
    grown = cache.grown(72)
    assert (grown.batch, grown.context) == (3, 72)
    for new, old, old_still in zip(values(grown), before, values(cache), strict=True):
        np.testing.assert_array_equal(new[:, :, :24], old)
        np.testing.assert_array_equal(new[:, :, 24:], 0)
        np.testing.assert_array_equal(old_still, old)
    with pytest.raises(UsageError, match="copies caches of 3 x 72 to 3 x 24, found none"):
        bundle.decoder.copy_for((3, 72), (3, 24))
    prefix = bundle.prefix([1, 2, 3, 4, 5])
    longer = prefix.at(72)
    assert (prefix.context, longer.context, prefix.token_ids) == (24, 72, (1, 2, 3, 4, 5))
    assert prefix.at(72) is longer
    for long, short in zip(values(longer), values(prefix.at(24)), strict=True):
        np.testing.assert_array_equal(long[:, :, :24], short)
        assert np.abs(short[0, :, :5]).min() > 0
