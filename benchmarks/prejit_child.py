"""The same work from a bundle.

    python benchmarks/prejit_child.py generate BUNDLE     32 tokens in, 64 out
    python benchmarks/prejit_child.py kv-cache BUNDLE     4 tokens in, 15 out
    python benchmarks/prejit_child.py buckets  BUNDLE     every program of the bundle once

A bundle that does not match this machine is an error here: nothing may be compiled. With the file of another
machine's fingerprint as a third argument it falls back instead, as that machine would.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import workload

from prejit.runtime import Bundle, Fingerprint, Sampling, load


def tokens(bundle: Bundle, prompt: list[int], count: int) -> Iterator[int]:
    """Greedy tokens. No stop tokens: random weights may give any."""
    for piece in bundle.stream(prompt, max_new_tokens=count, stop_token_ids=()):
        assert piece.token_id is not None
        yield piece.token_id


def sources(bundle: Bundle) -> dict[str, str]:
    """How each program that was used was obtained."""
    return {r.program: r.source for r in bundle.report() if r.source != "unused"}


def generate(bundle: Bundle) -> None:
    """The main row."""
    ids = workload.prompt_ids(workload.PROMPT_TOKENS)
    facts = workload.stream(tokens(bundle, ids, workload.NEW_TOKENS))
    workload.say_last(
        **facts,
        load_seconds=bundle.load_seconds,
        programs=sources(bundle),
        modules=len(sys.modules),  # some 390; 730 where something imported all of jax
    )


def kv_cache(bundle: Bundle) -> None:
    """A short request, first as a fresh process does it, then warm."""
    prompt = workload.prompt_ids(workload.SHORT_PROMPT_TOKENS)
    facts = workload.requests(lambda: tokens(bundle, prompt, workload.SHORT_NEW_TOKENS), warm=3)
    workload.say_last(**facts, programs=sources(bundle))


def buckets(bundle: Bundle) -> None:
    """Loads and runs every program."""
    from prejit.runtime.generate import Session

    decoder = bundle.decoder
    answers = 0
    for batch in decoder.batches:
        for context in decoder.contexts:
            for program in decoder.prefills(batch, context):
                session = Session(decoder, [Sampling()] * batch, context)
                session.prefill([workload.prompt_ids(program.bucket["prompt"])] * batch)
                answers += 1
                if answers == 1:
                    workload.say_first()
            session.step()
            answers += 1
    workload.say_last(answers=answers, programs=sources(bundle))


if __name__ == "__main__":
    jobs = {"generate": generate, "kv-cache": kv_cache, "buckets": buckets}
    job, path, *other = sys.argv[1:]
    machine = Fingerprint.read(other[0]) if other else None
    jobs[job](load(path, on_mismatch="jit" if machine else "error", fingerprint=machine))
