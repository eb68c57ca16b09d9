"""`prejit check-model`: what it prints, its exit status, and errors of its arguments."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests import own_decoders
from tests.parity import sibling_cases

from prejit.compiler.comparing import inspected_programs
from prejit.runtime.__main__ import main
from prejit.runtime.base.wording import size

from . import tiny_models

MODELS = """
model = random_model(Tiny)
narrow = random_model(NarrowLogits)
number = 3
def make_model():
    return random_model(Tiny)
def make_sized(size):
    return random_model(Tiny)
def zeros(tokens):
    return np.zeros((*tokens.shape, V)) + np.arange(V)
"""


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    code = Path(tiny_models.__file__).read_text()
    (tmp_path / "model.py").write_text(code + MODELS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_model_that_passes_ends_with_status_0(said):
    lines = said("check-model", "model:make_model").splitlines()
    assert lines[0] == "check       result  worst difference"
    assert lines[2] == "attributes  pass"
    assert [line.split()[1] for line in lines[2:-2]] == ["pass"] * 15
    assert lines[-1] == "15 checks: 15 passed, 0 failed"


def test_a_failed_check_says_a_change(directory, capfd):
    (directory / "loud.py").write_text("print('hello')\nfrom model import narrow as model\n")
    assert main(["check-model", "loud:model"]) == 1
    printed = capfd.readouterr()
    assert "hello" in printed.err, "what is printed at import goes to stderr"
    assert printed.out.splitlines()[4:] == [
        *("logits      FAIL", ""),
        "logits: expected float32 with B = 1, T = 1, every = False, found bfloat16",
        *("  change: return `logits.astype(jnp.float32)`", ""),
        "3 checks: 2 passed, 1 failed",
    ]


@pytest.mark.thorough
def test_params_and_a_reference_count(directory, ran, said):
    model = tiny_models.random_model(tiny_models.Tiny)
    values = {"places": model.places, "mixing": model.mixing}
    save_file({**values, "embedding": 0 * model.embedding}, directory / "zeros.safetensors")
    options = ["--params", "zeros.safetensors", "--reference", "model:zeros"]
    printed = said("check-model", "model:model", *options, status=1)
    assert "sensitive   FAIL    0.0e+00" in printed
    assert "against     FAIL    1.0e+00" in printed
    assert "found a difference of 1.0e+00 of their spread after token 0" in printed
    assert "15 checks: 14 passed" not in printed
    save_file(values, directory / "fewer.safetensors")
    printed = ran("check-model", "model:model", "--params", "fewer.safetensors", status=2)
    assert "embedding is in the module alone" in printed.err


WRONG = [  # arguments, error, hint
    (["model"], "MODEL: expected package.module:attribute, found 'model'", "is the object"),
    (["bert.toml"], "expected package.module:attribute, found 'bert.toml'", "directory or .gguf"),
    (["modle:model"], "cannot import 'modle'", "did you mean 'model'?"),
    (["model:modle"], "'model' has no 'modle'", "did you mean 'model'?"),
    (["own:linen_decoder"], "check-model: expected --params beside own:linen_decoder", "orbax"),
    (["model:number"], "has no make_cache, no __call__", None),
    (["model:make_sized"], "takes no arguments, and 'model:make_sized' does", "make an object"),
    (["model:model", "--reference", "model:number"], "expected a function, found int", "tokens"),
]


def test_wrong_arguments_are_errors_without_a_traceback(capsys):
    Path("own.py").write_text(Path(own_decoders.__file__).read_text())
    for arguments, error, hint in WRONG:
        assert main(["check-model", *arguments]) in (1, 2)
        printed = capsys.readouterr()
        assert printed.out == ""
        assert error in printed.err
        assert "Traceback" not in printed.err
        if hint is None:
            assert "check-model MODULE" not in printed.err
        else:
            assert hint in printed.err.partition("hint:")[2]


def test_an_adapter_says_what_a_manifest_has_to_say(tmp_path, said):
    config = {"peft_type": "LORA", "r": 3, "rank_pattern": {"k_proj": 7}, "lora_alpha": 6}
    modules = [f"base_model.model.model.layers.0.self_attn.{end}" for end in ("q_proj", "k_proj")]
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    zeros = np.zeros((7, 8), np.float32)
    tensors = {f"{module}.lora_{side}.weight": zeros for module in modules for side in "AB"}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    printed = said("check-model", tmp_path)
    assert printed.startswith("an adapter of rank 7 that changes k_proj, q_proj\n")
    assert f'adapters = ["{tmp_path}"] # in [model]' in printed
    assert 'slots = 8\nrank = 7\ntargets = ["k_proj", "q_proj"]\n' in printed
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    assert "[adapters]" not in said("check-model", tmp_path)


def test_a_published_model_has_its_sizes_or_says_what_is_not_built(
    tmp_path, capsys, ran, monkeypatch
):
    monkeypatch.setattr(inspected_programs, "measure_reading", lambda: 2e9)
    case = next(case for case in sibling_cases.cases() if case.name == "qwen3_moe-0")
    case.write(tmp_path / "mixture")
    printed, tensors = ran("check-model", tmp_path / "mixture").out, case.tensor_shapes
    parameters = sum(math.prod(shape) for shape in tensors.values())
    assert f"qwen3_moe, for [generate]: {parameters:,} parameters" in printed
    config = case.config
    cache = 2 * 4 * 3 * config["num_key_value_heads"] * config["head_dim"]
    assert f"KV cache in float32: {size(cache)} for a token, {size(128 * cache)} for all" in printed
    assert f"missing: {tmp_path / 'mixture' / 'tokenizer.json'}" in printed
    experts = sum(math.prod(each) for name, each in tensors.items() if ".experts." in name)
    read = 4 * (parameters - experts * (4 - 2) // 4)
    largest = max(math.prod(each) for each in tensors.values())
    sizes = (4 * parameters, 500_000_000 + 6 * largest, read)
    float32 = "  +".join(map(re.escape, ["float32", *map(size, sizes), f"{2e9 / read:,.0f}"]))
    assert re.search(f"^{float32}$", printed, re.MULTILINE)
    (tmp_path / "mixture" / "m.gguf").write_bytes(b"")
    printed = ran("check-model", "mixture/m.gguf", status=1)
    assert "mixture/m.gguf: expected a model of" in printed.err
    (tmp_path / "mixture" / "m.gguf").unlink()
    wrong = json.dumps({**config, "num_experts_per_tok": 9})
    (tmp_path / "mixture" / "config.json").write_text(wrong)
    assert main(["check-model", str(tmp_path / "mixture")]) != 0
    said = "num_experts_per_tok: expected at most num_experts = 4, found 9"
    assert said in capsys.readouterr().err
    case = next(case for case in sibling_cases.cases() if case.name == "gemma4-0")
    case.write(tmp_path / "layers")  # its head is its embedding, beside a table for the layers
    assert main(["check-model", str(tmp_path / "layers")]) == 0
    parameters = sum(math.prod(shape) for shape in case.tensor_shapes.values())
    rows, width = case.tensor_shapes["model.embed_tokens_per_layer.weight"]
    read = size(4 * (parameters - (rows - 1) * width))
    assert re.search(rf"^float32 .* {re.escape(read)}  ", capsys.readouterr().out, re.MULTILINE)
