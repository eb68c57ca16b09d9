"""The decoders that are a row beside those of test_parity.py, against transformers' torch models."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.extent import sampled

from prejit.compiler.checkpoint.checkpoint import open_checkpoint
from prejit.compiler.models.layers.product_forms import Forms
from prejit.runtime.errors import CheckpointError

from .record import TIE, nearest_tokens, torch_logits
from .sibling_cases import EACH, FAMILIES, REFERENCE, STEPS, Sibling, cases
from .test_parity import TOLERANCE, check

Logits = np.ndarray[Any, np.dtype[np.float32]]
CASES = cases()
FIRST = CASES[::EACH]
"""The first of each family: `make test` runs these."""


@pytest.fixture(scope="module")
def reference() -> dict[str, Logits]:
    with np.load(REFERENCE) as recorded:
        return {name: recorded[name] for name in recorded if "/" not in name}


@pytest.mark.parametrize(
    "case", sampled(CASES, lambda case: case in FIRST), ids=lambda case: case.name
)
def test_both_forms_give_the_logits_and_greedy_tokens_that_torch_gave(
    case: Sibling, reference: dict[str, Logits], tmp_path: Path, with_kernels: Forms
) -> None:
    for forms in (None, with_kernels):
        check(case, reference, tmp_path, forms)


@pytest.mark.parametrize("case", FIRST, ids=lambda case: case.name)
def test_a_tensor_that_is_unknown_or_missing_is_named(case: Sibling, tmp_path: Path) -> None:
    case.write(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    missing = max(name for name in tensors if ".1." in name)
    unknown = f"{missing.rpartition('.')[0]}.unknown"
    save_file({unknown: tensors[missing], **tensors}, file)
    with pytest.raises(CheckpointError, match=rf"unexpected {re.escape(unknown)}"):
        _ = open_checkpoint(tmp_path).names
    save_file({name: tensor for name, tensor in tensors.items() if name != missing}, file)
    with pytest.raises(CheckpointError, match=rf"missing {re.escape(missing)}"):
        _ = open_checkpoint(tmp_path).names


def test_every_case_is_recorded_and_they_differ(reference: dict[str, Logits]) -> None:
    assert list(reference) == [case.name for case in CASES]
    assert Counter(name.rsplit("-", 1)[0] for name in reference) == dict.fromkeys(FAMILIES, EACH)
    for name, logits in reference.items():
        assert logits.shape[0] == STEPS
        assert logits.std(0).min() > 10 * TOLERANCE, f"{name}: a constant would pass"
        assert nearest_tokens(logits) >= TIE, f"{name}: rounding decides a token"


@pytest.mark.torch
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("case", sampled(CASES, lambda case: True), ids=lambda case: case.name)
def test_the_record_equals_what_torch_gives_here(
    case: Sibling, reference: dict[str, Logits], tmp_path: Path
) -> None:
    assert np.abs(torch_logits(case, tmp_path) - reference[case.name]).max() <= TOLERANCE / 2
