"""Every error and warning of prejit, for callers that catch them and scripts that test exit statuses.

Each error class has a stable `code` (printed as `error[code]`) and an exit status of the command line. A
message has the expected and the found value; the hint is the next step.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, ParamSpec, TypeVar

if TYPE_CHECKING:
    from prejit.runtime.verdict import Verdict

# Characters that move a terminal's cursor, colour its text, or change the direction of writing.
_CONTROLS = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u202a-\\u202e\\u2066-\\u2069]")

_MOST_QUOTED = 2_000
"""The longest message about a bundle."""


def printable(text: str) -> str:
    r"""Return a text with its control characters spelt out (`\x1b`); line ends and tabs stay.

    Text from a file must pass through it before it goes to a terminal, because a bundle may be hostile.
    """
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class PrejitError(Exception):
    """Base of all errors of prejit. Control characters in a message are spelt out, as `printable` does.

    Attributes:
        code: stable name of the kind of error.
        exit_code: exit status of the command line.
        hint: the next step. It is a note too (PEP 678), which tracebacks show.
    """

    code: ClassVar[str] = "error"
    exit_code: int = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(printable(message))
        self.hint = hint

    @property
    def hint(self) -> str | None:
        """The next step for the person who meets the error, or None."""
        return self._hint

    @hint.setter
    def hint(self, hint: str | None) -> None:
        self._hint = hint
        self.__notes__ = [printable(f"hint: {hint}")] if hint else []

    def describe(self) -> str:
        """Return the error as the command line prints it: one sentence, then the next step."""
        text = f"error[{self.code}]: {self}"
        return printable(f"{text}\n\nhint: {self.hint}" if self.hint else text)


class BuildError(PrejitError):
    """A build failed. The results of its finished steps stay in the cache."""

    code = "build-failed"


class CheckpointError(BuildError):
    """A checkpoint cannot be read, or does not fit its model."""

    code = "checkpoint"


class UsageError(PrejitError):
    """A command or a call got a wrong argument."""

    code = "usage"
    exit_code = 2


class ManifestError(UsageError):
    """A manifest is wrong, or asks for something that cannot be built."""

    code = "manifest"


class ContextError(UsageError):
    """A prompt, or a prompt with its new tokens, is longer than the bundle's longest context."""

    code = "context"


class MismatchError(PrejitError):
    """MISMATCH: this machine is none of the bundle's targets, and falling back was not allowed.

    Attributes:
        verdicts: the comparison for each target of the bundle, axis by axis.
    """

    code = "mismatch"
    exit_code = 3

    def __init__(
        self, message: str, *, verdicts: tuple[Verdict, ...] = (), hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.verdicts = verdicts


class ExecutableError(MismatchError):
    """XLA does not load a verified executable on this machine: too little memory, another plugin or driver.

    The bundle is not damaged.
    """

    code = "executable"


class AnswerError(MismatchError):
    """A program does not give its golden answer on this machine, and nothing else may run in its place."""

    code = "wrong-answer"


class RejectError(PrejitError):
    """REJECT: the bundle is damaged, forged or oversized. It never runs and never falls back.

    A message that is longer than 2,000 characters is cut: it may quote what a hostile bundle says.

    Attributes:
        path: the file that is at fault.
    """

    code = "reject"
    exit_code = 4

    def __init__(self, path: str, message: str, *, hint: str | None = None) -> None:
        super().__init__(
            f"{path}: {message if len(message) <= _MOST_QUOTED else message[:_MOST_QUOTED] + '...'}",
            hint=hint or "the bundle is damaged or was altered: build it or fetch it again",
        )
        self.path = path


_P = ParamSpec("_P")
_T = TypeVar("_T")


def rejecting(check: Callable[_P, _T]) -> Callable[_P, _T]:
    """Let a check raise ValueError for a RejectError about the file that its last argument, `path`, names."""

    @functools.wraps(check)
    def checked(*args: _P.args, **named: _P.kwargs) -> _T:
        try:
            return check(*args, **named)
        except ValueError as error:
            path = named["path"] if "path" in named else args[-1]
            raise RejectError(str(path), str(error)) from error

    return checked


class UntrustedError(RejectError):
    """REJECT: a trust policy does not let this bundle run. Nothing of it was loaded.

    Attributes:
        case: stable name of the reason, such as `unsigned`.
    """

    code = "untrusted"
    exit_code = 5

    def __init__(self, path: str, message: str, *, case: str = "", hint: str | None = None) -> None:
        super().__init__(
            path,
            message,
            hint=hint
            or "sign the bundle with a key of the policy (prejit sign), or get a signed one",
        )
        self.case = case


class PolicyError(PrejitError):
    """A trust policy cannot be read or applied. It counts as one that allows nothing."""

    code = "policy"
    exit_code = 5


class QueueFullError(PrejitError):
    """An engine's queue is full, so that it refuses a request.

    Attributes:
        retry_after: seconds after which the queue will probably have room.
    """

    code = "queue-full"

    def __init__(self, message: str, *, retry_after: float, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.retry_after = retry_after


class DeadlineError(PrejitError, TimeoutError):
    """A request had no result within its timeout."""

    code = "deadline"


class ClosedError(PrejitError):
    """A bundle or an engine is closed, or takes no more requests because it will be closed."""

    code = "closed"


class NumbersError(PrejitError):
    """A model returned NaN or infinity instead of numbers."""

    code = "no-numbers"


class KernelError(PrejitError):
    """A bundle's library of native kernels cannot be loaded on this machine."""

    code = "kernels"
    exit_code = 3


class StoreError(PrejitError):
    """A file or directory cannot be read or written: missing, not permitted, disk full."""

    code = "store"
    exit_code = 6


class NetworkError(PrejitError):
    """A download failed."""

    code = "network"
    exit_code = 7


class RegressionError(PrejitError):
    """A measured bundle is slower or larger than the one it is compared with."""

    code = "regression"
    exit_code = 9


class ProcessError(PrejitError):
    """A process that was started to use a bundle failed; the command line ends with its exit status."""

    code = "process"

    def __init__(self, message: str, status: int, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        # A signal, in the convention of shells.
        self.exit_code = status if status > 0 else 128 - status


class PrejitWarning(UserWarning):
    """Something works, but not as the bundle was built; mostly a fallback to compiling."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class TruncationWarning(PrejitWarning):
    """Sentences were longer than the encoder's maximum and were cut."""


class FallbackWarning(PrejitWarning):
    """Programs are compiled here: this machine matches no target, or no program takes a call."""


class UntrustedWarning(PrejitWarning):
    """A bundle breaks a rule of a trust policy whose level lets it run: `permissive` or `audit`."""
