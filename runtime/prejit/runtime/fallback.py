"""The fallback to compiling on this machine: its warning, its counters and its error."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from datetime import date, timedelta

from prejit.runtime.errors import MismatchError
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.opening import Target
from prejit.runtime.format.schema import Portable

NOTICE = timedelta(days=30)
"""How long before portable programs expire somebody is told."""

fallbacks: Counter[str] = Counter()
fallbacks_lock = threading.Lock()


def fallback_counts() -> dict[str, int]:
    """How many times each axis caused a fallback in this process, by its name.

    A load that falls back counts each axis on which the closest target does not fit.
    """
    with fallbacks_lock:
        return dict(fallbacks)


def expiry_notice(portable: Portable | None, jaxlib: str, today: date) -> str | None:
    """What to say of portable programs whose promised time is about to end, or has; None: nothing.

    Args:
        portable: of the bundle; None: of format 1, which tells nothing.
        jaxlib: that is to read them. The one that wrote them always can.
        today: the date.
    """
    if portable is None or portable.readable_until is None or jaxlib == portable.jax:
        return None
    until = date.fromisoformat(portable.readable_until)
    if today + NOTICE < until:
        return None
    ends = "ended" if today > until else "ends"
    return (
        f"its portable programs are of jax {portable.jax}, which later versions promise to read for six "
        f"months: that {ends} on {until}. Build it again with a newer jax"
    )


def closest_verdict(targets: Sequence[Target]) -> Target:
    """Return the target that fewest axes separate from this machine."""
    return min(targets, key=lambda target: target.verdict.distance)


def mismatch(layout: Layout, targets: Sequence[Target]) -> MismatchError:
    """Return the error for a machine that matches no target."""
    reasons = "; or ".join(f"{target.name} ({target.verdict.reason()})" for target in targets)
    return MismatchError(
        f"{layout.path}: this machine is none of the bundle's targets: {reasons}",
        verdicts=tuple(target.verdict for target in targets),
        hint="add a [[target]] for this machine and build again, or allow compiling here "
        '(on_mismatch="jit")',
    )


def fallback_warning(layout: Layout, closest: Target) -> str:
    """Return the warning that programs are compiled on this machine, and why."""
    return (
        f"{layout.path}: this machine is none of the bundle's targets, so programs are compiled here; "
        f"closest is {closest.name}: {closest.verdict.reason()}. See `prejit explain {layout.path}`."
    )
