"""The answers of executables on this machine: whether they gave their golden answers.

A kept answer is a file of its own in `canary/v1` of the runtime's cache, written whole or not at all. Its
name is a digest of the executable, the weights it ran with, the golden answer, and the machine. So a bundle
with other weights or another golden answer cannot put the executables of this one into quarantine.

A right answer is kept so that the next start need not ask again. A wrong one is a quarantine: no later start
runs the executable, until `prejit verify --run` finds its answer right, or the file is removed.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import NamedTuple

from prejit.runtime.base.file_digests import digest_of
from prejit.runtime.base.typed_json import to_json
from prejit.runtime.errors import RejectError
from prejit.runtime.store.runtime_cache import cache_root, read_own, write_own

_MAX_BYTES = 1 << 14


class KeptAnswer(NamedTuple):  # a dataclass takes 0.5 ms to make, which every start would pay
    """The answer of an executable on this machine, and whether it was right.

    Attributes:
        right: whether it did.
        bundle, target, program: where it is; for people.
        executable: digest of the executable.
        difference: what it returned instead; for people. Empty: it was right.
    """

    right: bool
    bundle: str
    target: str
    program: str
    executable: str
    difference: str


def answer_file(**ingredients: object) -> Path:
    """Return the file of the kept answer that these ingredients name."""
    name = digest_of(to_json(ingredients)).removeprefix("sha256:")
    return cache_root() / "canary" / "v1" / f"{name}.json"


def read_answer(path: Path) -> KeptAnswer | None:
    """Return the kept answer in a file; None: there is none.

    Raises:
        RejectError: the file is damaged.
    """
    if not (content := read_own(path, _MAX_BYTES)):
        if content is None:
            return None
        raise RejectError(str(path), "expected a kept answer, found an empty file", hint=_HINT)
    try:
        plain = json.loads(content)
        answer = KeptAnswer(**plain)
    except (ValueError, TypeError, RecursionError) as error:
        raise RejectError(str(path), f"expected a kept answer: {error}", hint=_HINT) from error
    if not isinstance(answer.right, bool) or not all(isinstance(text, str) for text in answer[1:]):
        raise RejectError(
            str(path), "expected a kept answer, found values of other types", hint=_HINT
        )
    return answer


_HINT = "remove the file: prejit checks the executable again"


def write_answer(path: Path, answer: KeptAnswer) -> bool:
    """Write a kept answer whole. Return whether it is there now."""
    write_own(path, json.dumps(answer._asdict()).encode())
    with contextlib.suppress(RejectError):
        return read_answer(path) == answer
    return False
