"""The result of a build: a bundle with its programs, or an error."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from prejit.compiler.manifest.manifest import Manifest
from prejit.runtime.errors import PrejitError
from prejit.runtime.format.bundle_schema import Accuracy


@dataclass(frozen=True, slots=True)
class BuiltProgram:
    """A program of a bundle for one target.

    Attributes:
        program: its name.
        target: name of the target.
        key: digest of the key of its executable.
        compile_milliseconds: time that the compiler took, now or in an earlier build.
        new: whether it was compiled now, for this program.
    """

    program: str
    target: str
    key: str
    compile_milliseconds: int
    new: bool


@dataclass(frozen=True)
class Built:
    """The result of a build.

    Attributes:
        path: directory of the bundle.
        digest: digest of the bundle.
        compiled: number of programs x targets that were compiled now.
        cached: number of those that were in the store.
        written: whether the directory was changed.
        accuracy: what the dtypes of weights and cache cost; None: all are float32.
        programs: every program for every target.
        packed_by: number of the shard that packed the bundle; None: the build had no shards.
        packed_here: whether the bundle is in `path`, and not in the directory of another shard.
    """

    path: Path
    digest: str
    compiled: int
    cached: int
    written: bool
    accuracy: Accuracy | None = None
    programs: tuple[BuiltProgram, ...] = ()
    packed_by: int | None = None
    packed_here: bool = True


@dataclass(frozen=True)
class Failed:
    """A build that failed beside others.

    Attributes:
        manifest: what it was to build.
        error: why it failed.
    """

    manifest: Manifest
    error: PrejitError
