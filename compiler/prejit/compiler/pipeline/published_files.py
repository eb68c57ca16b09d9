"""The files of a checkpoint, hashed while its tensors are read: the disk is read once."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from prejit.compiler.checkpoint.checkpoint import Checkpoint
from prejit.compiler.checkpoint.tensor_files import Reading
from prejit.compiler.manifest.manifest import Manifest
from prejit.compiler.pipeline.model import (
    ModelFiles,
    check_configuration,
    chooses_bits,
    int4_text,
    named_draft,
    open_weights,
    weight_digests,
)
from prejit.compiler.store.build_cache_key import Key
from prejit.compiler.store.store_interface import Store
from prejit.runtime.base.file_hashing import hash_file
from prejit.runtime.base.files import Identity, digest_of, store_errors
from prejit.runtime.errors import CheckpointError
from prejit.runtime.machine.kept_files import Receipts

Digests = Iterable[tuple[str, str]]
"""Files by name, each with its digest."""
_BLOCK_BYTES = 1 << 20
_OUTLINE_BYTES = 64 << 10
"""Bytes at the end of a file that tell it from others of its size. They are values, names come first."""


def watching(files: Mapping[Path, HashedFile]) -> Reading:
    """Return what readers call, so that each file is hashed up to what they read next."""
    return lambda path, start, end: files[path].read_ahead(start, end)


@final
class HashedFile:
    """A file whose digest comes from a receipt, or is made while others read the file, in any thread."""

    def __init__(self, path: Path) -> None:
        """Look for a receipt. Nothing is hashed yet.

        Raises:
            StoreError: there is no such file.
        """
        self._path = path
        with store_errors(path, "read"):
            self._identity = Identity.of(path.stat())
        self._began = time.time()
        # Of this file alone: saving drops what it was not asked for.
        self._receipts = Receipts(path)
        self._digest = self._receipts.find(self._identity)
        self._hasher = hashlib.sha256()
        self._lock = threading.Lock()  # guards the hasher: rows of a matrix are rounded in threads
        self.hashed_bytes = 0
        """Number of bytes hashed so far. A file with a receipt is not hashed."""

    @property
    def is_known(self) -> bool:
        """True if the digest is known."""
        return self._digest is not None

    def read_ahead(self, start: int, end: int) -> None:
        """Hash up to the end of bytes that are read next, which are in memory then.

        Bytes far ahead are read without it, and hashed when their turn comes. Otherwise all that lies before
        them would have to stay in memory until it is read.

        Raises:
            CheckpointError, StoreError: as `check_unchanged`. To read a mapped file that became shorter would
                end the process.
        """
        self.check_unchanged()
        if not self.is_known and start - self.hashed_bytes <= self._identity.size // 2:
            self._hash_to(end)

    def digest(self) -> str:
        """Return the digest; what was not read yet is hashed now.

        Raises:
            CheckpointError, StoreError: as `check_unchanged`.
        """
        if self._digest is None:
            self._hash_to(self._identity.size)
            self.check_unchanged()
            self._digest = f"sha256:{self._hasher.hexdigest()}"
            self._receipts.add(self._digest, self._identity, hashed_at=self._began)
            self._receipts.save()
        return self._digest

    def outline(self) -> str:
        """Return the size and the digest of the last bytes. Files of one outline are most likely equal."""
        size = self._identity.size
        with store_errors(self._path, "read"), self._path.open("rb") as file:
            file.seek(max(0, size - _OUTLINE_BYTES))
            return f"{size} {digest_of(file.read(_OUTLINE_BYTES))}"

    def check_unchanged(self) -> None:
        """Check that the file is still the one that was found.

        It does not see a link that led elsewhere between two looks, nor, as receipts (kept_files.py), what a
        program writes through a map: who can write a checkpoint while it is built can give it other weights.

        Raises:
            CheckpointError: it changed.
            StoreError: it is gone.
        """
        with store_errors(self._path, "read"):
            now = Identity.of(self._path.stat())
        if now != self._identity:
            raise CheckpointError(
                f"{self._path}: it changed while the build read it",
                hint="build again when the file is whole",
            )

    def _hash_to(self, end: int) -> None:
        with self._lock:
            if end <= self.hashed_bytes:
                return
            end += (self.hashed_bytes - end) % _BLOCK_BYTES  # few reads, of whole blocks
            with store_errors(self._path, "read"), self._path.open("rb", buffering=0) as file:
                count, _ = hash_file(file.fileno(), [self._hasher], self.hashed_bytes, end)
            self.hashed_bytes += count


@dataclass(frozen=True)
class Published:
    """The published weights of a model: the tensors, and the files that decide them.

    Attributes:
        checkpoint: the tensors.
        hashed: its files, by path.
        texts: the files of a text that decides how weights are stored.
        draft: those of the draft model; None: there is none.
    """

    checkpoint: Checkpoint
    hashed: Mapping[Path, HashedFile]
    texts: tuple[HashedFile, ...]
    draft: Published | None = None

    @property
    def files(self) -> tuple[tuple[str, str], ...]:
        """The files, each with its digest. Bytes that no tensor has taken yet are hashed now.

        Raises:
            CheckpointError, StoreError: as `check_unchanged`.
        """
        return weight_digests(self.checkpoint, lambda path: self.hashed[path].digest())

    @property
    def all_files(self) -> Digests:
        """The files of the model and of the draft model, each with its digest. Raises as `files`."""
        return (*self.files, *(() if self.draft is None else named_draft(self.draft.files)))

    @property
    def outlines(self) -> Digests:
        """All files, each with its outline."""
        own = weight_digests(self.checkpoint, lambda path: self.hashed[path].outline())
        return (*own, *(() if self.draft is None else named_draft(self.draft.outlines)))

    @property
    def are_known(self) -> bool:
        """True if the digests of all files are known."""
        draft = self.draft is None or self.draft.are_known
        return draft and all(each.is_known for each in self.hashed.values())

    @property
    def of_model(self) -> tuple[tuple[str, str], ...]:
        """The files in the model's directory: those of adapters are named by the manifest."""
        return self.files[: len(self.checkpoint.files)]

    def check_unchanged(self) -> None:
        """Check that no file changed since the build began: its digest would be that of other weights.

        Raises:
            CheckpointError: one did.
            StoreError: one is gone.
        """
        for each in (*self.hashed.values(), *self.texts):
            each.check_unchanged()
        if self.draft is not None:
            self.draft.check_unchanged()


