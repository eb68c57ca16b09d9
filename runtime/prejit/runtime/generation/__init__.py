"""Tokens from a decoder: options, a batch of slots over one KV cache, prefill, decode, sampling arguments.

May import `programs`, `text` and the rooms below them. No other room of the runtime except the public face
(`bundle`, `session`), `bench` and `cli` imports this one.

Begin with `generate.run`: it feeds requests into a `batch.Batch` and turns the tokens that come out into
text. The modules, lowest first:

    decoder_programs   which program serves which batch, context and prompt length, and how to call it
    kv_cache           the cache arrays on the device; copies between caches; shared prefixes
    options            every option of a generation, defined once; requests
    defaults           the options in a model's generation_config.json
    sampling           sampling options as arrays for the programs; log-probabilities from their results
    prompt_lookup      drafts of the next tokens from the text so far
    rows               a request that occupies a slot, and the checks before it may
    prefill            prompts into the cache
    decode             one decode or verify call over all slots
    batch              continuous batching: insert, step, evict
    generate           requests in, text and statistics out
"""
