"""Read `quantization_config` of config.json: how a published checkpoint stores quantized matrices.

    gptq                Frantar et al. 2022, arXiv 2210.17323; AutoGPTQ and GPTQModel, gptq and gptq_v2
    awq                 Lin et al. 2023, arXiv 2306.00978; AutoAWQ, the form gemm
    compressed-tensors  llm-compressor and vLLM: packed and plain integers, and float8
    fp8                 DeepSeek-AI 2024, arXiv 2412.19437, section 3.3: float8 with scales of blocks of
                        128 x 128, or of `weight_block_size`; null: one scale
    bitsandbytes        Dettmers et al. 2023, arXiv 2305.14314: nf4 and fp4; LLM.int8()

checkpoint/quantized_tensors.py reads the tensors. How many bits a matrix has, and which inputs share a scale,
follows from the shapes of its tensors where they say it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prejit.compiler.base.stored_dtypes import GROUPS_OF_32, Groups
from prejit.compiler.base.suggestions import did_you_mean, shown
from prejit.runtime.errors import CheckpointError

BITS = (4, 8)
"""Bits of an integer that are read."""
_HINT = "take the checkpoint in float32, bfloat16 or float16, or one of another form"
_FORMS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_STRATEGIES = ("tensor", "channel", "group", "block")
_LABELS = {
    "gptq": "GPTQ",
    "awq": "AWQ",
    "compressed-tensors": "compressed-tensors",
    "fp8": "FP8",
    "bitsandbytes": "bitsandbytes",
}


@dataclass(frozen=True)
class Quantization:
    """How a checkpoint stores quantized matrices.

    Attributes:
        method: `quant_method` of config.json.
        zero_offset: what must be added to stored zero points: 1 in GPTQ's first form.
        blocks: sizes (outputs, inputs) of blocks that may share a scale, where a matrix may end within one.
        groups: the groups that hold published integers in int4.
    """

    method: str
    zero_offset: int = 0
    blocks: tuple[tuple[int, int], ...] = ()
    groups: Groups = GROUPS_OF_32

    @property
    def label(self) -> str:
        """The name of the method for people."""
        return _LABELS[self.method]


def read_quantization(
    file: Path, found: object, others: tuple[str, ...] = ()
) -> Quantization | None:
    """Return how a checkpoint stores quantized matrices.

    Returns:
        None: matrices are not quantized, or the family reads them itself.

    Raises:
        CheckpointError: a setting is not supported; the error names file, key, value and what is allowed.
    """
    if not found:
        return None
    if not isinstance(found, dict):
        raise _wrong(file, "", "an object", found)
    method = found.get("quant_method")
    if isinstance(method, str) and method in others:
        return None
    if not (isinstance(method, str) and method in _READERS):
        known = sorted([*_READERS, *others])
        guess = did_you_mean(str(method), known)
        raise _wrong(file, "quant_method", " or ".join(map(shown, known)), method, guess)
    return _READERS[method](file, found)


def _wrong(file: Path, key: str, expected: str, found: object, guess: str = "") -> CheckpointError:
    where = f"quantization_config.{key}" if key else "quantization_config"
    return CheckpointError(
        f"{file}: {where}: expected {expected}, found {shown(found)}{guess}", hint=_HINT
    )


def _require(file: Path, settings: Mapping[str, Any], key: str, allowed: Iterable[Any]) -> None:
    """Check that a setting is missing, null, or one of the allowed values."""
    value, allowed = settings.get(key.rpartition(".")[2]), tuple(allowed)
    if value is not None and not any(type(value) is type(a) and value == a for a in allowed):
        raise _wrong(file, key, " or ".join(map(shown, allowed)), value)


def _gptq(file: Path, settings: Mapping[str, Any]) -> Quantization:
    _require(file, settings, "bits", BITS)
    _require(file, settings, "pack_dtype", ["int32"])
    _require(file, settings, "is_marlin_format", [False])
    for key in ("checkpoint_format", "format"):
        _require(file, settings, key, ["gptq", "gptq_v2"])
    form = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    blocks = _groups(file, settings)
    zeros = settings.get("sym") is False
    # Eight bits, and groups whose inputs do not lie beside each other, are rounded again.
    is_rounded = settings.get("desc_act") or settings.get("bits") == 8
    held = GROUPS_OF_32 if is_rounded else _held(blocks, zeros=zeros)
    return Quantization("gptq", int(form == "gptq"), blocks, held)


def _awq(file: Path, settings: Mapping[str, Any]) -> Quantization:
    _require(file, settings, "bits", [4])
    _require(file, settings, "backend", ["auto", "autoawq", "legacy_awq"])
    for key in ("version", "format"):
        _require(file, settings, key, ["gemm", "GEMM"])
    blocks, zeros = _groups(file, settings), settings.get("zero_point") is not False
    return Quantization("awq", blocks=blocks, groups=_held(blocks, zeros=zeros))


def _held(blocks: Iterable[tuple[int, int]], *, zeros: bool) -> Groups:
    return Groups.holding((inputs for _, inputs in blocks), zeros=zeros)


def _groups(file: Path, settings: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    """Return the size of groups as that of blocks; none: all inputs of an output are a group."""
    size = settings.get("group_size", -1)
    if type(size) is not int or (size < 1 and size != -1):
        raise _wrong(file, "group_size", "a positive integer, or -1", size)
    return () if size == -1 else ((1, size),)


def _compressed_tensors(file: Path, settings: Mapping[str, Any]) -> Quantization:
    _require(file, settings, "quantization_status", ["compressed"])
    _require(file, settings, "format", [*_FORMS, "mixed-precision"])
    for key in ("transform_config", "sparsity_config"):
        value = settings.get(key)
        plain = isinstance(value, dict) and value.get("format") == "dense"
        if value and not plain and (not isinstance(value, dict) or any(value.values())):
            raise _wrong(file, key, "none", value)
    groups = settings.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(one, dict) for one in groups.values()):
        raise _wrong(file, "config_groups", "an object of objects", groups)
    blocks, held = [], list[Groups]()
    for name, group in groups.items():
        key = f"config_groups.{name}"
        _require(file, group, f"{key}.format", _FORMS)
        weights = group.get("weights")
        if not isinstance(weights, dict):
            raise _wrong(file, f"{key}.weights", "an object", weights)
        kind = weights.get("type", "int")
        _require(file, weights, f"{key}.weights.type", ["int", "float"])
        _require(file, weights, f"{key}.weights.num_bits", [8] if kind == "float" else BITS)
        _require(file, weights, f"{key}.weights.strategy", _STRATEGIES)
        blocks += _block(file, f"{key}.weights.block_structure", weights.get("block_structure"))
        size = weights.get("group_size")
        sizes = [(1, size)] if type(size) is int and size > 0 else []
        blocks += sizes  # the last group of a matrix may have fewer inputs
        if weights.get("num_bits") == 4:
            held.append(_held(sizes, zeros=weights.get("symmetric") is False))
    groups_of_all = Groups(
        min((each.size for each in held), default=32), any(each.zeros for each in held)
    )
    return Quantization(
        "compressed-tensors", blocks=tuple(dict.fromkeys(blocks)), groups=groups_of_all
    )


def _fp8(file: Path, settings: Mapping[str, Any]) -> Quantization:
    _require(file, settings, "fmt", ["e4m3", "float8_e4m3fn"])
    _require(file, settings, "expert_dtype", ["fp8"])
    blocks = _block(file, "weight_block_size", settings.get("weight_block_size", [128, 128]))
    return Quantization("fp8", blocks=tuple(blocks))


def _block(file: Path, key: str, value: object) -> list[tuple[int, int]]:
    """Return a size of blocks, or none."""
    if value is None:
        return []
    is_pair = isinstance(value, list) and len(value) == 2
    if not is_pair or not all(type(size) is int and size > 0 for size in value):  # type: ignore[attr-defined]
        raise _wrong(file, key, "two positive integers or null", value)
    assert isinstance(value, list)
    return [(value[0], value[1])]


def _bitsandbytes(file: Path, settings: Mapping[str, Any]) -> Quantization:
    _require(file, settings, "bnb_4bit_quant_type", ["nf4", "fp4"])
    return Quantization("bitsandbytes")


_READERS = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "bitsandbytes": _bitsandbytes,
}
"""The methods that are read, each with the function that reads its settings."""
