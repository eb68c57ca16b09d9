"""A directory as a reader of the documentation has it: a built bundle, models, fingerprints of machines."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.warm import WarmPython

from .snippets import ROOT

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
DEMO = """
[bundle]
name = "demo"
license = "demo-model/LICENSE"
[model]
source = "demo-model"
[generate]
batch = [1, 4]
prompt = [16]
context = [128]
[[target]]
name = "cpu-host"
"""
"""The demo's manifest with fewer buckets and targets: the pages show no figure of it."""

Shell = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def caches(build_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The build cache of the run and other caches of these tests' own, as environment variables."""
    root = tmp_path_factory.mktemp("docs-caches")
    return {
        "PREJIT_CACHE": str(build_cache),
        "PREJIT_ENVIRONMENTS": str(root / "environments"),
        "PREJIT_RUNTIME_CACHE": str(root / "runtime"),
        "XDG_STATE_HOME": str(root / "state"),
    }


@pytest.fixture(scope="session")
def shell(caches: dict[str, str], warm: WarmPython) -> Shell:
    """Runs a command line in a directory; `prejit` and `python` are those of the tests.

    A build's process is forked from a warm one and compiles quickly.
    """

    def run(command: str, directory: Path) -> subprocess.CompletedProcess[str]:
        if re.fullmatch(r"prejit (build|plan|check-model) [\w .,=/-]+", command):
            with contextlib.chdir(directory):
                return warm.prejit(*shlex.split(command)[1:], env=caches, quick=True)
        python = str(Path(sys.executable).parent)
        return subprocess.run(
            ["/bin/sh", "-c", command],
            cwd=directory,
            env={**os.environ, **caches, "PATH": f"{python}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return run


@pytest.fixture(scope="session")
def readers_directory(shell: Shell, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the snippets expect beside them."""
    directory = tmp_path_factory.mktemp("docs")
    manifests = directory / "manifests"
    for place in (directory, manifests):
        place.mkdir(exist_ok=True)
        model = place / "demo-model"
        shutil.copytree(ROOT / "manifests" / "demo-model", model)
        config = json.loads((model / "tokenizer_config.json").read_text())
        (model / "tokenizer_config.json").write_text(
            json.dumps(config | {"chat_template": CHAT_TEMPLATE})
        )
    (manifests / "demo.toml").write_text(DEMO)
    _write_encoder(directory / "encoder-model")
    (directory / "text.txt").write_text("import os\n" * 100)
    for command in ("prejit build manifests/demo.toml", "prejit fingerprint > web-3.json"):
        done = shell(command, directory)
        assert done.returncode == 0, done.stdout + done.stderr
    machine = json.loads((directory / "web-3.json").read_text())
    (directory / "saved").mkdir()
    (directory / "saved" / "web-3.json").write_text(json.dumps(machine))
    features = [name for name in machine["cpu_features"] if not name.startswith(("avx", "amx"))]
    (directory / "old.json").write_text(json.dumps(machine | {"cpu_features": features}))
    return directory


@pytest.fixture
def page_directory(
    readers_directory: Path,
    caches: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """The directory for one page: what it writes is not there for the next."""
    directory = tmp_path / "page"
    (directory / "artifacts").mkdir(parents=True)
    for each in readers_directory.iterdir():
        if each.name != "artifacts":
            (directory / each.name).symlink_to(each)
    (directory / "artifacts" / "demo").symlink_to(readers_directory / "artifacts" / "demo")
    monkeypatch.chdir(directory)
    monkeypatch.syspath_prepend(str(directory))
    for name, value in caches.items():
        monkeypatch.setenv(name, value)
    return directory


def _write_encoder(directory: Path) -> None:
    """A BERT of one layer with random weights and a tokenizer of letters."""
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, pre_tokenizers, processors
    from tokenizers.models import WordPiece

    width, inner, letters = 12, 20, "abcdefghijklmnopqrstuvwxyz"
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *letters, *(f"##{letter}" for letter in letters)]
    directory.mkdir()
    config = {
        "model_type": "bert",
        "architectures": ["BertModel"],
        "hidden_act": "gelu",
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": 3,
        "vocab_size": len(names),
        "max_position_embeddings": 64,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "pad_token_id": 0,
    }
    (directory / "config.json").write_text(json.dumps(config))
    made = Tokenizer(WordPiece({name: at for at, name in enumerate(names)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    made.save(str(directory / "tokenizer.json"))
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (len(names), width),
        "embeddings.position_embeddings.weight": (64, width),
        "embeddings.token_type_embeddings.weight": (2, width),
    }
    layer = "encoder.layer.0"
    sizes = {f"{layer}.attention.self.{name}": (width, width) for name in ("query", "key", "value")}
    sizes |= {
        f"{layer}.attention.output.dense": (width, width),
        f"{layer}.intermediate.dense": (inner, width),
        f"{layer}.output.dense": (width, inner),
    }
    for name, (outputs, inputs) in sizes.items():
        shapes |= {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}
    for name in ("embeddings", f"{layer}.attention.output", f"{layer}.output"):
        shapes |= {f"{name}.LayerNorm.{part}": (width,) for part in ("weight", "bias")}
    random = np.random.default_rng(0)
    tensors = {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    save_file(tensors, str(directory / "model.safetensors"))
