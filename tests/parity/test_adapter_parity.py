"""Adapters that a build merges, against PEFT's own merge: what that says is recorded by adapter_record.py."""

import numpy as np
import pytest
from tests.extent import sampled

from .adapter_cases import CASES, REFERENCE
from .adapter_record import merged_logits
from .test_parity import CONTEXT, Model

TOLERANCE = 2e-5


@pytest.mark.parametrize("case", sampled(CASES, CASES[0].__eq__), ids=lambda case: case.name)
def test_both_forms_give_the_logits_of_the_model_that_peft_merged(case, tmp_path, with_kernels):
    with np.load(REFERENCE) as recorded:
        expected = recorded[case.name]
    adapters = case.write(tmp_path)
    for forms in (None, with_kernels):
        model = Model(tmp_path / "base", CONTEXT, forms, adapters)
        difference = np.abs(model.follow(case.base.prompt, case.following) - expected).max()
        assert difference <= TOLERANCE
    assert (
        np.abs(
            Model(tmp_path / "base", CONTEXT).follow(case.base.prompt, case.following) - expected
        ).max()
        > 1e4 * TOLERANCE
    ), "the adapters change nothing"


@pytest.mark.torch
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_record_equals_what_peft_gives_here(case, tmp_path):
    pytest.importorskip("peft")
    with np.load(REFERENCE) as recorded:
        expected = recorded[case.name]
    given = merged_logits(case, tmp_path, case.write(tmp_path))
    assert np.abs(given - expected).max() <= TOLERANCE / 2
