"""The fallback to compiling on this machine: its warning, its counters, and the error instead of it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import date, timedelta

from prejit.runtime.errors import FallbackWarning, MismatchError, PrejitWarning
from prejit.runtime.format.bundle_schema import Portable
from prejit.runtime.format.layout import LayoutFiles
from prejit.runtime.format.opening import OpenTarget
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.verdict import Axis, Verdict

NOTICE = timedelta(days=30)
"""A warning about portable programs that expire begins this long before the date."""

_counts: Counter[str] = Counter()
_lock = threading.Lock()


def fallback_counts() -> dict[str, int]:
    """Return how many times each axis caused a fallback in this process, by name.

    A load that falls back counts each axis on which the closest target does not match. A call with sizes that
    no bucket has counts `bucket`, if it is compiled here. An executable that gives a wrong golden answer
    counts `canary`. A function of `jit` counts what differs between a call and the closest program:
    `program`, `structure`, `static`, `dtype`, `shape`, `donation`, `device`, `weights`, `mesh`, `settings`,
    `results` or `canary`.
    """
    with _lock:
        return dict(_counts)


def count_fallback(verdict: Verdict, on_fallback: Callable[[Axis], object] | None) -> None:
    """Count a fallback: each axis on which the closest target does not match."""
    for axis in verdict.mismatches:
        count_axis(axis.name)
        if on_fallback is not None:
            on_fallback(axis)


def count_axis(name: str) -> None:
    """Count a fallback for one reason."""
    with _lock:
        _counts[name] += 1


def expiry_notice(jax: str, readable_until: str | None, today: date) -> str | None:
    """Return a notice about portable programs that soon cannot be read any more; None: there is no need.

    Args:
        jax: the version that lowered them, and always can read them.
        readable_until: the last day on which later versions promise to, YYYY-MM-DD; None: not known.
        today: the date.
    """
    if readable_until is None:
        return None
    until = date.fromisoformat(readable_until)
    if today + NOTICE < until:
        return None
    promises = "promised" if today > until else "promises"
    return (
        f"jax {promises} that its later versions read portable programs of jax {jax} until {until}; "
        "executables have no such date. Some day, build it again with a newer jax"
    )


def closest_target(targets: Sequence[OpenTarget]) -> OpenTarget:
    """Return the target with the fewest mismatches."""
    return min(targets, key=lambda target: target.verdict.distance)


def mismatch(layout: LayoutFiles, targets: Sequence[OpenTarget]) -> MismatchError:
    """Return the error for a machine that matches no target."""
    reasons = "; or ".join(f"{target.name} ({target.verdict.reason()})" for target in targets)
    return MismatchError(
        f"{layout.path}: this machine matches none of the bundle's targets: {reasons}",
        verdicts=tuple(target.verdict for target in targets),
        hint="add a [[target]] for this machine and build again, or allow compiling here "
        '(on_mismatch="jit", or --on-mismatch jit)',
    )


def fallback_warnings(
    layout: LayoutFiles, closest: OpenTarget, portable: Portable | None, machine: Fingerprint
) -> Iterator[PrejitWarning]:
    """Yield the warning that programs are compiled on this machine, and why; then that they expire soon."""
    yield FallbackWarning(
        f"{layout.path}: this machine matches none of the bundle's targets, so programs are compiled here; "
        f"closest is {closest.name}: {closest.verdict.reason()}. See `prejit explain {layout.path}`."
    )
    if portable is not None and portable.jax != machine.jaxlib:
        notice = expiry_notice(portable.jax, portable.readable_until, date.today())
        if notice is not None:
            yield PrejitWarning(f"{layout.path}: {notice}")
