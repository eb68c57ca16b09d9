"""Make a directory in the Hugging Face layout for a GGUF file that lies without config.json.

It is in the runtime's cache, named by the file's identity: a build that changes nothing reads no metadata.
The mtime of a directory is its last use, so that `prejit gc` removes what no build used for some days.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from prejit.compiler.checkpoint.gguf_config import config_of
from prejit.compiler.checkpoint.gguf_tensors import read_gguf
from prejit.compiler.checkpoint.gguf_tokenizer import tokenizer_of
from prejit.runtime.base.files import Identity, digest_of, store_errors
from prejit.runtime.machine.kept_files import cache_root

_VERSION = 2
"""Part of each name; it grows when other files are made from the same metadata."""
_OTHERS = ("tokenizer_config.json", "generation_config.json", "chat_template.jinja")


def directories() -> Path:
    """Return where the directories of all versions are."""
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
    beside = [each for each in (tokenizer, *map(file.with_name, _OTHERS)) if each.is_file()]
    with store_errors(file, "read"):
        identity = Identity.of(file.stat())
    root = directories() / f"v{_VERSION}"
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
