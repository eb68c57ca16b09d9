"""The room that an adapter of PEFT needs in a bundle, as a table of a manifest."""

from __future__ import annotations

import json
from pathlib import Path

from prejit.compiler.checkpoint.tensor_files import tensors
from prejit.runtime.errors import CheckpointError
from prejit.runtime.lora.peft_files import (
    CONFIG,
    PREFIX,
    adapter_files,
    rank_and_factor,
    read_config,
)


def is_adapter(directory: Path) -> bool:
    """Return whether a directory holds an adapter."""
    return (directory / CONFIG).is_file()


def describe_adapter(directory: Path) -> str:
    """Return what a manifest has to say so that a bundle takes an adapter.

    Raises:
        CheckpointError: a file is missing or damaged, or the adapter is of a kind that is not supported.
    """
    config_file, file = adapter_files(directory)
    config = read_config(config_file, config_file.read_bytes())
    names = [name.removeprefix(PREFIX) for name in tensors(file)]
    modules = [name.rpartition(".lora_A.")[0] for name in names if ".lora_A." in name]
    if not modules:
        raise CheckpointError(f"{file}: expected matrices lora_A and lora_B, found none")
    rank = max(rank_and_factor(config, config_file, module)[0] for module in modules)
    targets = sorted({module.rpartition(".")[2] for module in modules})
    merged = (
        f"adapters = {json.dumps([str(directory)])} # in [model]: merged when the bundle is built"
    )
    first = f"an adapter of rank {rank} that changes {', '.join(targets)}"
    saved = config.get("modules_to_save")
    if config.get("use_dora") or config.get("bias") not in (None, "none") or saved:
        return f"{first}, and more than LoRA does\n\n{merged}"
    room = f"slots = 8\nrank = {rank}\ntargets = {json.dumps(targets)}"
    return f"{first}\n\n{merged}\n\n[adapters] # or kept apart, beside others\n{room}"
