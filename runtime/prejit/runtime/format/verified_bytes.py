"""The verification of a bundle's files, as those who use their bytes see it: here nothing is left to do."""

from __future__ import annotations

from prejit.runtime.base.process_facts import Span


class Verification:
    """The verification of bytes that are verified already. `blob_hashing.HashingVerification` has work to do.

    `waits`: when callers waited.
    """

    def __init__(self) -> None:
        self.waits: list[Span] = []

    @property
    def is_finished(self) -> bool:
        """True if every byte is verified."""
        return True

    @property
    def read_share(self) -> float:
        """The part of the work so far that was reading, 0 to 1."""
        return 0.0

    def check(self) -> None:
        """Raise the failure, if there is one by now. It waits for nothing.

        Raises:
            RejectError: a part of the bundle is damaged.
            StoreError: the disk does not give its bytes.
        """

    def wait(self, blob: str, start: int = 0, end: int | None = None) -> None:
        """Wait until a part of a blob (its digest) is verified; `end` None: the end. Raises as `check`."""

    def wait_for_small(self) -> None:
        """Wait for the verification of small blobs. Raises as `check`."""

    def finish(self) -> None:
        """Wait until every byte is verified. Raises as `check`."""

    def stop(self, reason: Exception) -> None:
        """End the work. Whoever waits for some that is left gets the reason."""

    def refuse(self, reason: Exception) -> None:
        """Give everybody who would wait the reason, without taking a lock."""


VERIFIED = Verification()
"""The verification of bytes that are verified already."""
