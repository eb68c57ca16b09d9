"""Stream the continuation of a long text, then go on with it as a conversation does."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

TEXT = [(7 * n * n + n) % 512 for n in range(1000)]


def run(generate: Callable[[Sequence[int], int], Any], count: int) -> Any:
    """Return this many tokens that follow the text."""
    return generate(TEXT, count)


if __name__ == "__main__":
    from prejit.runtime import load

    bundle = load(sys.argv[1], on_mismatch="error")
    print("streamed:", *(piece.token_id for piece in bundle.stream(TEXT, max_new_tokens=10)))

    session, text = bundle.session(), list(TEXT)
    for turn in (1, 2, 3):
        text += [turn, 10, 20]  # what the other one says
        result = session.generate(text, max_new_tokens=32)
        text += result.token_ids
        known = result.stats.reused_tokens
        print(f"turn {turn}: {result.stats.prompt_tokens} tokens, {known} of them in the state")
