"""The smallest number of sets that covers all elements (minimum set cover)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prejit.runtime.fleet.machines import MAX_DEPTH, MAX_STEPS

# Minimum set cover


def fewest_sets(masks: Sequence[int]) -> tuple[list[int], bool]:
    """The fewest of these sets whose union is the union of all.

    Branch and bound: the element that the fewest sets have must be in one of them. What is left needs
    at least as many sets as it has elements of which no two share one. It starts from what a greedy
    search finds (Chvatal 1979), and that is all there is after MAX_STEPS.

    Args:
        masks: the sets, an element a bit.

    Returns:
        Their places, and whether fewer are known to be impossible.
    """
    kept = [  # a set within another is of no use, nor are equal ones but the first
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
    """Return the union of sets that are spelled as bit masks."""
    union = 0
    for mask in masks:
        union |= mask
    return union


def _greedy(masks: Sequence[int], kept: Sequence[int], left: int) -> list[int]:
    chosen = []
    while left:
        index = max(kept, key=lambda i: (masks[i] & left).bit_count())
        chosen.append(index)
        left &= ~masks[index]
    return chosen
