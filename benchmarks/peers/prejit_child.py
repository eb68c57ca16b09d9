"""The work of a row, from a bundle.

    peers/prejit_child.py generate BUNDLE [BATCH [TOKENS [VOCABULARY]]]   32 tokens in, 64 out
    peers/prejit_child.py prefill  BUNDLE BATCH TOKENS [VOCABULARY]       prompts, one after the other
    peers/prejit_child.py requests BUNDLE                                 4 tokens in, 15 out, repeatedly

A bundle that does not match this machine is an error: nothing may be compiled. Only what is public is used,
so that before_after.py can run it on any state of the runtime.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from prejit.runtime import Bundle, load


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


if __name__ == "__main__":
    job, path, *more = sys.argv[1:]
    bundle = load(path, on_mismatch="error")
    from benchmarks.harness import workload  # loading comes first, as in a server

    print("LOADED", flush=True)
    usual = (1, workload.PROMPT_TOKENS, workload.VOCABULARY)
    size, length, vocabulary = (*map(int, more), *usual[len(more) :])
    if job == "prefill":
        facts = workload.prefill(lambda prompt: next(tokens(bundle, prompt, 1)), length, vocabulary)
    elif job == "requests":
        short = workload.prompt_ids(workload.SHORT_PROMPT_TOKENS)
        facts = workload.requests(lambda: tokens(bundle, short, workload.SHORT_NEW_TOKENS))
    else:
        rows = [
            [token % vocabulary for token in prompt] for prompt in workload.prompts(length, size)
        ]
        count = workload.NEW_TOKENS
        stream = batch_tokens(bundle, rows, count) if size > 1 else tokens(bundle, rows[0], count)
        facts = workload.stream(stream, size)
    sources = {r.program: r.source for r in bundle.report() if r.source != "unused"}
    workload.say_last(**facts, load_seconds=bundle.load_seconds, programs=sources)
