"""Read an adapter of PEFT: adapter_config.json and adapter_model.safetensors, without torch and peft."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prejit.runtime.base.arguments import described
from prejit.runtime.base.wording import few
from prejit.runtime.device.transfer import dtype_of
from prejit.runtime.errors import CheckpointError, RejectError
from prejit.runtime.format.checks.adapter_stacks import StackPair
from prejit.runtime.format.checks.layers import check_weights

Values = np.ndarray[Any, np.dtype[np.float32]]
_SHOWN = 3
_FLOATS = ("float32", "float16", "bfloat16", "float64")
_MOVED = (
    # of models that also read images, in the names of transformers 5 and 4
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("model.", "backbone."),  # of Nemotron-H
    *(("", "model."), ("", "backbone.")),  # of models without a head
)
"""Beginnings of names in transformers' classes, and in bundles."""
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
        *("exclude_modules", "layers_pattern", "layers_to_transform"),
    )
)
_WITHOUT_EFFECT = frozenset(
    (
        *("auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode"),
        *("peft_version", "lora_dropout", "megatron_config", "megatron_core", "eva_config"),
        *("qalora_group_size", "ensure_weight_tying", "runtime_config"),
        # PEFT corrects it by the kind of the layer, which decides here too.
        "fan_in_fan_out",
    )
)
"""Keys that may have any value. A key in neither list must be empty: new ones may change the result."""
_KINDS = ("gaussian", "orthogonal", "eva")
"""The ways to begin that leave the matrices of the model as they are, beside true and false."""

_MOST_PATTERNS, _MOST_CHARACTERS, _MOST_CHOICES = 4096, 256, 200_000
"""Limits of the patterns of a file: Python's matching cannot be interrupted."""
_MOST_ALPHA = 1e6
"""Published ones are at most some thousands; much larger ones make weights infinite."""


@dataclass(frozen=True)
class AdapterValues:
    """The changes of an adapter.

    Attributes:
        digest: of both files.
        rank: the largest of its ranks.
        changes: A [rank, in] and B [out, rank], times the factor, for each matrix by name.
    """

    digest: str
    rank: int
    changes: Mapping[str, tuple[Values, Values]]


def adapter_files(directory: Path) -> tuple[Path, Path]:
    """Return the files of an adapter.

    Raises:
        CheckpointError: one is missing.
    """
    files = (directory / CONFIG, directory / WEIGHTS)
    for file in files:
        if not file.is_file():
            others = sorted(path.name for path in directory.glob("adapter_model*"))
            raise CheckpointError(
                f"{file}: expected a file, found {few(others, _SHOWN) or 'none'}",
                hint="give the directory that PEFT's save_pretrained wrote, in safetensors",
            )
    return files


def adapter_digest(directory: Path) -> str:
    """Return the digest of an adapter: of the digests of its files.

    Raises:
        CheckpointError: a file is missing or cannot be read.
    """
    config, weights = map(_read, adapter_files(directory))
    return _digest(config, weights)


def _digest(config: bytes, weights: bytes) -> str:
    both = "".join(hashlib.sha256(content).hexdigest() for content in (config, weights))
    return f"sha256:{hashlib.sha256(both.encode()).hexdigest()}"


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{file}: cannot read it: {error}") from error


def read_adapter(
    directory: Path, pairs: Sequence[StackPair], check: Callable[[str], object] = str
) -> AdapterValues:
    """Return the changes that an adapter makes to matrices of a bundle.

    Args:
        directory: has its files.
        pairs: the stacks of the bundle.
        check: takes the digest of the files before anything in them is read, and raises to refuse them.

    Raises:
        CheckpointError: the adapter is of another model or kind, changes other matrices than those of
            `pairs`, or a file is damaged. The error names all tensors that do not fit.
    """
    config_file, file = adapter_files(directory)
    contents = _read(config_file), _read(file)
    digest = _digest(*contents)
    check(digest)
    config = read_config(config_file, contents[0])
    if config.get("use_dora"):
        raise wrong(config_file, "use_dora", "false for an adapter that is not merged", True)
    for key, without in (("bias", (None, "none")), ("modules_to_save", (None, []))):
        if (value := config.get(key)) not in without:
            raise wrong(config_file, key, "none for an adapter that is not merged", value)
    known = {name: pair for pair in pairs for name in pair.modules}
    changes: dict[str, dict[str, Values]] = {}
    problems: list[str] = []
    others: list[str] = []
    for published, values in _tensors(contents[1], file).items():
        module, end = published.removeprefix(PREFIX), ""
        for each in ("lora_A", "lora_B"):
            if module.endswith(f".{each}.weight"):
                module, end = module.removesuffix(f".{each}.weight"), each
        if not end:
            problems.append(f"{published}, which is neither lora_A nor lora_B")
        elif _name(module, known) is None:
            problems.append(f"{module}, which is no matrix that the bundle lets adapters change")
            others.append(module)
        elif key := left_out_by(config, module):
            problems.append(f"{module}, which {key} of {CONFIG} leaves out")
        elif end in changes.setdefault(module, {}):
            problems.append(f"{module}.{end}, which has two names")
        else:
            changes[module][end] = values
    result: dict[str, tuple[Values, Values]] = {}
    for module, parts in changes.items():
        name = _name(module, known)
        assert name is not None
        pair = known[name]
        most, inputs, outputs = pair.down.shape[2], pair.down.shape[3], pair.up.shape[3]
        rank, factor = rank_and_factor(config, config_file, module)
        if rank > most:
            hint = f"build with rank = {rank} in [adapters], or {MERGE}"
            expected = f"at most {most}, [adapters] rank of the bundle"
            raise wrong(config_file, "r", expected, rank, hint)
        wanted = {"lora_A": (rank, inputs), "lora_B": (outputs, rank)}
        if name in result:
            problems.append(f"{module}, which has two names")
        elif {end: values.shape for end, values in parts.items()} != wanted:
            found = ", ".join(f"{end} {list(values.shape)}" for end, values in parts.items())
            expected = ", ".join(f"{end} {list(shape)}" for end, shape in wanted.items())
            problems.append(f"{module} with {found}, expected {expected}")
        else:
            with np.errstate(over="ignore"):  # what is infinite is refused below
                result[name] = (parts["lora_A"], parts["lora_B"] * np.float32(factor))
    if not changes and not problems:
        problems.append("no tensor")
    if problems:
        ends = sorted({name.rpartition(".")[2] for name in (*known, *others)})
        raise CheckpointError(
            f"{file}: the adapter does not fit the bundle: found {few(problems, _SHOWN)}",
            hint=f"{f'build with targets = {json.dumps(ends)} in' if others else 'give one for'} "
            "[adapters], or list it in [model] adapters, which merges it",
        )
    if bad := [
        name for name, both in result.items() if not all(np.isfinite(v).all() for v in both)
    ]:
        raise CheckpointError(
            f"{file}: expected finite numbers, found others in {few(bad, _SHOWN)}"
        )
    rank = max(len(down) for down, _ in result.values())
    return AdapterValues(digest, rank, result)


