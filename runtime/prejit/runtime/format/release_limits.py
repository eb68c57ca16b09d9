"""`[slo]` of a manifest: the limits that a release has to keep. Its bundle carries them.

The build writes them into the annotation `dev.prejit.slo` of each target's manifest, as canonical JSON:

    {"first_token_ms":200,"max_slower":"5%"}

They are no part of the program table: who loads a bundle does not read them. `prejit gate` and a canary do.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar

from prejit.runtime.base.typed_json import to_json

SLO = "dev.prejit.slo"
"""The annotation of a target's manifest with the limits."""
SHARE_PATTERN = r"^[0-9]{1,6}(\.[0-9]{1,6})?%$"
"""The form of a share, as a JSON Schema has it."""


@dataclass(frozen=True, slots=True)
class ReleaseLimits:
    """`[slo]`: the limits that `prejit gate` and a canary hold a release to.

    A share is a text such as "5%". The limits without a default hold only where they are given.

    Attributes:
        first_token_ms: the longest time to the first token of a request in milliseconds, as a median.
        p95_ms: the longest time of a request in milliseconds, at the 95th percentile.
        tokens_per_second: the lowest rate of the tokens after the first of a request, as a median.
        start_ms: the longest time from the start of a process to its first answer in milliseconds, as a
            median.
        memory_bytes: the most resident memory of a process that serves the bundle.
        bundle_bytes: the most bytes that a machine fetches for its target.
        max_slower: how much longer requests may take than with the release before. Default: "5%".
        max_slower_start: how much longer a start may take. Default: "25%".
        max_more_memory: how much more memory a process may use. Default: "10%".
        max_larger: how many more bytes a machine may fetch. Default: "10%".
        max_changed_tokens: the share of tokens that may differ. Default: "0%".
        max_perplexity_change: how much higher the perplexity may be that builds measure. Default: "1%".
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"strict": True, "extra": "forbid"}

    first_token_ms: int | None = None
    p95_ms: int | None = None
    tokens_per_second: int | None = None
    start_ms: int | None = None
    memory_bytes: int | None = None
    bundle_bytes: int | None = None
    max_slower: str | None = None
    max_slower_start: str | None = None
    max_more_memory: str | None = None
    max_larger: str | None = None
    max_changed_tokens: str | None = None
    max_perplexity_change: str | None = None

    def share(self, name: str) -> float:
        """Return a limit that is a share, or its default: 0.05 for `5%`."""
        return fraction_of(getattr(self, name) or DEFAULT_SHARES[name])


DEFAULT_SHARES = {
    "max_slower": "5%",
    "max_slower_start": "25%",
    "max_more_memory": "10%",
    "max_larger": "10%",
    "max_changed_tokens": "0%",
    "max_perplexity_change": "1%",
}
"""The shares that hold where a manifest gives none."""


def fraction_of(text: str) -> float:
    """Return a share as a number: 0.05 for `5%`.

    Raises:
        ValueError: the text is no share.
    """
    if "\n" in text or re.match(SHARE_PATTERN, text) is None:
        raise ValueError(f'expected a share such as "5%" or "0.1%", found {text!r:.40}')
    return float(text.removesuffix("%")) / 100


def limits_annotation(limits: ReleaseLimits | None) -> dict[str, str]:
    """Return the annotation that carries limits; empty: there are none."""
    content = b"{}" if limits is None else to_json(limits)
    return {} if content == b"{}" else {SLO: content.decode("ascii")}
