"""Continue texts in each way in a fresh process; `benchmarks.studies.guessed_tokens` starts it.

    python guessed_child.py BUNDLE PROMPTS.json TOKENS TURN

Prints `LAST` with the samples of each way by temperature. All ways continue a text before the next text, and
TURN says which of them begins. The first text warms up.
"""

import json
import sys
from typing import Any

from prejit.runtime import load

WAYS: dict[str, dict[str, Any]] = {
    "alone": {"draft": False},
    "draft model": {},
    "prompt lookup": {"prompt_lookup": True},
}
TEMPERATURES = (0.0, 0.8)


def main() -> None:
    """Load, continue and print."""
    bundle = load(sys.argv[1], on_mismatch="error")
    with open(sys.argv[2], encoding="ascii") as file:
        prompts = json.load(file)
    tokens, turn = int(sys.argv[3]), int(sys.argv[4])
    order = [*WAYS][turn % len(WAYS) :] + [*WAYS][: turn % len(WAYS)]
    found: dict[str, list[dict[str, Any]]] = {}
    for number, prompt in enumerate((prompts[0], *prompts)):
        for heat in TEMPERATURES:
            texts = set()
            for way in order:
                options: dict[str, Any] = {"temperature": heat, "seed": number, **WAYS[way]}
                made = bundle.generate(prompt, max_new_tokens=tokens, stop_token_ids=(), **options)
                texts.add(made.token_ids)
                stats = made.stats
                sample = {
                    "seconds": (tokens - 1) / stats.tokens_per_second,
                    "passes": stats.passes,
                    "drafted": stats.drafted_tokens,
                    "accepted": stats.accepted_tokens,
                }
                found.setdefault(f"{way}, {heat}", []).extend([sample] * (number > 0))
            assert len(texts) == 1, "other tokens"
    print("LAST", json.dumps({"found": found}), flush=True)


if __name__ == "__main__":
    main()
