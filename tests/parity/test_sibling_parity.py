"""The decoders that are a row beside those of test_parity.py, against transformers' torch models."""

import json
import re
from collections import Counter

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.extent import sampled

from prejit.compiler.checkpoint.checkpoint import open_checkpoint
from prejit.runtime.errors import CheckpointError

from .record import torch_logits
from .sibling_cases import EACH, FAMILIES, REFERENCE, STEPS, cases
from .test_parity import TOLERANCE, assert_measures, check

CASES = cases()
REFERENCES = (REFERENCE,)
SAMPLE = {
    *("cohere2", "deepseek_v3", "falcon", "falcon_h1", "glm4", "gpt_neox", "gpt_oss", "gptj"),
    *("lfm3", "mamba2", "nemotron", "olmo2", "opt", "phimoe", "qwen3_next", "stablelm"),
}
"""Families with each kind of attention, positions, norms, experts and state: `make test` runs their first."""
FIRST = CASES[::EACH]
SAMPLED = [case for case in FIRST if case.config["model_type"] in SAMPLE]


PORTABLE = "falcon_h1-0"
"""It has attention and a state."""


def named(is_sampled):
    """Parametrize with the cases. `make test` runs those that are sampled."""
    return pytest.mark.parametrize("case", sampled(CASES, is_sampled), ids=lambda case: case.name)


@named(SAMPLED.__contains__)
def test_logits_and_tokens_of_siblings_equal_those_of_torch(
    case, reference, tmp_path, with_kernels
):
    check(case, reference, tmp_path, with_kernels)


@named(lambda case: case.name == PORTABLE)
def test_the_portable_form_gives_the_same(case, reference, tmp_path):
    check(case, reference, tmp_path, None)


OWN_NAMES = [case for case in FIRST if case.name != "exaone-0"]
"""Those whose tensors are published under the names of the module, which errors say."""


@pytest.mark.parametrize(
    "case", sampled(OWN_NAMES, SAMPLED.__contains__), ids=lambda case: case.name
)
def test_a_tensor_that_is_unknown_or_missing_is_named(case, tmp_path):
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


def test_layers_that_draft_tokens_are_left_out_where_config_says_so(tmp_path):
    case = next(case for case in CASES if case.name == "deepseek_v3-0")
    case.write(tmp_path)
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    names, behind = open_checkpoint(tmp_path).names, case.config["num_hidden_layers"]
    drafting = {f"model.layers.{behind}.eh_proj.weight": np.zeros((3, 3), np.float32)}
    save_file(load_file(file) | drafting, file)
    with pytest.raises(CheckpointError, match=r"unexpected model.layers"):
        _ = open_checkpoint(tmp_path).names
    config.write_text(json.dumps({**case.config, "num_nextn_predict_layers": 1}))
    assert open_checkpoint(tmp_path).names == names


def test_every_case_is_recorded_and_they_differ(reference):
    recorded = {name: logits for name, logits in reference.items() if "/" not in name}
    assert list(recorded) == [case.name for case in CASES]
    assert Counter(name.rsplit("-", 1)[0] for name in recorded) == dict.fromkeys(FAMILIES, EACH)
    assert_measures(recorded, STEPS)


@pytest.mark.torch
@pytest.mark.filterwarnings("default")
@named(lambda case: True)
def test_the_record_equals_what_torch_gives_here(case, reference, tmp_path):
    assert np.abs(torch_logits(case, tmp_path) - reference[case.name]).max() <= TOLERANCE / 2
