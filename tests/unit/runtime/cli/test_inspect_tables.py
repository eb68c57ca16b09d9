"""A table that promises a slot which the server then refuses would be worse than none."""

import json

from prejit.runtime import load
from prejit.runtime.generation.cache_plan import TableBuckets, peak_bytes
from prejit.server.engine.memory import plan_caches


def test_the_table_needs_what_an_engine_plans(decoder_dir, said, bundle_dir, ran):
    bundle = load(decoder_dir, on_mismatch="error")
    decoder = bundle.decoder
    table = TableBuckets.of(bundle.config, decoder.decoder)
    assert (table.batches, table.contexts) == ((1, 3), (24, 72))
    for batch in table.batches:
        for context in table.contexts:
            peak = peak_bytes(table, batch, context, table.batches[0])
            plan = plan_caches(decoder, batch, peak, 0)
            assert (plan.batch, plan.peak_bytes, plan.together) == (batch, peak, 1)
            assert plan.context >= context
    capacity = ("inspect", decoder_dir, "--capacity")
    [found] = json.loads(said(*capacity, "--json"))
    sizes = {(each["slots"], each["context"]): each["total_bytes"] for each in found["buckets"]}
    assert len(sizes) == 4
    parts = [found[f"{of}_bytes"] for of in ("weights", "executables", "temporary")]
    assert 0 < parts[0] < sum(parts) < sizes[1, 24] < sizes[3, 24] < sizes[3, 72]
    budget = str(sizes[3, 24])
    text = said(*capacity, "--memory", budget)
    assert "3 of 24 tokens" in text
    assert "(too much)" in text
    [found] = json.loads(said(*capacity, "--memory", budget, "--json"))
    fitting = {(each["slots"], each["context"]) for each in found["buckets"] if each["fits"]}
    assert fitting == {key for key, value in sizes.items() if value <= sizes[3, 24]}
    assert "hold no slot: the smallest bucket needs" in said(*capacity, "--memory", "1000")
    found = ran("inspect", bundle_dir, "--capacity", status=2).err
    assert "--capacity: expected a bundle with a decoder, found none in example" in found
    assert "add --capacity" in ran("inspect", bundle_dir, "--memory", "1G", status=2).err
