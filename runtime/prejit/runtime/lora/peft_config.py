"""Read PEFT's adapter_config.json of a LoRA adapter."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prejit.runtime.base.arguments import described
from prejit.runtime.errors import CheckpointError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""The files of an adapter."""
SIGNATURES = "adapter.sig"
"""The file beside them with its signatures: a sigstore bundle in each line."""
PREFIX = "base_model.model."
"""The beginning of the names of all tensors."""
MERGE = (
    "merge it with PEFT's merge_and_unload, save that model, and give its directory as the source"
)
"""The hint of errors about adapters that are not supported."""
_READ = frozenset(
    (
        *("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "target_modules"),
        *("modules_to_save", "bias", "use_rslora", "use_dora", "init_lora_weights"),
    )
)
_WITHOUT_EFFECT = frozenset(
    (
        *("auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode"),
        *("peft_version", "lora_dropout", "megatron_config", "megatron_core", "eva_config"),
        *("qalora_group_size", "ensure_weight_tying", "runtime_config"),
        # The names of the tensors show which modules these chose.
        *("exclude_modules", "layers_pattern", "layers_to_transform"),
        # PEFT corrects it by the kind of the layer, which decides here too.
        "fan_in_fan_out",
    )
)
"""Keys that may have any value. A key in neither list must be empty: new ones may change the result."""
_KINDS = ("gaussian", "orthogonal", "eva")
"""The ways to begin that leave the matrices of the model as they are, beside true and false."""

_MOST_PATTERNS, _MOST_CHARACTERS, _MOST_CHOICES = 4096, 256, 200_000
"""Limits of the patterns of a file: Python's matching cannot be interrupted."""


def read_config(file: Path, content: bytes) -> dict[str, Any]:
    """Return what adapter_config.json says; `file` is its path, for errors.

    Raises:
        CheckpointError: it is damaged, or asks for what is not built.
    """
    config = _object(file, content)
    if config.get("peft_type") != "LORA":
        raise wrong(file, "peft_type", '"LORA"', config.get("peft_type"))
    begins = config.get("init_lora_weights", True)
    if not isinstance(begins, bool) and begins not in (None, *_KINDS):
        # PiSSA, OLoRA, CorDA and LoftQ change the model's own matrices.
        raise wrong(file, "init_lora_weights", f"true, false, {', '.join(_KINDS)}", begins)
    for key, value in config.items():
        if value and key not in _READ | _WITHOUT_EFFECT:
            raise wrong(file, key, "none", value)
    kinds: dict[str, tuple[type, ...]] = {
        **dict.fromkeys(("rank_pattern", "alpha_pattern"), (dict,)),
        **dict.fromkeys(("use_rslora", "use_dora"), (bool,)),
        **{"target_modules": (list, str), "modules_to_save": (list,), "bias": (str,)},
    }
    for key, allowed in kinds.items():
        value = config.get(key)
        names = value if isinstance(value, list) else []
        if value is not None and not (
            isinstance(value, allowed) and all(isinstance(name, str) for name in names)
        ):
            raise wrong(file, key, " or ".join(kind.__name__ for kind in allowed), value)
    patterns = [*(config.get("rank_pattern") or ()), *(config.get("alpha_pattern") or ())]
    if isinstance(target := config.get("target_modules"), str):
        patterns.append(target)
    choices = 0.0
    for pattern in patterns:
        choices += _choices(file, pattern)
        if len(patterns) > _MOST_PATTERNS or choices > _MOST_CHOICES:
            problem = "fewer patterns, or with fewer of * + ? { | (they could take too long)"
            raise _too_costly(file, problem, pattern)
        try:
            _compiled(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise _too_costly(file, f"a regular expression ({error})", pattern) from error
    return config


def _choices(file: Path, pattern: str) -> float:
    """Return about how many ways to match a name of 50 characters `re` may try, which backtracks.

    A quantifier chooses among the places that those before it leave, a group among its alternatives.

    Raises:
        CheckpointError: a group is repeated or looks around, so the ways could be exponentially many.
    """
    text = pattern.replace("(?:", "(")
    if len(text) > _MOST_CHARACTERS or "(?" in text or re.search(r"\)[*+{]", text):
        problem = (
            f"at most {_MOST_CHARACTERS} characters, no group that is repeated and no (? but (?:"
        )
        raise _too_costly(file, problem, pattern)
    quantifiers, groups = len(re.findall(r"[*+?{]\??", text)), text.count("(") + 1
    return math.comb(50 + quantifiers, quantifiers) * (1 + text.count("|") / groups) ** groups


def _too_costly(file: Path, expected: str, pattern: str) -> CheckpointError:
    hint = f"list the modules by name; or {MERGE}"
    return wrong(file, "a pattern of modules", expected, pattern, hint)


@functools.lru_cache(2 * _MOST_PATTERNS)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


def _object(file: Path, content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: expected a JSON object: {error!s:.200}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{file}: expected a JSON object, found {described(found)}")
    return found


def wrong(file: Path, key: str, expected: str, found: object, hint: str = MERGE) -> CheckpointError:
    """Return the error for a value of adapter_config.json."""
    shown = json.dumps(found, default=repr)
    return CheckpointError(f"{file}: {key}: expected {expected}, found {shown:.80}", hint=hint)


def rank_and_factor(config: Mapping[str, Any], file: Path, module: str) -> tuple[int, float]:
    """Return the rank of the change of a module, and its factor.

    Raises:
        CheckpointError: one is no number of its range.
    """
    rank = _of_pattern(config, "rank_pattern", "r", module)
    if type(rank) is not int or rank < 1:
        raise wrong(file, "r", "an integer of at least 1", rank)
    alpha = _of_pattern(config, "alpha_pattern", "lora_alpha", module)
    if type(alpha) not in (int, float) or not abs(alpha) < 1e30:
        raise wrong(file, "lora_alpha", "a number", alpha)
    return rank, alpha / (rank**0.5 if config.get("use_rslora") else rank)


def _of_pattern(config: Mapping[str, Any], patterns: str, key: str, module: str) -> Any:
    """Return the value of a module: that of the first pattern that matches, or the common one."""
    for pattern, value in (config.get(patterns) or {}).items():
        if _compiled(rf"(.*\.)?({pattern})$").match(module):
            return value
    return config.get(key, 8)  # PEFT's default


def is_target(config: Mapping[str, Any], module: str) -> bool:
    """Return whether the adapter changes a module."""
    targets = config.get("target_modules") or []
    if isinstance(targets, str):
        return targets.lower() == "all-linear" or _compiled(targets).fullmatch(module) is not None
    return any(f".{module}".endswith(f".{target}") for target in targets)
