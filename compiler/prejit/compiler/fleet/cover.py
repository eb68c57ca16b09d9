"""The smallest number of sets that covers all elements (minimum set cover)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MAX_STEPS = 5_000
"""Maximum steps of one search, which takes some tenths of a second."""
MAX_DEPTH = 200
"""Maximum number of sets that the search, which is recursive, may choose."""


def fewest_sets(masks: Sequence[int]) -> tuple[list[int], bool]:
    """Return the fewest sets whose union equals the union of all sets.

    Branch and bound: the rarest uncovered element must come from one of the sets that hold it. Uncovered
    elements that share no set give a lower bound on the sets still needed. The search starts from the
    greedy solution (Chvatal 1979) and keeps it when it runs out of steps.

    Args:
        masks: the sets, one bit per element.

    Returns:
        The indices of the chosen sets, and whether they are known to be the fewest.
    """
    kept = [  # drop sets within another set; of equal sets keep the first
        i
        for i, mask in enumerate(masks)
        if mask
        and not any(
            mask | other == other and (mask != other or j < i) for j, other in enumerate(masks)
        )
    ]
    everything = union_of(masks[i] for i in kept)
    holders = {
        bit: [i for i in kept if masks[i] >> bit & 1]
        for bit in range(everything.bit_length())
        if everything >> bit & 1
    }
    reach = {bit: union_of(masks[i] for i in has) for bit, has in holders.items()}
    rarest = sorted(holders, key=lambda bit: len(holders[bit]))
    forced = sorted({has[0] for has in holders.values() if len(has) == 1})
    left = everything & ~union_of(masks[i] for i in forced)
    best = [*forced, *_greedy(masks, kept, left)]
    steps = 0

    def lower_bound(left: int) -> int:
        count = 0
        for bit in rarest:
            if left >> bit & 1:
                count, left = count + 1, left & ~reach[bit]
        return count

    proven = len(forced) + lower_bound(left) == len(best)
    if proven or len(best) - len(forced) > MAX_DEPTH:
        return sorted(best), proven

    def search(left: int, chosen: list[int]) -> None:
        nonlocal best, steps
        steps += 1
        if not left:
            if len(chosen) < len(best):
                best = list(chosen)
            return
        if steps > MAX_STEPS or len(chosen) + lower_bound(left) >= len(best):
            return
        bit = next(bit for bit in rarest if left >> bit & 1)
        for index in sorted(holders[bit], key=lambda i: -(masks[i] & left).bit_count()):
            search(left & ~masks[index], [*chosen, index])

    search(left, forced)
    return sorted(best), steps <= MAX_STEPS


def union_of(masks: Iterable[int]) -> int:
    """Return the union of sets, each a bit mask."""
    union = 0
    for mask in masks:
        union |= mask
    return union


def _greedy(masks: Sequence[int], kept: Sequence[int], left: int) -> list[int]:
    """Return sets that cover `left`, taking the set with most uncovered elements each time."""
    chosen = []
    while left:
        index = max(kept, key=lambda i: (masks[i] & left).bit_count())
        chosen.append(index)
        left &= ~masks[index]
    return chosen