def _name(module: str, known: Collection[str]) -> str | None:
    """Return the name of an adapter's module in the bundle; None: the bundle has none."""
    moved = (
        ours + module.removeprefix(theirs) for theirs, ours in _MOVED if module.startswith(theirs)
    )
    return next((name for name in (module, *moved) if name in known), None)


def _tensors(content: bytes, file: Path) -> dict[str, Values]:
    """Return the tensors of a safetensors file in float32.

    Raises:
        CheckpointError: the file is damaged, or a tensor has no floating-point numbers.
    """
    try:
        slices = check_weights(memoryview(content), str(file), alignment=1)
    except RejectError as error:
        raise CheckpointError(str(error)) from error  # which begins with the file
    found = {}
    for name, at in slices.items():
        if at.dtype not in _FLOATS:
            wanted = ", ".join(_FLOATS)
            raise CheckpointError(f"{file}: {name}: expected {wanted}; found {at.dtype}")
        values = np.frombuffer(content[at.start : at.end], dtype_of(at.dtype))
        found[name] = values.astype(np.float32).reshape(at.shape)
    return found


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
        **dict.fromkeys(("target_modules", "exclude_modules", "layers_pattern"), (list, str)),
        **{"modules_to_save": (list,), "bias": (str,)},
    }
    for key, allowed in kinds.items():
        value = config.get(key)
        names = value if isinstance(value, list) else []
        if value is not None and not (
            isinstance(value, allowed) and all(isinstance(name, str) for name in names)
        ):
            raise wrong(file, key, " or ".join(kind.__name__ for kind in allowed), value)
    layers = config.get("layers_to_transform")
    if layers is not None and not all(type(layer) is int for layer in _listed(layers)):
        raise wrong(file, "layers_to_transform", "an integer, or a list of such", layers)
    of_names = ("rank_pattern", "alpha_pattern", "modules_to_save")
    patterns = [pattern for key in of_names for pattern in config.get(key) or ()]
    patterns += _listed(config.get("layers_pattern") or [])
    whole = (config.get("target_modules"), config.get("exclude_modules"))
    patterns += [pattern for pattern in whole if isinstance(pattern, str)]
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
    if type(alpha) not in (int, float) or not abs(alpha) <= _MOST_ALPHA:
        hint = "give the number with which it was trained, such as 2 r"
        raise wrong(file, "lora_alpha", f"a number of at most {_MOST_ALPHA:g}", alpha, hint)
    return rank, alpha / (rank**0.5 if config.get("use_rslora") else rank)


def _of_pattern(config: Mapping[str, Any], patterns: str, key: str, module: str) -> Any:
    """Return the value of a module: that of the first pattern that matches, or the common one."""
    for pattern, value in (config.get(patterns) or {}).items():
        if _compiled(rf"(.*\.)?({pattern})$").match(module):
            return value
    return config.get(key, 8)  # PEFT's default


def left_out_by(config: Mapping[str, Any], module: str, *, is_end: bool = False) -> str:
    """Return the key of a configuration by which an adapter leaves a module as it is; empty: it changes it.

    As PEFT's check_target_module_exists; PEFT does not read tensors of such modules. `is_end` is whether the
    module is the embedding or the head.
    """
    targets, excluded = config.get("target_modules") or [], config.get("exclude_modules") or []
    if _is_named(excluded, module):
        return "exclude_modules"
    for saved in config.get("modules_to_save") or ():
        if _compiled(rf"(^|.*\.){saved}($|\..*)").match(module):
            return "modules_to_save"
    if isinstance(targets, str) and targets.lower() == "all-linear":
        return "target_modules" if is_end else ""
    if not _is_named(targets, module):
        return "target_modules"
    layers = config.get("layers_to_transform")
    if isinstance(targets, str) or module in targets or layers in (None, []):
        return ""
    # Without a pattern a name precedes the list of layers.
    patterns = _listed(config.get("layers_pattern") or [r".*?\.[^.]*"])
    found = (_compiled(rf"(?:^|.*?\.){each}\.(?P<layer>\d+)\.").match(module) for each in patterns)
    layer = next((match["layer"] for match in found if match), None)
    return "" if layer and int(layer) in _listed(layers) else "layers_to_transform"


def _is_named(names: str | list[str], module: str) -> bool:
    if isinstance(names, str):
        return _compiled(names).fullmatch(module) is not None
    return any(f".{module}".endswith(f".{name}") for name in names)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
