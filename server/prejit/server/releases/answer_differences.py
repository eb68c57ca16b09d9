"""How the answers of two bundles to the same request differ: statuses, tokens, arrays and texts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prejit.server.telemetry.requestlog import RecordedCall

_ROUNDING = 1e-3
"""How much norms may differ, relatively, where the order of sums depends on the bucket."""


@dataclass(frozen=True, slots=True)
class BundleAnswer:
    """The answer of a bundle to a request.

    Attributes:
        status: of the response.
        calls: the calls of engines.
        said: the text in the response; empty: it has none, or it is not compared.
        seconds: time from the request to the end of its response.
        cpu_seconds: CPU time that it took; 0: not known.
    """

    status: int
    calls: tuple[RecordedCall, ...]
    said: str = ""
    seconds: float = 0.0
    cpu_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class AnswerDifference:
    """The difference of two answers.

    Attributes:
        reasons: what was expected and what was found; empty: nothing differs.
        compared: the number of results that were compared: tokens, or arrays of a call as one.
        changed: how many of them differ. All tokens after the first one that differs do.
        rounded: whether arrays differ by rounding alone.
        is_failure: whether the second one has no answer at all.
    """

    reasons: tuple[str, ...]
    compared: int
    changed: int
    rounded: bool = False
    is_failure: bool = False


def difference_of(old: BundleAnswer, new: BundleAnswer) -> AnswerDifference:
    """Return how two answers differ. Calls that gave nothing yet when they were cut are not compared."""
    compared = changed = 0
    rounded = False
    reasons: list[str] = []
    whole = sum(map(_results, old.calls))
    if new.status != 200:
        failed = (f"expected status {old.status}, found {new.status}",)
        return AnswerDifference(failed, whole, whole, is_failure=True)
    if len(new.calls) != len(old.calls):
        counts = (f"expected {len(old.calls)} calls of engines, found {len(new.calls)}",)
        return AnswerDifference(counts, whole, whole)
    for was, now in zip(old.calls, new.calls, strict=True):
        if was.token_ids is None and was.arrays is None:
            continue
        compared += _results(was)
        if was.arrays is not None:
            reason, by_rounding = _array_difference(was.arrays, now.arrays or {})
            rounded = rounded or by_rounding
            changed += bool(reason)
        else:
            reason, count = _token_difference(was, now)
            changed += count
        reasons += [reason] if reason else []
    if not reasons and old.said != new.said:
        reasons.append(
            f"the same tokens as text: expected {old.said[-80:]!r}, found {new.said[-80:]!r}"
        )
        changed = compared
    if not reasons and (reason := _prompt_difference(old.calls, new.calls)):
        reasons.append(reason)
        changed = compared
    return AnswerDifference(tuple(reasons), compared, changed, rounded)


def _results(call: RecordedCall) -> int:
    return 1 if call.arrays is not None else len(call.token_ids or ())


def _token_difference(was: RecordedCall, now: RecordedCall) -> tuple[str, int]:
    """Return how the tokens differ, and how many do. A request that was cut short has the first ones."""
    old, new = was.token_ids or [], now.token_ids or []
    if not was.finish_reason:
        new = new[: len(old)]
    if old == new and was.finish_reason in ("", now.finish_reason):
        return "", 0
    if old == new:
        return f"expected finish_reason {was.finish_reason!r}, found {now.finish_reason!r}", 1
    place = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), None)
    if place is None:
        least = min(len(old), len(new))
        return f"expected {len(old)} tokens, found {len(new)}", max(1, len(old) - least)
    return f"token {place}: expected {old[place]}, found {new[place]}", len(old) - place


def _prompt_difference(old: Sequence[RecordedCall], new: Sequence[RecordedCall]) -> str:
    """Return how the length of prompts differs, where both say it: another tokenizer or template."""
    for was, now in zip(old, new, strict=True):
        before, after = (each.stats.get("prompt_tokens") for each in (was, now))
        if before is not None and after is not None and before != after:
            return f"expected a prompt of {before:g} tokens, found {after:g}"
    return ""


def _array_difference(was: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, bool]:
    """Return how arrays differ, and whether they differ by rounding at least."""
    if was.keys() != now.keys():
        return f"expected the arrays {', '.join(was)}, found {', '.join(now) or 'none'}", False
    rounded = False
    for name, old in was.items():
        new = now[name]
        if (old["dtype"], old["shape"]) != (new["dtype"], new["shape"]):
            described = (f"{each['dtype']}{each['shape']}" for each in (old, new))
            return "{}: expected {}, found {}".format(name, *described), False
        if old["digest"] == new["digest"]:
            continue
        norms = old.get("norm", math.nan), new.get("norm", math.nan)
        if not math.isclose(*norms, rel_tol=_ROUNDING):
            return f"{name}: expected other values: norm {norms[0]}, found {norms[1]}", False
        rounded = True
    return "", rounded
