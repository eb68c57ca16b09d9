"""Generate from four prompts at once, and see that each text is the one that it would be alone."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

PROMPTS = [[(n * n + 5 * row) % 512 for n in range(10 + 7 * row)] for row in range(4)]


def run(generate: Callable[[Sequence[int], int], Any], count: int) -> Any:
    """Return this many tokens that follow the longest prompt."""
    return generate(PROMPTS[-1], count)


if __name__ == "__main__":
    from prejit.runtime import load

    bundle = load(sys.argv[1], on_mismatch="error")
    together = bundle.generate_batch(PROMPTS, max_new_tokens=32)
    for prompt, result in zip(PROMPTS, together, strict=True):
        print(f"{len(prompt)} tokens, then", *result.token_ids[:8], "...")
        assert bundle.generate(prompt, max_new_tokens=32).token_ids == result.token_ids
    print("each text is what its prompt gives alone")
