"""The work of a row, from a bundle.

    peers/prejit_child.py generate BUNDLE [BATCH]     32 tokens in, 64 out
    peers/prejit_child.py prefill  BUNDLE     512 tokens in, again and again
    peers/prejit_child.py kv-cache BUNDLE     4 tokens in, 15 out
    peers/prejit_child.py buckets  BUNDLE     every program of the bundle once

A bundle that does not match this machine is an error: nothing may be compiled. With another machine's
fingerprint (a .json file) as a third argument, the bundle falls back as on that machine.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from benchmarks.harness import workload
from prejit.runtime import Bundle, Fingerprint, load
from prejit.runtime.device.transfer import aligned_zeros, dtype_of, to_numpy
from prejit.runtime.format.bundle_schema import ProgramEntry
from prejit.runtime.generation.decoder_programs import DecoderPrograms
from prejit.runtime.generation.kv_cache import KVCache


def tokens(bundle: Bundle, prompt: list[int], count: int) -> Iterator[int]:
    """Yield greedy tokens. No stop tokens: random weights may give any."""
    for piece in bundle.stream(prompt, max_new_tokens=count, stop_token_ids=()):
        assert piece.token_id is not None
        yield piece.token_id


def batch_tokens(bundle: Bundle, prompts: list[list[int]], count: int) -> Iterator[int]:
    """Yield greedy tokens of the first of several rows that run together."""
    batch = bundle.batch(len(prompts))
    slots = batch.insert(
        *(bundle.request(p, max_new_tokens=count, stop_token_ids=()) for p in prompts)
    )
    while step := batch.step():
        yield from (t.token_id for t in step if t.slot == slots[0] and t.token_id is not None)


def sources(bundle: Bundle) -> dict[str, str]:
    """Return how each used program was obtained."""
    return {r.program: r.source for r in bundle.report() if r.source != "unused"}


def generate(bundle: Bundle, size: int = 1) -> None:
    """Generate one row, or `size` rows together."""
    count = workload.NEW_TOKENS
    if size == 1:
        vocabulary = bundle.decoder.decoder.vocab_size  # of 4096 in the smallest model
        prompt = [token % vocabulary for token in workload.prompt_ids(workload.PROMPT_TOKENS)]
        stream = tokens(bundle, prompt, count)
    else:
        stream = batch_tokens(bundle, workload.prompts(workload.PROMPT_TOKENS, size), count)
    facts = workload.stream(stream, size)
    workload.say_last(
        **facts,
        load_seconds=bundle.load_seconds,
        programs=sources(bundle),
        modules=len(sys.modules),  # some 390; 730 where something imported all of jax
    )


def prefill(bundle: Bundle) -> None:
    """Measure prompts."""
    facts = workload.prefill(lambda prompt: next(tokens(bundle, prompt, 1)))
    workload.say_last(**facts, programs=sources(bundle))


def kv_cache(bundle: Bundle) -> None:
    """Run a short request cold, then warm."""
    prompt = workload.prompt_ids(workload.SHORT_PROMPT_TOKENS)
    facts = workload.requests(lambda: tokens(bundle, prompt, workload.SHORT_NEW_TOKENS), warm=3)
    workload.say_last(**facts, programs=sources(bundle))


def buckets(bundle: Bundle) -> None:
    """Load and run every program that gives tokens, as the JAX baseline does."""
    decoder = bundle.decoder
    answers = 0
    for batch in decoder.batches:
        for context in decoder.contexts:
            cache = KVCache(decoder, batch, context)
            for program in (*decoder.prefills(batch, context), decoder.decode_for(batch, context)):
                answer(decoder, program, cache)
                answers += 1
                if answers == 1:
                    workload.say_first()
    workload.say_last(answers=answers, programs=sources(bundle))


def answer(decoder: DecoderPrograms, program: ProgramEntry, cache: KVCache) -> None:
    """Run a prefill program on whole prompts, or a decode program for one step, and read the tokens."""
    prompt = workload.prompt_ids(program.bucket.get("prompt", 1))
    inputs = {}
    for array in decoder.programs.arguments(program.name):
        name = str(array.path[0])
        if name == "cache":
            break
        value = aligned_zeros(array.shape, dtype_of(array.dtype))
        if name == "tokens":
            value[:] = prompt
        elif name in ("length", "live", "steps", "top_p", "repetition_penalty"):
            value[...] = len(prompt) if name == "length" else 1
        inputs[name] = decoder.device.put(value)
    results = cache.run(program, inputs)
    to_numpy(results["token"])


if __name__ == "__main__":
    jobs = {"generate": generate, "prefill": prefill, "kv-cache": kv_cache, "buckets": buckets}
    job, path, *more = sys.argv[1:]
    machine = Fingerprint.read(more.pop()) if more and more[-1].endswith(".json") else None
    bundle = load(path, on_mismatch="jit" if machine else "error", fingerprint=machine)
    print("LOADED", flush=True)
    jobs[job](bundle, *map(int, more))
