"""A program as jax lowered it while `prejit record` watched, with all that jax gives XLA to compile it.

    {"prejit": 1, "platform": "cpu", "devices": "devices [0] of 1", "count": 1,
     "accelerator": HEX, "options": BASE64}, newline, StableHLO as a portable artifact

`recording/hook/jax_lowerings.py` writes this in the processes of a recorded program.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass

from prejit.runtime.errors import BuildError

_BEGINNING = b'{"prejit": 1, '


@dataclass(frozen=True, slots=True)
class RecordedLowering:
    """A lowered program.

    Attributes:
        devices: the devices that it runs on, as `devices_text` of the runtime's hook has them.
        count: number of devices of the process.
        accelerator: what jax hashes about these devices into its key, hexadecimal. On CPUs it is the list of
            the CPU's extensions.
        options: XLA's CompileOptions, serialized.
        portable: its StableHLO as a portable artifact.
    """

    devices: str
    count: int
    accelerator: str
    options: bytes
    portable: bytes

    @classmethod
    def of(cls, content: bytes, name: str = "a recorded program") -> RecordedLowering:
        """Return the program in a file. `name` says which, for errors.

        Raises:
            BuildError: it is none.
        """
        header, _, portable = content.partition(b"\n")
        try:
            found = json.loads(header)
            return cls(
                found["devices"],
                found["count"],
                found["accelerator"],
                base64.b64decode(found["options"]),
                portable,
            )
        except (ValueError, KeyError, TypeError) as error:
            raise BuildError(
                f"{name}: expected StableHLO as `prejit record` keeps it, found other bytes: {error!r}",
                hint="record again, into a new directory",
            ) from error

    @staticmethod
    def is_in(content: bytes) -> bool:
        """Return whether bytes are such a program, and not a portable artifact."""
        return content.startswith(_BEGINNING)
