"""`prejit check-model`: what it prints, its exit status, and errors of its arguments."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.numpy import save_file
from tests import own_decoders

from prejit.runtime.__main__ import main

from . import tiny_models

ROOT = Path(__file__).parents[4]
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
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    code = Path(tiny_models.__file__).read_text()
    (tmp_path / "model.py").write_text(code + MODELS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_model_that_passes_ends_with_status_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-model", "model:make_model"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "check       result  worst difference"
    assert lines[2] == "attributes  pass"
    assert [line.split()[1] for line in lines[2:-2]] == ["pass"] * 15
    assert lines[-1] == "15 checks: 15 passed, 0 failed"


def test_a_failed_check_says_a_change(directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
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


def test_params_and_a_reference_count(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_models.random_model(tiny_models.Tiny)
    values = {"places": model.places, "mixing": model.mixing}
    save_file({**values, "embedding": 0 * model.embedding}, directory / "zeros.safetensors")
    options = ["--params", "zeros.safetensors", "--reference", "model:zeros"]
    assert main(["check-model", "model:model", *options]) == 1
    printed = capsys.readouterr().out
    assert "sensitive   FAIL    0.0e+00" in printed
    assert "against     FAIL    1.0e+00" in printed
    assert "found a difference of 1.0e+00 of their spread after token 0" in printed
    assert "15 checks: 14 passed" not in printed
    save_file(values, directory / "fewer.safetensors")
    assert main(["check-model", "model:model", "--params", "fewer.safetensors"]) == 2
    assert "embedding is in the module alone" in capsys.readouterr().err


WRONG: list[tuple[list[str], str, str | None]] = [  # arguments, error, hint
    (["model"], "MODEL: expected package.module:attribute, found 'model'", "is the object"),
    (["modle:model"], "cannot import 'modle'", "did you mean 'model'?"),
    (["model:modle"], "'model' has no 'modle'", "did you mean 'model'?"),
    (["own:linen_decoder"], "check-model: expected --params beside own:linen_decoder", "orbax"),
    (["model:number"], "has no make_cache, no __call__", None),
    (["model:make_sized"], "takes no arguments, and 'model:make_sized' does", "make an object"),
    (["model:model", "--reference", "model:number"], "expected a function, found int", "tokens"),
]


def test_wrong_arguments_are_errors_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
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
