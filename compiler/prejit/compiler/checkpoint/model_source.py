"""Find a model's directory: a local one, one made for a GGUF file, or a snapshot of the Hugging Face Hub.

A GGUF file that lies without config.json gets a directory in the Hugging Face layout in the runtime's cache,
named by the file's identity: a build that changes nothing reads no metadata. The mtime of a directory is its
last use, so that `prejit gc` removes what no build used for some days.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path

from prejit.compiler.checkpoint.gguf_config import config_of
from prejit.compiler.checkpoint.gguf_tensors import read_gguf
from prejit.compiler.checkpoint.gguf_tokenizer import tokenizer_of
from prejit.runtime.base.files import Identity, digest_of, store_errors
from prejit.runtime.errors import CheckpointError, ManifestError, NetworkError
from prejit.runtime.machine.kept_files import cache_root

_REFERENCE = re.compile(r"hf://(?P<repository>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
_TEXT = ("*.json", "*.jinja", "LICENSE*")
_WEIGHTS = ("model.safetensors", "model-*.safetensors")
_FLAX_WEIGHTS = ("flax_model.safetensors", "flax_model.msgpack")
_GGUF_VERSION = 2
"""Part of the names of directories of GGUF files; it grows when other files are made of the same metadata."""
_BESIDE_GGUF = ("tokenizer_config.json", "generation_config.json", "chat_template.jinja")


def resolve_source(source: str, base_directory: Path, *, weights: bool = True) -> Path:
    """Return the directory of a model, which is fetched if it is not local.

    Args:
        source: a directory, a .gguf file in one, `hf://org/name`, or `hf://org/name@revision` with a branch,
            tag or commit.
        base_directory: the manifest's directory; a relative source starts there.
        weights: whether weights are fetched, too.

    Returns:
        A directory in the Hugging Face layout; for hf:// a snapshot in the Hub's cache, which needs no
        network for files that it holds (HF_HOME and HF_HUB_OFFLINE apply).

    Raises:
        ManifestError: the directory does not exist, or the reference is malformed.
        NetworkError: the Hub does not answer, and the cache does not hold the snapshot.
        CheckpointError: the Hub has no such repository or revision, or does not let us read it.
    """
    if source.startswith("hf:"):
        match = _REFERENCE.fullmatch(source)
        if match is None:
            raise ManifestError(
                f"model.source: expected hf://org/name or hf://org/name@revision, found {source!r}"
            )
        fetch = _snapshot if weights else partial(_fetch, patterns=_TEXT)
        return fetch(match["repository"], match["revision"])
    directory = base_directory / source
    if directory.suffix == ".gguf" and directory.is_file():
        return model_directory(directory)
    if not directory.is_dir():
        raise ManifestError(
            f"model.source: expected a directory or a .gguf file, found none at {directory}",
            hint="hf://org/name fetches a model from the Hugging Face Hub",
        )
    return directory


def find_source(source: str, base_directory: Path) -> Path | None:
    """Return the directory of a model without any network, or None if it must still be fetched.

    Arguments are those of `resolve_source`.
    """
    match = _REFERENCE.fullmatch(source)
    if match is None:
        return resolve_source(source, base_directory)
    from huggingface_hub import errors, snapshot_download

    try:
        found = Path(
            snapshot_download(
                match["repository"], revision=match["revision"], local_files_only=True
            )
        )
    except (errors.LocalEntryNotFoundError, OSError):
        return None
    return (
        found if (found / "config.json").is_file() or (found / "modules.json").is_file() else None
    )


def gguf_directories() -> Path:
    """Return where the directories that were made for GGUF files are, of all versions."""
    return cache_root() / "gguf"


def model_directory(file: Path) -> Path:
    """Return the directory of a .gguf file's config.json, tokenizer.json, and of a file of its name.

    It is the file's own, if config.json is there. tokenizer.json beside the file goes before its metadata.

    Raises:
        CheckpointError: config.json or the tokenizer cannot be made from the file.
        StoreError: the file cannot be read, or the cache not be written.
    """
    if (file.parent / "config.json").is_file():
        return file.parent
    file = file.absolute()
    tokenizer = file.with_name("tokenizer.json")
    beside = [each for each in (tokenizer, *map(file.with_name, _BESIDE_GGUF)) if each.is_file()]
    with store_errors(file, "read"):
        identity = Identity.of(file.stat())
    root = gguf_directories() / f"v{_GGUF_VERSION}"
    named = json.dumps([str(file), identity, [each.name for each in beside]]).encode()
    directory = root / digest_of(named).removeprefix("sha256:")[:32]
    if directory.is_dir():
        with suppress(OSError):  # another user's
            os.utime(directory)
        return directory
    metadata, tensors = read_gguf(file, arrays=True)
    made = {"config.json": config_of(file, metadata, tensors)}
    if tokenizer not in beside:
        made["tokenizer.json"], made["tokenizer_config.json"] = tokenizer_of(file, metadata)
    with store_errors(root, "write"):
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        growing = Path(tempfile.mkdtemp(dir=root))
        try:
            for name, content in made.items():
                text = json.dumps(content, ensure_ascii=False, indent=1)
                (growing / name).write_text(text, encoding="utf-8")
            for each in (file, *beside):
                if each.name not in made:
                    (growing / each.name).symlink_to(each)
            with suppress(FileExistsError):  # another build was first
                os.rename(growing, directory)
        finally:
            shutil.rmtree(growing, ignore_errors=True)
    return directory


def _snapshot(repository: str, revision: str | None) -> Path:
    """Fetch a repository's snapshot, with the weights in one format only."""
    directory = _fetch(repository, revision, _TEXT + _WEIGHTS)
    if not any(directory.glob("model*.safetensors")):
        directory = _fetch(repository, revision, _TEXT + _FLAX_WEIGHTS)
    return directory


def _fetch(repository: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    from huggingface_hub import constants, errors, snapshot_download

    name = repository if revision is None else f"{repository}@{revision}"
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=[*patterns]))
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        gated = isinstance(error, errors.GatedRepoError)
        raise CheckpointError(
            f"hf://{name}: {constants.ENDPOINT} "
            + (
                "does not let this account read it"
                if gated
                else "has no such repository or revision"
            ),
            hint="check the name, or log in with `hf auth login` if the repository is private or gated",
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        offline = constants.HF_HUB_OFFLINE
        raise NetworkError(
            f"hf://{name}: cannot fetch it from {constants.ENDPOINT} "
            f"({'HF_HUB_OFFLINE is set' if offline else 'no connection'}), and the local cache "
            f"{constants.HF_HUB_CACHE} does not hold it",
            hint="download it on a machine with a network (hf download "
            f"{repository} --local-dir DIR) and give the directory as the model's source",
        ) from error
    except (errors.HfHubHTTPError, OSError) as error:
        raise NetworkError(
            f"hf://{name}: fetching from {constants.ENDPOINT} failed: {error}",
            hint="try again, or download it elsewhere and give the directory as the model's source",
        ) from error
