"""Check that a request stays within the limits of its key."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from prejit.server.gate.http_errors import ApiError

if TYPE_CHECKING:
    from prejit.server.gate.api_keys import ApiKey


def priority(key: ApiKey, given: int | None) -> int:
    """Return the priority of a request: what it gives, else the one of the key's range that is nearest to 0.

    Raises:
        ApiError: the key may not have it.
    """
    least, most = key.priorities
    if given is None:
        return max(least, min(0, most))
    if least <= given <= most:
        return given
    raise ApiError(
        400,
        f"priority: expected {least} to {most}, which this client may have, found {given}",
        param="priority",
        code="priority_not_allowed",
    )


def check_tokens(key: ApiKey) -> None:
    """Check that a key has tokens left.

    Raises:
        ApiError: it has used those of this minute.
    """
    if key.meter is not None and (seconds := key.meter.wait_seconds()):
        wait = math.ceil(seconds)
        raise ApiError(
            429,
            f"expected at most {key.meter.per_minute} tokens a minute with this key, found them used: try "
            f"again after {wait} seconds",
            type="rate_limit_error",
            code="rate_limit_exceeded",
            headers={"Retry-After": str(wait)},
        )
