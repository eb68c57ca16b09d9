"""The messages between a build and the processes that lower for it: a line of JSON each.

Project                                what to read; the first request
{"checked": ...}                       it was read; a Checked or null
{"declined": why}                      the process does not find what the build has: it lowers nothing
{"lower": ...}                         a Work
{"lowered": ...}                       a Done
{"error": {code, message, hint}}       an error of the user, in place of the other answers
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prejit.compiler.manifest.manifest import Manifest
from prejit.compiler.pipeline.plan import Lowered, OwnFacts
from prejit.compiler.store.key import Key
from prejit.runtime.base.files import digest_of
from prejit.runtime.errors import (
    BuildError,
    CheckpointError,
    ManifestError,
    PrejitError,
    RejectError,
    StoreError,
    UsageError,
)

_KINDS: Mapping[str, type[PrejitError]] = {
    kind.code: kind for kind in (CheckpointError, ManifestError, StoreError, UsageError)
}
"""The errors, besides BuildError and RejectError, that lowering raises."""


@dataclass(frozen=True)
class Project:
    """What a process plans as its build does.

    Attributes:
        manifest: path of the manifest.
        content: digest of what the build has read there, as `content_of` gives it.
        only: names of targets; empty: all targets of the manifest.
        directory: the model directory; None: there is none.
        forms: a table of measured forms; None: there is none.
        retrace: whether the user's code is traced again, whatever the store has.
        root: directory of the store.
        namespace: separates its results from those of others in the same directory.
        path: `sys.path` of the build.
        check: whether the process checks the model and the user's code for all others.
    """

    manifest: str
    content: str
    only: tuple[str, ...]
    directory: str | None
    forms: str | None
    retrace: bool
    root: str
    namespace: str
    path: tuple[str, ...]
    check: bool = False

    @classmethod
    def from_plain(cls, fields: Mapping[str, Any]) -> Project:
        """Return the project that `dataclasses.asdict` turned into JSON."""
        return cls(**{**fields, "only": tuple(fields["only"]), "path": tuple(fields["path"])})

    @property
    def model_directory(self) -> Path | None:
        """The model directory; None: there is none."""
        return None if self.directory is None else Path(self.directory)

    @property
    def forms_table(self) -> Path | None:
        """The file of a table of measured forms; None: there is none."""
        return None if self.forms is None else Path(self.forms)


def manifest_digest(manifest: Manifest) -> str:
    """Return a digest of a manifest that was read from a file."""
    return digest_of(repr(manifest).encode())


@dataclass(frozen=True)
class Checked:
    """What reading the model and the user's code shows.

    Attributes:
        vocab_size: number of tokens of a decoder; None: the manifest has none.
        own: what is known of a decoder of the user; None: there is none.
    """

    vocab_size: int | None
    own: OwnFacts | None

    @classmethod
    def from_plain(cls, fields: Mapping[str, Any]) -> Checked:
        """Return what `dataclasses.asdict` turned into JSON."""
        own = fields["own"]
        return cls(fields["vocab_size"], None if own is None else OwnFacts.from_json(own))


@dataclass(frozen=True)
class Work:
    """A unit of programs to lower.

    Attributes:
        programs: by name, the portable form of those that have one; None: it is to be made.
        chosen: whether programs with kernels get the forms of products that tables choose now; false: all
            products stay with their kernels, because forms are measured first.
    """

    programs: Mapping[str, Lowered | None]
    chosen: bool

    @classmethod
    def from_plain(cls, fields: Mapping[str, Any]) -> Work:
        """Return what `dataclasses.asdict` turned into JSON."""
        programs = {
            name: None if each is None else Lowered.from_json(each)
            for name, each in fields["programs"].items()
        }
        return cls(programs, fields["chosen"])


@dataclass(frozen=True)
class Done:
    """A unit of programs that was lowered. Contents are in the store.

    Attributes:
        programs: the portable forms by name.
        parameters: the parameters of the unit's function of the user, as `keys.content_of` describes them.
        stored: the keys of the results that were put into the store, as lists.
        notes: lines for the user.
    """

    programs: Mapping[str, Lowered]
    parameters: Mapping[str, str]
    stored: tuple[Any, ...]
    notes: tuple[str, ...] = ()

    @classmethod
    def from_plain(cls, fields: Mapping[str, Any]) -> Done:
        """Return what `dataclasses.asdict` turned into JSON."""
        programs = {name: Lowered.from_json(each) for name, each in fields["programs"].items()}
        return cls(programs, fields["parameters"], tuple(fields["stored"]), tuple(fields["notes"]))

    @property
    def keys(self) -> tuple[Key, ...]:
        """The keys of the results that were put into the store."""
        return tuple(
            Key(kind, name, tuple((of, value) for of, value in ingredients))
            for kind, name, ingredients in self.stored
        )


def plain_error(error: PrejitError) -> dict[str, Any]:
    """Return an error as JSON."""
    return {"code": error.code, "message": str(error), "hint": error.hint}


def error_of(plain: Mapping[str, Any]) -> PrejitError:
    """Return the error that `plain_error` turned into JSON."""
    code, message, hint = plain["code"], plain["message"], plain["hint"]
    if code == RejectError.code:
        path, _, text = message.partition(": ")
        return RejectError(path, text, hint=hint)
    return _KINDS.get(code, BuildError)(message, hint=hint)


def plain(message: Project | Checked | Work | Done) -> dict[str, Any]:
    """Return a message as JSON."""
    return asdict(message)