def find_published(
    manifest: Manifest, model: ModelFiles | None, draft: ModelFiles | None = None
) -> Published | None:
    """Open the weights of a model and its draft model, and hash none yet. None: it has no published model.

    Raises:
        CheckpointError, StoreError: files are missing, or the configuration changed.
    """
    if model is None or manifest.has_own_model:
        return None
    assert manifest.model is not None
    hashed: dict[Path, HashedFile] = {}
    checkpoint = open_weights(model, watching(hashed))
    files = (*checkpoint.files, *checkpoint.adapter_files)
    hashed |= {path: HashedFile(path) for path in files}
    check_configuration(model)
    texts: list[Path] = []
    if (text := manifest.model.evaluation) is not None and (
        chooses_bits(manifest, model) or int4_text(manifest, model) is not None
    ):
        tokenizer = model.transformer / "tokenizer.json"
        texts = [manifest.resolve(text), *([tokenizer] * tokenizer.is_file())]
    of_draft = manifest.of_draft
    drafts = None if of_draft is None else find_published(of_draft, draft)
    return Published(checkpoint, hashed, tuple(map(HashedFile, texts)), drafts)


@dataclass(frozen=True)
class ResultOfFiles:
    """A result of the store whose key has the digests of a checkpoint's files.

    Whoever makes it reads the files, which hashes them in the same pass. So files without a receipt are
    hashed first only where the store has a result of files that look like them: most likely it has this one.

    Attributes:
        key_of: returns its key, of files with their digests.
        published: the files; None: there are none, and it has one key.
    """

    store: Store
    key_of: Callable[[Digests], Key]
    published: Published | None

    def find(self) -> Mapping[str, Any] | None:
        """Return the result; None: the store does not have it."""
        is_found = self._is_known or self.store.get(self._outline) is not None
        return self.store.get(self._key) if is_found else None

    def making(self) -> AbstractContextManager[bool]:
        """Hold the right to make the result, as in `Store.making`."""
        return self.store.making(self._key if self._is_known else self._outline)

    def put(self, result: Mapping[str, Any], *, blobs: Sequence[str] = ()) -> None:
        """Store the result that was made of the files.

        Raises:
            CheckpointError, StoreError: a file changed or is gone.
        """
        key = self._key
        if self.published is not None:
            self.published.check_unchanged()  # the key has the digest of a text as it is now
        self.store.put(key, result, blobs=blobs)
        self.store.put(self._outline, {}, blobs=blobs)

    @property
    def _is_known(self) -> bool:
        return self.published is None or self.published.are_known

    @property
    def _key(self) -> Key:
        return self.key_of(() if self.published is None else self.published.all_files)

    @property
    def _outline(self) -> Key:
        key = self.key_of(() if self.published is None else self.published.outlines)
        return replace(key, kind=f"{key.kind}-outline")
